"""A move that cannot be made leaves every rank that lives with what it had, and tells all of them why."""

import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import parallel_layers
from helpers.parallel_layers import held, home, same, segments_of, uneven

from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding import agreement
from zeroresize.resharding.agreement import NotEnoughMemoryError
from zeroresize.resharding.units.moving_units import move_units


class Training:
    """A block that has made a step, its optimizer and segments, and a group that waits for seconds only."""

    def __init__(self, group, optimizer=torch.optim.AdamW, meets_by_exchange=False):
        ranks = list(range(dist.get_world_size(group)))
        self.group = dist.new_group(ranks, timeout=timedelta(seconds=5))
        self.model = parallel_layers.block(self.group)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-2)
        self.segments = segments_of(self.model, self.group)
        self.meet = Exchange(CpuGroup(self.group, {})).meet if meets_by_exchange else None
        self.step()
        self.before = held(self.segments, self.optimizer)

    def step(self):
        self.model(torch.ones(2, 3, parallel_layers.WIDTH, dtype=torch.float64)).square().mean().backward()
        self.optimizer.step()

    def move(self, targets, **options):
        options = {"process_group": self.group, "optimizer": self.optimizer, "meet": self.meet, **options}
        return move_units(self.segments, targets, **options)

    def assert_unchanged(self):
        objects, values = held(self.segments, self.optimizer)
        assert objects == self.before[0]
        assert same(values, self.before[1])

    def fails(self, targets, kind=RuntimeError, **options):
        """The text of the error that a move ends with; nothing has changed then."""
        begin = time.perf_counter()
        with pytest.raises(kind) as caught:
            self.move(targets, **options)
        assert time.perf_counter() - begin < 20.0
        self.assert_unchanged()
        return f"{type(caught.value).__name__}: {caught.value}"

    def moves(self):
        """Afterwards a move is possible, and training goes on."""
        assert self.move(uneven(dist.get_world_size(self.group))).num_units
        self.step()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda segment: UnitTensor(segment.tensors[0].owner, "weight", "w", 1, (1,)), "dimension 1 must be"),
        (
            lambda segment: UnitTensor(segment.tensors[0].owner, "weight", "w", 0, (1, 1, 1)),
            r"units of 1 \+ 1 \+ 1 rows",
        ),
    ],
)
def test_tensors_that_do_not_hold_the_units_are_an_error(run_ranks, change, expected):
    def check(rank, group):
        training = Training(group)
        segment = training.segments[1]
        segment.tensors = (change(segment),)
        with pytest.raises(ValueError, match=expected):
            training.move(uneven(2))

    run_ranks(check, 2)


def test_targets_for_unknown_segments_and_below_the_least_units_are_errors(run_ranks):
    def check(rank, group):
        training = Training(group)
        assert "given for ['other'], which are no segments" in training.fails({"other": home(2)["0.out"]}, ValueError)
        training.segments[0].min_units = 2
        assert "every rank must keep 2 units, found [1, 11]" in training.fails(uneven(2), ValueError)

    run_ranks(check, 2)


def test_one_parameter_in_two_segments_does_not_move(run_ranks):
    def check(rank, group):
        training = Training(group)
        first, second = training.segments
        second.tensors, second.owned = (first.tensors[0],), first.owned
        targets = dict.fromkeys(("0.out", "1.down"), uneven(2)["0.out"])
        with pytest.raises(ValueError, match="of two segments are one parameter"):
            training.move(targets)

    run_ranks(check, 2)


def test_ranks_of_one_host_share_its_memory(run_ranks, monkeypatch):
    """Each of the two needs less than what is free, both together more."""

    def check(rank, group):
        training = Training(group)
        needs = []
        real = agreement.meet_prepared

        def meet_prepared(meet, numbers):
            needs.append(numbers[0])
            return real(meet, numbers)

        monkeypatch.setattr(agreement, "meet_prepared", meet_prepared)
        monkeypatch.setattr(agreement, "free_bytes", lambda device: 2**20)
        segment = training.segments[1]
        owner = torch.nn.Module()
        owner.wide = torch.nn.Parameter(torch.zeros(segment.owned.counts[rank], 6000, dtype=torch.float64))
        segment.tensors = (*segment.tensors, UnitTensor(owner, "wide", "wide", 0, (1,)))
        training.before = held(training.segments, training.optimizer)
        training.fails({"1.down": segment.owned.with_counts((11, 13))}, NotEnoughMemoryError)
        return needs[0]

    needed = run_ranks(check, 2)
    assert max(needed) <= 2**20 < sum(needed)


def test_state_on_some_of_the_ranks_that_have_units_does_not_move(run_ranks):
    def check(rank, group):
        training = Training(group)
        weight = training.model[1].up.weight
        state = training.optimizer.state.pop(weight) if rank == 0 else None
        with pytest.raises(RuntimeError, match=r"hold different tensors of 1\.up\.weight"):
            training.move(uneven(2))
        if state is not None:
            training.optimizer.state[weight] = state
        training.assert_unchanged()

    run_ranks(check, 2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(lambda: torch.zeros(7), "'rows' of shape \\(7,\\)"), (lambda: [torch.zeros(2)], "'rows' as a list")],
)
def test_factored_state_does_not_move(run_ranks, value, expected):
    def check(rank, group):
        training = Training(group)
        training.optimizer.state[training.model[1].up.weight]["rows"] = value()
        with pytest.raises(ValueError, match=expected):
            training.move(uneven(2))

    run_ranks(check, 2)


def test_with_one_element_the_step_stays_a_step(run_ranks):
    """Its shape is the parameter's by accident; moments of one element travel all the same."""

    def check(rank, group):
        owner = torch.nn.Module()
        owner.bias = torch.nn.Parameter(torch.full((1,), float(rank)))
        optimizer = torch.optim.Adam([owner.bias])
        optimizer.state[owner.bias] = {"step": torch.full((1,), 5.0), "exp_avg": torch.full((1,), 10.0 + rank)}
        tensors = (UnitTensor(owner, "bias", "bias", 0, (1,)),)
        segment = OwnedSegment("s", "units", ("s",), tensors, OwnershipMap.even(2, 2))
        move_units([segment], {"s": OwnershipMap(np.array([0, 0]), 2)}, process_group=group, optimizer=optimizer)
        return {"bias": owner.bias.tolist(), **{key: one.tolist() for key, one in optimizer.state[owner.bias].items()}}

    first, second = run_ranks(check, 2)
    assert first == {"bias": [0.0, 1.0], "step": [5.0], "exp_avg": [10.0, 11.0]}
    assert second == {"bias": [], "step": [5.0], "exp_avg": []}
