"""A switch that cannot be made leaves every rank that lives with its weights, and tells all of them why."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from helpers.strategies import assert_holds, give_ones, layers_of, switchable
from torch import nn

from zeroresize.layers.segment import Segment
from zeroresize.plan.strategy import Strategy
from zeroresize.resharding import agreement
from zeroresize.resharding.agreement import NotEnoughMemoryError
from zeroresize.resharding.transport import Transport
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.placement.placement import Placement
from zeroresize.utils.torch_private import known_groups

UNEVEN, PIPELINE, REPLICAS = Strategy(1, 3, shares=(1, 2, 3)), Strategy(1, 1, 3), Strategy(3)
UNEVEN_PIPELINE = Strategy(1, 1, 2, ranks=(2, 0))
HALVES, PAIR = Strategy(1, 2), Strategy(2)


class Training:
    """A model that has made a step, in a group that waits for seconds only."""

    def __init__(self, group, strategies, **options):
        self.group = dist.new_group(list(range(group.size())), timeout=timedelta(seconds=5))
        self.model, self.wholes = switchable(self.group, strategies, **options)
        self.optimizer = torch.optim.AdamW([{"params": list(self.model.parameters())}], lr=0.0, weight_decay=0.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def fails(self, call, kind=RuntimeError):
        """The text of the error; nothing has changed then."""
        before = self.model.optimizer_strategy, self.model.current, [id(one) for one in self.optimizer.state]
        state = [one["exp_avg"].clone() for one in self.optimizer.state.values()]
        with pytest.raises(kind) as caught:
            call(self.model)
        assert before == (self.model.optimizer_strategy, self.model.current, [id(one) for one in self.optimizer.state])
        assert all(map(torch.equal, state, [one["exp_avg"] for one in self.optimizer.state.values()]))
        assert_holds(self.model, self.wholes)
        return f"{type(caught.value).__name__}: {caught.value}"


def test_switches_that_ranks_do_not_agree_on_or_that_do_not_fit_change_nothing(run_ranks, monkeypatch):
    def check(rank, group):
        training = Training(group, [UNEVEN, PIPELINE, REPLICAS])
        model, messages = training.model, []
        messages += [training.fails(lambda model: model.switch_to(REPLICAS if rank == 2 else PIPELINE))]
        messages += [
            training.fails(lambda model: model.switch_to(HALVES if rank == 1 else PIPELINE), (ValueError, RuntimeError))
        ]
        messages += [training.fails(lambda model: model.add(HALVES if rank == 1 else PAIR))]
        messages += [training.fails(lambda model: model.add(Strategy(5)), ValueError)]
        messages += [
            training.fails(lambda model: model.move_optimizer(REPLICAS if rank == 2 else PIPELINE, training.optimizer))
        ]
        training.optimizer.param_groups[0]["lr"] = float(rank)
        messages += [training.fails(lambda model: model.move_optimizer(PIPELINE, training.optimizer))]
        training.optimizer.param_groups[0]["lr"] = 0.0
        if rank == 1:
            monkeypatch.setattr(agreement, "free_bytes", lambda device: 1000)
            monkeypatch.setattr(agreement, "_place_of", lambda device: "a small device")
        messages += [training.fails(lambda model: model.switch_to(PIPELINE), NotEnoughMemoryError)]
        monkeypatch.undo()
        model.switch_to(PIPELINE)
        messages += [training.fails(lambda model: model.move_optimizer(REPLICAS, training.optimizer), ValueError)]
        give_ones(model)
        messages += [training.fails(lambda model: model.switch_to(REPLICAS, gradients=False), ValueError)]
        first = next(iter(next(iter(model.stage_layers.values())).parameters()))
        dense, first.grad = first.grad, first.grad.to_sparse()
        training.fails(lambda model: model.collect(), (ValueError, RuntimeError))
        first.grad = dense
        model.collect()
        assert_holds(model, training.wholes)
        assert all(torch.equal(one.grad, torch.ones_like(one)) for one in model.parameters())
        return messages

    settings = "differ in the strategy, or the settings of the optimizer's parameter groups: "
    for rank, messages in enumerate(run_ranks(check, 3)):
        for message, expected in zip(messages, [
            "differ in where the switch leads, or how it was planned: [[0, 1], [2]]",
            "is none of the model's: (1, 3, 1" if rank == 1 else "ranks [1] of the group failed",
            "differ in the strategy to add: [[0, 2], [1]]",
            "needs rank 4: there are 3 ranks",
            f"{settings}[[0, 1], [2]]",
            f"{settings}[[0], [1], [2]]",
            "rank 1 lacks ",
            "call collect() before",
            "would lose gradients",
        ], strict=True):  # fmt: skip
            assert expected in message
        assert "rank 0" not in messages[6]


def test_a_strategy_that_one_rank_cannot_make_leaves_no_group_on_any(run_ranks, monkeypatch):
    def check(rank, group):
        training = Training(group, [UNEVEN, REPLICAS])
        groups, make = known_groups(), Placement.of
        if rank == 1:

            def fail(*arguments):
                raise ValueError("no module for this strategy")

            monkeypatch.setattr(Placement, "of", fail)
        text = training.fails(lambda model: model.add(UNEVEN_PIPELINE), (ValueError, RuntimeError))
        assert known_groups() == groups
        monkeypatch.setattr(Placement, "of", make)
        training.model.add(UNEVEN_PIPELINE)
        training.model.switch_to(UNEVEN_PIPELINE)
        assert len(known_groups()) > len(groups)
        assert_holds(training.model, training.wholes)
        return text

    for rank, text in enumerate(run_ranks(check, 3)):
        assert "no module for this strategy" in text if rank == 1 else "ranks [1] of the group failed" in text


class Odd(nn.Module):
    """One linear layer after another, as told."""

    def __init__(self, *segments, state=False, tied=False):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.named = segments
        if state:
            self.register_buffer("mean", torch.zeros(2))
        if tied:
            self.again = self.up

    def segments(self):
        return self.named


FIRST = Odd()
DO_NOT_FIT = [
    (lambda: layers_of(), Strategy(1, 2, 2, ranks=(0, 1, 2, 3)), "needs rank 3: there are 2 ranks"),
    (lambda: layers_of(num_blocks=0)[:1], Strategy(1, 1, 2), "strategy"),
    (lambda: [Odd(Segment(["up"], "down", unit_size=8))], HALVES, "1 units of layers.0.up.weight do not divide"),
    (lambda: [Odd(Segment(["up"], "gone"))], HALVES, "Odd has no module 'gone'"),
    (lambda: [Odd(Segment(["named"], "down"))], HALVES, "has no module 'named'"),
    (lambda: [Odd(Segment(["up"], "down", unit_size=3))], HALVES, "are no units of unit_size=3"),
    (lambda: [Odd(Segment(["up"], "down", parts=3))], HALVES, "parts=3 is not allowed"),
    (lambda: [Odd(Segment(["up"], "down"), Segment(["up"], "down"))], HALVES, "are in another segment, too"),
    (lambda: [Odd(Segment(["up"], "down"), tied=True)], HALVES, "are one parameter, which cannot be divided"),
    (lambda: [Odd(state=True)], HALVES, "layers.0.mean is a buffer that state dictionaries hold"),
    (lambda: [Odd(Segment(["up"], "down"))] * 2, HALVES, "are one parameter, which segments cannot divide"),
    (lambda: [FIRST, Odd(FIRST)], HALVES, "layers.0.up.weight and layers.1.named (by reference) are one"),
    (lambda: [Odd().to("meta")], HALVES, "layer 0 is on meta: initialize(number, layer) is needed"),
    (lambda: [], HALVES, "a model needs at least one layer"),
]


@on_ranks(2)
def test_models_and_strategies_that_do_not_fit_are_told_to_all(rank, group):
    for layers, strategy, expected in DO_NOT_FIT:
        with pytest.raises(ValueError) as caught:
            SwitchableModel(layers(), strategies=[strategy], process_group=group)
        assert expected in str(caught.value)
    for name in ("compute_dtype", "gradient_dtype"):
        with pytest.raises(ValueError, match=f"{name}=torch.int8 is not allowed"):
            SwitchableModel(layers_of(), strategies=[PAIR], process_group=group, **{name: torch.int8})

    def strategies():
        yield PAIR
        if rank == 1:
            raise ValueError("no such file")

    for layers, given, text in (
        ([Odd()], strategies(), "no such file"),
        ([Odd(state=rank == 1)], [PAIR], "is a buffer that state dictionaries hold"),
    ):
        text = text if rank == 1 else r"ranks \[1\] of the group failed"
        with pytest.raises((ValueError, RuntimeError), match=text):
            SwitchableModel(layers, strategies=given, process_group=group)
    differ = r"differ in the layers, the strategies, .* compute_dtype .*\[\[0\], \[1\]\]"
    for options in (
        {"strategies": [(HALVES, PAIR)[rank]]},
        {"strategies": [PAIR], "compute_dtype": (torch.bfloat16, torch.float16)[rank]},
    ):
        with pytest.raises(RuntimeError, match=differ):
            SwitchableModel([Odd()], process_group=group, **options)
    with pytest.raises(RuntimeError, match=r"differ in the weights .*manual_seed.*\[\[0\], \[1\]\]"):
        SwitchableModel(layers_of(seed=rank, dtype=torch.bfloat16), strategies=[PAIR], process_group=group)


def test_a_rank_that_fails_while_its_node_sums_gradients_is_named_and_the_step_is_given_up(run_ranks, monkeypatch):
    pack = Transport._pack

    def check(rank, group):
        shards, copies = Strategy(1, 3, shares=(1, 2, 3)), Strategy(4)
        training = Training(group, [shards, copies], nodes=(0, 0, 1, 1))
        model = training.model

        def fail_once(*arguments):
            monkeypatch.setattr(Transport, "_pack", pack)
            raise ValueError("cannot be packed")

        model.switch_to(copies)
        give_ones(model)
        if rank == 2:  # the first thing that it packs is for the sum of its node
            monkeypatch.setattr(Transport, "_pack", fail_once)
        text = training.fails(lambda model: model.switch_to(shards), (ValueError, RuntimeError))
        model.abandon()
        assert all(one.grad is None for one in model.parameters())
        model.switch_to(copies)
        give_ones(model)
        model.collect()
        assert all(torch.equal(one.grad, torch.full_like(one, 4.0)) for one in model.parameters())
        return text

    for rank, text in enumerate(run_ranks(check, 4)):
        assert ("cannot be packed" if rank == 2 else "ranks [2] of the group have not received") in text
