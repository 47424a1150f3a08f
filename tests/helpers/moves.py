"""Everything that moves by the move engine, behind one face: each can be made to fail in every way that the engine has.

A kind of move trains a tiny model on three ranks, in a group that waits for seconds only, and then moves.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from helpers import parallel_layers, pipelines, query_heads, strategies
from zeroresize.comm import words
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup
from zeroresize.pipeline import move_layers, moving_during_backward, repack
from zeroresize.pipeline.layer_move import LayerMove
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.plan.strategy import Strategy
from zeroresize.resharding.units.moving_units import UnitMove, move_units
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.switching.optimizer_move import OptimizerMove
from zeroresize.strategy.switching.switch import Switch

NUM_RANKS = 3
#: Small, so that messages travel in several rounds.
MAX_BYTES = 2000


class KindOfMove:
    """What all kinds have in common, beside methods of one name.

    ``start`` makes the model and trains it, ``train`` makes a step after a move. ``move`` moves in several rounds, in
    which every rank sends or receives; rank 1 does; ``move_elsewhere`` to another place, ``move_nowhere`` to one that
    does not exist, a ValueError. ``snapshot`` is what a move that fails must leave, ``assert_unchanged`` looks whether
    it has. Within ``other_optimizer_state`` this rank's differs; it yields what ranks are told.

    Attributes:
        part: the class of a rank's part of the move.
        computes_meanwhile: whether the pipeline's own step fails, too, where a rank is gone.
        differs_in: what ranks that move to different places are told.
    """

    part: type
    computes_meanwhile = False
    differs_in: str
    has_optimizer_state = True

    def __init__(self, world, limit_s=5.0):
        self.limit_s = limit_s
        self.group = dist.new_group(list(range(world.size())), timeout=timedelta(seconds=limit_s))
        self.rank = world.rank()
        self.start()
        self.before = self.snapshot()

    def fails(self, call, kinds=RuntimeError, within_s=20.0):
        """The text of the error that ``call`` ends with; nothing has changed then."""
        begin = time.perf_counter()
        with pytest.raises(kinds) as caught:
            call()
        seconds = time.perf_counter() - begin
        assert seconds < within_s, f"it took {seconds:.1f} s of {within_s}: {caught.value}"
        self.assert_unchanged()
        return f"{type(caught.value).__name__}: {caught.value}"

    def goes_on(self):
        """Afterwards a move is possible, and training goes on."""
        self.move()
        self.train()


class Units(KindOfMove):
    part = UnitMove
    differs_in = "the segments, their owners or the targets"
    meet, stepped = None, "1.up"

    def start(self):
        self.model = parallel_layers.block(self.group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.segments = parallel_layers.segments_of(self.model, self.group)
        self.train()

    def train(self):
        self.model(torch.ones(2, 3, parallel_layers.WIDTH, dtype=torch.float64)).square().mean().backward()
        self.optimizer.step()

    def snapshot(self):
        return parallel_layers.held(self.segments, self.optimizer)

    def assert_unchanged(self):
        objects, values = self.snapshot()
        assert objects == self.before[0]
        assert parallel_layers.same(values, self.before[1])

    def _move(self, targets):
        report = move_units(
            self.segments,
            targets,
            process_group=self.group,
            optimizer=self.optimizer,
            meet=self.meet,
            max_bytes=MAX_BYTES,
        )
        assert report.num_rounds > 2

    def move(self):
        self._move(parallel_layers.uneven(NUM_RANKS, 2))

    def move_elsewhere(self):
        self._move(parallel_layers.uneven(NUM_RANKS, 1))

    def move_nowhere(self):
        self._move({"1.down": OwnershipMap.home(parallel_layers.NEURONS + 3, NUM_RANKS)})

    @contextmanager
    def other_optimizer_state(self):
        step = self.optimizer.state[self.model.get_submodule(self.stepped).weight]["step"]
        step += 1
        yield f"the ranks of the group hold different optimizer state of {self.stepped}"
        step -= 1


class UnitsOfABalancer(Units):
    """The ranks meet over a group of their own beside the one that units travel over."""

    def start(self):
        words.WAIT_S = 0.2  # for what other ranks that fail may report
        self.meet = Exchange(CpuGroup(self.group, {})).meet
        super().start()


class PartsOfHeads(Units):
    """Ranks hold the same heads, and copies of keys' heads, before and after."""

    stepped = "1.q"

    def start(self):
        self.model = query_heads.divided(self.group, divisible=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.segments = [attention.out.segment for attention in self.model]
        self._move(self._targets(26, 66, 36))
        self.train()

    def train(self):
        self.model(query_heads.X).square().mean().backward()
        self.optimizer.step()
        query_heads.require_copies_alike(self.model, self.group)

    def _targets(self, *slices):
        return {segment.name: segment.owned.with_counts(slices) for segment in self.segments}

    def move(self):
        self._move(self._targets(58, 28, 42))

    def move_elsewhere(self):
        self._move(self._targets(60, 20, 48))

    def move_nowhere(self):
        self._move({"1.out": OwnershipMap.home(127, NUM_RANKS)})


class Layers(KindOfMove):
    part = LayerMove
    differs_in = "the boundaries of the stages"
    there, elsewhere, nowhere = (0, 3, 6, 7), (0, 1, 5, 7), (0, 0, 6, 7)

    def start(self):
        self.pipeline = pipelines.pipeline_of(self.group)
        self.optimizer = torch.optim.AdamW(pipelines.groups_of(self.pipeline.named_parameters()))
        self.boundaries = self.pipeline.boundaries
        pipelines.train_step(self.pipeline, self.optimizer, 0)

    def train(self):
        pipelines.train_step(self.pipeline, self.optimizer, 1)

    def snapshot(self):
        return pipelines.held(self.pipeline, self.optimizer)

    def assert_unchanged(self):
        assert self.pipeline.boundaries == self.boundaries and self.pipeline.process_group is self.group
        pipelines.assert_same(self.snapshot(), self.before)

    def _move(self, boundaries):
        report = move_layers(self.pipeline, boundaries, optimizer=self.optimizer, max_bytes=MAX_BYTES)
        assert report.num_rounds > 2

    def move(self):
        self._move(self.there)

    def move_elsewhere(self):
        self._move(self.elsewhere)

    def move_nowhere(self):
        self._move(self.nowhere)

    @contextmanager
    def other_optimizer_state(self):
        self.optimizer.param_groups[1]["lr"] *= 2
        yield "or the settings of the optimizer's parameter groups: [[0, 2], [1]]"
        self.optimizer.param_groups[1]["lr"] /= 2


class LayersDuringBackward(Layers):
    computes_meanwhile = True

    def snapshot(self):
        """What only the optimizer's step changes: the step within the block makes gradients, and changes buffers."""
        parameters = dict(self.pipeline.named_parameters())
        return {
            name: value
            for name, value in super().snapshot().items()
            if name in parameters or (" " in name and not name.endswith("gradient"))
        }

    def assert_unchanged(self):
        super().assert_unchanged()
        assert not self.pipeline.module.watchers.everyone

    def _move(self, boundaries):
        options = {"optimizer": self.optimizer, "max_bytes": MAX_BYTES}
        words, target = pipelines.batch(2)
        with moving_during_backward(self.pipeline, boundaries, **options) as move:
            self.pipeline.step(words, target=target)
        assert move.report.num_rounds > 2


class Repacking(Layers):
    there, elsewhere, nowhere = 2, 1, 4

    def _move(self, num_stages):
        repack(self.pipeline, self.optimizer, num_stages=num_stages, max_bytes=MAX_BYTES)

    def train(self):
        if not self.pipeline.is_released:
            super().train()


class Switches(KindOfMove):
    part = Switch
    differs_in = "where the switch leads, or how it was planned"
    has_optimizer_state = False
    here, there, elsewhere = Strategy(1, 3, shares=(1, 2, 3)), Strategy(1, 1, 3), Strategy(3)

    def start(self):
        self.model = SwitchableModel(
            strategies.layers_of(),
            strategies=[self.here, self.there, self.elsewhere],
            process_group=self.group,
            max_bytes=MAX_BYTES,
        )
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW([{"params": parameters}], lr=0.0, weight_decay=0.0)
        self.train()
        self.wholes = {name: one.detach() for name, one in strategies.whole_tensors(strategies.layers_of()).items()}

    def train(self):
        """Of a rank the optimizer's strategy leaves out: a step of nothing."""
        self.model.collect()
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self):
        state = self.optimizer.state
        moments = [one["exp_avg"].clone() for one in state.values()]
        return (self.model.optimizer_strategy, self.model.current, [id(one) for one in state]), moments

    def assert_unchanged(self):
        places, moments = self.snapshot()
        assert places == self.before[0]
        assert all(map(torch.equal, moments, self.before[1]))
        strategies.assert_holds(self.model, self.wholes)

    def _move(self, strategy):
        assert self.model.switch_to(strategy).num_rounds > 2

    def move(self):
        self._move(self.there)

    def move_elsewhere(self):
        self._move(self.elsewhere)

    def move_nowhere(self):
        self._move(Strategy(1, 2))


class MovesOfOptimizer(Switches):
    part = OptimizerMove
    differs_in = "the strategy, or the settings of the optimizer's parameter groups"
    has_optimizer_state = True

    def _move(self, strategy):
        assert self.model.move_optimizer(strategy, self.optimizer).num_rounds > 2

    @contextmanager
    def other_optimizer_state(self):
        """Of a tensor that is not divided: all ranks hold it."""
        norm = dict(self.model.named_parameters())["layers.1.norm.weight"]
        self.optimizer.state[norm]["step"] += 1
        yield "the ranks of the group hold different optimizer state of layers.1.norm.weight"
        self.optimizer.state[norm]["step"] -= 1


KINDS = {
    "units": Units,
    "units of a balancer": UnitsOfABalancer,
    "parts of heads": PartsOfHeads,
    "layers": Layers,
    "layers during backward": LayersDuringBackward,
    "re-packing": Repacking,
    "switch": Switches,
    "moves of the optimizer": MovesOfOptimizer,
}
