"""A move that cannot be made leaves every rank that lives with what it had, and tells all of them why."""

import os
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import parallel_layers
from helpers.parallel_layers import held, home, same, segments_of, uneven
from helpers.processes import dying, send_half, told_by_survivors

from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.comm.exchange import Exchange
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding import agreement, local_move, message_rounds, transfer
from zeroresize.resharding.agreement import NotEnoughMemoryError
from zeroresize.resharding.transfer import move_units


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
    "meets_by_exchange",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["meets over the group", "meets by an exchange"],
)
@pytest.mark.parametrize("when", ["before", "while", "between rounds", "after"])
def test_a_rank_that_dies_in_a_move_is_named_and_the_others_stay_as_they_were(tmp_path, when, meets_by_exchange):
    def check(rank, group):
        training = Training(group, meets_by_exchange=meets_by_exchange)
        if rank != 1:
            return training.fails(uneven(3, 2), max_bytes=2000)
        real, rounds = message_rounds.start_messages, []

        def start(*arguments):
            rounds.append(1)
            return dying()(*arguments) if len(rounds) == 3 else real(*arguments)

        if when == "between rounds":
            message_rounds.start_messages = start
        elif when == "after":
            transfer.require_received = lambda *_: os._exit(0)
        else:
            message_rounds.start_messages = dying(send_half if when == "while" else lambda *_: None)
        training.move(uneven(3, 2), max_bytes=2000)
        return "did not die"

    told = told_by_survivors(check, 3, tmp_path)
    assert sorted(told) == [0, 2], told
    for text in told.values():
        assert text.startswith("RuntimeError: nothing has moved or changed"), text
        assert "ranks [1] of the group" in text, text


def test_ranks_that_were_given_different_targets_do_not_move(run_ranks):
    def check(rank, group):
        training = Training(group)
        told = training.fails(uneven(3) if rank == 1 else uneven(3, 1))
        assert "differ in the segments, their owners or the targets" in told and "[[0, 2], [1]]" in told
        training.moves()

    run_ranks(check, 3)


def test_a_rank_that_cannot_move_tells_the_others(run_ranks):
    def check(rank, group):
        training = Training(group)
        wrong = {"1.down": OwnershipMap.even(parallel_layers.NEURONS + 3, 3)}
        told = training.fails(wrong if rank == 2 else uneven(3), (ValueError, RuntimeError))
        expected = "1.down: its 24 units on 3 ranks cannot" if rank == 2 else "ranks [2] of the group failed before"
        assert expected in told
        training.moves()

    run_ranks(check, 3)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda segment: UnitTensor(segment.tensors[0].owner, "weight", "w", 1, 1), "dimension 1 must be"),
        (lambda segment: UnitTensor(segment.tensors[0].owner, "weight", "w", 0, 1, 3), "3 blocks of"),
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


def test_what_does_not_fit_into_memory_is_not_moved(run_ranks, monkeypatch):
    def check(rank, group):
        training = Training(group)
        if rank == 1:
            monkeypatch.setattr(agreement, "free_bytes", lambda device: 1000)
            monkeypatch.setattr(agreement, "_place_of", lambda device: "a small device")
        told = training.fails(uneven(3, 2))
        monkeypatch.undo()
        training.moves()
        return told

    for told in run_ranks(check, 3):
        assert told.startswith("NotEnoughMemoryError: nothing has moved or changed")
        assert "rank 1 lacks 0.0" in told and "rank 0" not in told and "rank 2" not in told


def test_ranks_of_one_host_share_its_memory(run_ranks, monkeypatch):
    """Each of the two needs less than what is free, both together more."""

    def check(rank, group):
        training = Training(group)
        needs = []
        real = agreement.meet_prepared

        def meet_prepared(meet, own):
            needs.append(own[0])
            return real(meet, own)

        monkeypatch.setattr(agreement, "meet_prepared", meet_prepared)
        monkeypatch.setattr(agreement, "free_bytes", lambda device: 2**20)
        segment = training.segments[1]
        owner = torch.nn.Module()
        owner.wide = torch.nn.Parameter(torch.zeros(segment.owned.counts[rank], 6000, dtype=torch.float64))
        segment.tensors = (*segment.tensors, UnitTensor(owner, "wide", "wide", 0, 1))
        training.before = held(training.segments, training.optimizer)
        training.fails({"1.down": segment.owned.with_counts((11, 13))}, NotEnoughMemoryError)
        return needs[0]

    needed = run_ranks(check, 2)
    assert max(needed) <= 2**20 < sum(needed)


def test_memory_is_known_on_a_cpu_with_meminfo(monkeypatch, tmp_path):
    monkeypatch.setattr(agreement, "_MEMINFO", tmp_path / "meminfo")
    assert agreement.free_bytes(torch.device("cpu")) is None
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:     1000 kB\n")
    assert agreement.free_bytes(torch.device("cpu")) == 972800


def test_what_a_step_takes_again_on_a_gpu_is_what_it_took_at_most(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert agreement.bytes_up_to_peak(torch.device("cuda")) == 300
    assert agreement.bytes_up_to_peak(torch.device("cpu")) == 0


def test_memory_that_runs_out_all_the_same_is_told_to_all(run_ranks, monkeypatch):
    def check(rank, group):
        training = Training(group)
        if rank == 0:

            def allocate(*_):
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")

            monkeypatch.setattr(local_move.LocalMove, "allocate", allocate)
            monkeypatch.setattr(agreement, "_place_of", lambda device: "a small device")
        told = training.fails(uneven(2), NotEnoughMemoryError)
        monkeypatch.undo()
        training.moves()
        return told

    first, second = run_ranks(check, 2)
    assert "CUDA out of memory" in first
    for told in (first, second):
        assert "rank 0 lacks 0.0" in told and "rank 1" not in told


def test_ranks_with_other_numbers_of_steps_do_not_move(run_ranks):
    def check(rank, group):
        training = Training(group)
        step = training.optimizer.state[training.model[1].up.weight]["step"]
        step += rank
        with pytest.raises(RuntimeError, match=r"ranks 0 and 1 of the group hold different optimizer state of 1\.up"):
            training.move(uneven(2))
        step -= rank
        training.assert_unchanged()
        training.moves()

    run_ranks(check, 2)


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
        tensors = (UnitTensor(owner, "bias", "bias", 0, 1),)
        segment = OwnedSegment("s", "units", ("s",), tensors, OwnershipMap.even(2, 2))
        move_units([segment], {"s": OwnershipMap(np.array([0, 0]), 2)}, process_group=group, optimizer=optimizer)
        return {"bias": owner.bias.tolist(), **{key: one.tolist() for key, one in optimizer.state[owner.bias].items()}}

    first, second = run_ranks(check, 2)
    assert first == {"bias": [0.0, 1.0], "step": [5.0], "exp_avg": [10.0, 11.0]}
    assert second == {"bias": [], "step": [5.0], "exp_avg": []}
