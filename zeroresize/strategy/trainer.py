"""Training with a strategy for each range of lengths, switched inside every optimizer step (HotSPa, hot switching)."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from zeroresize.comm.collectives import all_reduce, message_device
from zeroresize.layers.balanced_linear import autocast_dtype
from zeroresize.resharding.agreement import fingerprint, meet_over, meet_prepared, require_same
from zeroresize.strategy.gradient_norm import clip_grad_norm_
from zeroresize.strategy.length_range import LengthRange, as_ranges, with_limits
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed
from zeroresize.strategy.running.activations import find_activations
from zeroresize.strategy.running.one_f_one_b import Loss, PipelineStage
from zeroresize.strategy.running.packing import MicroBatch, Work, num_tokens, spread_and_pack
from zeroresize.strategy.running.random_numbers import seed_of
from zeroresize.strategy.running.step_plan import Visit, plan_visits
from zeroresize.strategy.running.switch_tour import TYPICAL_LINKS, SwitchTour
from zeroresize.strategy.step_report import RangeReport, StepReport
from zeroresize.strategy.switching.switch import SwitchReport
from zeroresize.strategy.switching.transfers import LinkSpeeds
from zeroresize.utils.value_checks import number


class StrategyTrainer:
    """Trains sequences of each range of lengths under the range's strategy, and steps the optimizer once for all.

    ::

        ranges = [LengthRange(1024, Strategy(dp=4)), LengthRange(8192, Strategy(tp=4))]
        model = SwitchableModel(layers, strategies=[one.strategy for one in ranges])
        optimizer = torch.optim.AdamW(model.parameters())
        trainer = StrategyTrainer(model, optimizer, ranges, loss=token_loss, max_tokens=8192)
        for sequences in batches:
            print(trainer.step(sequences).loss)

    A step visits each strategy that has sequences once, in the order whose switches take least (a travelling
    salesman's tour from home and back). The sequences of a visit are packed into micro-batches, replica by replica, and
    run in 1F1B. A token counts the same under every strategy, so the step is that of training under one of them.

    Args:
        model: under its home strategy between steps. A rank that a strategy leaves out takes part in the switches.
        optimizer: of the model's parameters; after ``model.rehome`` of those that it has then. On a rank that home
            leaves out, of none: ``AdamW([{"params": []}])``.
        ranges: rising, each with one of the model's strategies.
        loss: ``loss(output of the last layer, packed)``, summed over the tokens, not averaged.
        max_tokens: of a micro-batch of one replica, as its memory allows, where a range does not say; None for as many
            as the longest sequence of its range has.
        grad_clip: largest norm of the gradients; 0 for no clipping.
        work: what sequences cost, by which replicas share them; their tokens by default.
        links: between the ranks, by which switches are ordered.
        seed: of what layers draw at random, such as dropout's masks: they are a function of it, the step, the
            strategy's place in the step, the replica, the stage and the micro-batch. The generators stay as they are.

    Attributes:
        num_steps: how many are done; set it, alike on all ranks, where training is resumed.

    Raises:
        ValueError: for ranges that do not rise or whose strategies the model does not have, ``max_tokens`` below the
            longest sequence of a range, and layers that do not run on the meta device.
    """

    def __init__(
        self,
        model: SwitchableModel,
        optimizer: torch.optim.Optimizer,
        ranges: Sequence[LengthRange],
        *,
        loss: Loss,
        max_tokens: int | None = None,
        grad_clip: float = 0.0,
        work: Work = num_tokens,
        links: LinkSpeeds = TYPICAL_LINKS,
        seed: int = 0,
    ) -> None:
        self.ranges = with_limits(as_ranges(ranges), max_tokens)
        self.model, self.optimizer = model, optimizer
        number("grad_clip", grad_clip, least=0.0)
        for one in self.ranges:
            if one.strategy not in model.strategies:
                known = ", ".join(map(str, model.strategies))
                raise ValueError(f"length range {one}: the model's strategies are {known}; add(strategy) takes another")
        self._loss, self._grad_clip, self._work = loss, grad_clip, work
        self._seed, self.num_steps = seed, 0
        self._tour = SwitchTour(model, links)
        self._tour.order([one.strategy for one in self.ranges])
        self._activations = find_activations(model.whole_layers)
        self._meet = meet_over(model.process_group, model.device)

    def step(self, sequences: Sequence[Tensor]) -> StepReport:
        """One optimizer step on a mini-batch; collective.

        Args:
            sequences: rows [length + 1] of int64, the same on every rank.

        Raises:
            ValueError: for no sequences, a row of another kind, one that is longer than the last range, an optimizer
                that does not step the model's parameters, and a model that is not under its home strategy; the other
                ranks raise a RuntimeError. Nothing has run then.
            RuntimeError: if ranks were given different sequences, or one does not come. A step that fails while it
                runs is to be repeated from a checkpoint.
        """
        begin = time.perf_counter()
        visits = self._agreed_visits(sequences, trains=True)
        loss, by_range, switches = self._run(visits, sequences, trains=True)
        switches.append(self.model.collect())
        norm = float(clip_grad_norm_(self.model, self._grad_clip)) if self._grad_clip else None
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        self._synchronize()
        total = sum(one.num_tokens for one in by_range)
        return StepReport(loss, total, time.perf_counter() - begin, tuple(by_range), tuple(switches), norm)

    def evaluate(self, sequences: Sequence[Tensor]) -> float:
        """Mean loss of a token, without gradients and in evaluation mode, under the ranges' strategies; collective.

        Raises:
            Exception: as :meth:`step`, but for the optimizer, which is not asked.
        """
        visits = self._agreed_visits(sequences, trains=False)
        loss, _, _ = self._run(visits, sequences, trains=False)
        self.model.switch_to(self.model.home, gradients=False)
        return loss

    def _agreed_visits(self, sequences: Sequence[Tensor], *, trains: bool) -> list[Visit]:
        try:
            visits = self._visits(sequences, trains)
            told = [str(visits), str(self.model.home), trains, self._grad_clip, _digest(sequences)]
            told += [self._seed, self.num_steps, str(autocast_dtype(self.model.device.type))]
            own: tuple[float, float] | Exception = fingerprint(json.dumps(told)), 0.0
        except Exception as error:  # the others must hear of any
            own = error
        table = meet_prepared(self._meet, own)
        require_same(
            [one for one, *_ in table],
            "the sequences, the ranges, max_tokens, grad_clip, seed, num_steps or torch.autocast",
            self._meet,
        )
        return visits

    def _visits(self, sequences: Sequence[Tensor], trains: bool) -> list[Visit]:
        if self.model.current != self.model.home:
            raise ValueError(f"the model is under {self.model.current}, not its home: call collect() before")
        if not sequences:
            raise ValueError("sequences=[]: at least one is needed")
        wrong = [
            index
            for index, one in enumerate(sequences)
            if one.dtype != torch.int64 or one.dim() != 1 or len(one) < 2 or one.is_meta
        ]
        if wrong:
            raise ValueError(f"sequences {wrong} are no rows of at least two tokens of int64")
        if trains:
            self._require_parameters()
        visits = {one.strategy: one for one in plan_visits([len(one) - 1 for one in sequences], self.ranges)}
        return [visits[strategy] for strategy in self._tour.order(list(visits))]

    def _require_parameters(self) -> None:
        held = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        home = dict(self.model.named_parameters())
        missing = [name for name, one in home.items() if one.requires_grad and id(one) not in held]
        num_others = len(held - {id(one) for one in home.values()})
        if missing or num_others:
            raise ValueError(
                f"the optimizer does not step the parameters of the home strategy {self.model.home}: it lacks "
                f"{missing}, and has {num_others} others; make it of model.parameters()"
            )

    def _run(
        self, visits: Sequence[Visit], sequences: Sequence[Tensor], *, trains: bool
    ) -> tuple[float, list[RangeReport], list[SwitchReport]]:
        """The mean loss, with gradients accumulated where it ``trains``; the last strategy stays in force."""
        lengths = [len(one) - 1 for one in sequences]
        total = sum(lengths)
        mean = torch.zeros((), dtype=torch.float64, device=message_device(self.model.process_group, self.model.device))
        by_range, switches = [], []
        for index, visit in enumerate(visits):
            if self.model.current != visit.strategy:
                switches.append(self.model.switch_to(visit.strategy, gradients=trains))
            begin = time.perf_counter()
            rows = [sequences[index] for index in visit.members]
            own = [lengths[index] for index in visit.members]
            replicas = spread_and_pack(own, visit.max_tokens, visit.strategy.dp, self._work)
            mean += self._run_own(rows, replicas, total, trains, seed_of(self._seed, self.num_steps, index))
            self._synchronize()
            seconds, num_micro_batches = time.perf_counter() - begin, tuple(map(len, replicas))
            by_range.append(RangeReport(visit.strategy, visit.up_to, len(own), sum(own), num_micro_batches, seconds))
        all_reduce(mean, self.model.process_group)
        return float(mean), by_range, switches

    def _run_own(
        self, rows: Sequence[Tensor], replicas: Sequence[Sequence[MicroBatch]], total: int, trains: bool, seed: int
    ) -> Tensor:
        """This rank's part; of the losses of its replica's micro-batches each counts on one rank."""
        model, position = self.model, self.model.position
        nothing = torch.zeros((), dtype=torch.float64)
        if position is None:
            return nothing
        layers = model.stage_layers
        pipeline = model.groups_of(model.current).pipeline
        seed = seed_of(seed, position.replica, position.stage)
        stage = PipelineStage(list(layers.values()), min(layers), self._activations, pipeline, model.device, seed)
        micro_batches = [
            Packed.of([rows[index] for index in own]).to(model.device) for own in replicas[position.replica]
        ]

        def share_of_mean(output: Tensor, packed: Packed) -> Tensor:
            return self._loss(output, packed) / total

        with nullcontext() if trains else _evaluating(layers.values()):
            found = (stage.train if trains else stage.evaluate)(micro_batches, share_of_mean)
        return found.to(nothing.device) if position.shard == 0 else nothing

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def _digest(sequences: Sequence[Tensor]) -> str:
    found = hashlib.blake2b(json.dumps([len(one) for one in sequences]).encode(), digest_size=16)
    found.update(torch.cat([one.cpu() for one in sequences]).numpy().tobytes())
    return found.hexdigest()


@contextmanager
def _evaluating(layers: Iterable[nn.Module]) -> Iterator[None]:
    modules = [module for layer in layers for module in layer.modules()]
    trained = [module for module in modules if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True
