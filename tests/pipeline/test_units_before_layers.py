"""Where stages are groups that even themselves out, layers wait for them: with groups that are made up."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import sleeping_layers
from helpers.on_ranks import gathered, on_ranks
from helpers.processes import told_by_survivors
from helpers.states import values_of

from zeroresize.resharding import transaction
from zeroresize.resharding.agreement import NotEnoughMemoryError

pytestmark = pytest.mark.same_ranks


class MadeUp:
    """A group of one rank that says what the test wants."""

    num_ranks = 1

    def __init__(self):
        self.has_settled, self.calls, self.fails_with = False, [], None

    def watch(self):
        self.calls.append("watch")

    def leave(self, boundaries):
        self.calls.append(f"leave for {tuple(boundaries)}")
        if self.fails_with is not None:
            raise self.fails_with

    def attach(self):
        self.calls.append("attach")


class Training(sleeping_layers.Training):
    def __init__(self, group):
        self.units = MadeUp()
        super().__init__(group, 6, schedule="1f1b", units=self.units)


@on_ranks(2)
def test_nothing_is_measured_while_any_group_has_not_settled_and_a_wanted_move_waits_for_all(rank, group):
    training = Training(group)
    training.units.has_settled = rank == 0
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    training.train(5)
    assert not training.profiles and not training.units.calls
    training.units.has_settled = True
    while not training.units.calls:  # until a profile has wanted a move
        training.train(1)
    training.units.has_settled = rank == 1
    seen = len(training.profiles)
    assert training.train(5) == (0, 3, 6) and len(training.profiles) == seen
    training.units.has_settled = True
    by_rank = gathered(group, (training.train(8), training.units.calls))
    assert by_rank[0] == by_rank[1]
    boundaries, calls = by_rank[0]
    assert boundaries[1] > 3
    assert [one.split()[0] for one in calls[:3]] == ["watch", "leave", "attach"]
    assert [one for one in calls if one.startswith("leave")][-1] == f"leave for {boundaries}"


@on_ranks(2)
def test_another_error_of_a_group_is_raised_there_and_told_to_all(rank, group):
    training = Training(group)
    training.units.has_settled = True
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    training.units.fails_with = ArithmeticError("no such number") if rank == 1 else None
    if rank == 1:
        with pytest.raises(ArithmeticError):
            training.train(6)
    else:
        training.train(4)
        with training.balancer.step():  # the next one would wait for the other rank
            training.pipeline.step(sleeping_layers.batch(2)[0])
    (stays, calls), (also_stays, _) = gathered(group, (training.pipeline.boundaries, training.units.calls[1:]))
    assert stays == also_stays == (0, 3, 6) and calls[-1] == "attach"


@pytest.mark.parametrize("step", ["leaving", "moving"])
@on_ranks(2)
def test_what_cannot_leave_or_move_stays_and_is_attached_again(rank, group, *, step):
    training = Training(group)
    training.units.has_settled = True
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    training.train(2)
    real = transaction.allocate_together
    error = NotEnoughMemoryError("nothing has moved: DefaultCPUAllocator: can't allocate memory")
    if step == "leaving":
        training.units.fails_with = error if rank == 1 else None
    else:

        def refuse(*_):
            raise error

        transaction.allocate_together = refuse
    stayed = training.train(4)
    calls = list(training.units.calls)
    training.units.fails_with, transaction.allocate_together = None, real
    by_rank = gathered(group, (stayed, calls, training.train(30)))
    assert by_rank[0] == by_rank[1]
    stayed, calls, moved = by_rank[0]
    assert stayed == (0, 3, 6) and moved[1] > 3
    assert [one.split()[0] for one in calls] == ["watch", "leave", "attach"]


@on_ranks(2)
def test_units_that_begin_a_change_after_the_profile_are_not_disturbed(rank, group):
    """It is known one block after it was measured; layers then move by a later one."""

    training = Training(group)
    training.units.has_settled = True
    training.pace.of_rank = 3.0 if rank == 1 else 1.0
    leave, doubts = training.units.leave, []

    def leave_in_doubt(boundaries):
        doubts.append(values_of(training.balancer.state_dict())["rebalancing"]["rental"]["doubt"])
        leave(boundaries)

    training.units.leave = leave_in_doubt
    while not training.units.calls:  # until a profile has wanted a move
        training.train(1)
    training.train(1)  # measures the one that confirms it
    training.units.has_settled = rank == 1
    stayed, calls = training.train(4), list(training.units.calls)
    training.units.has_settled = True
    by_rank = gathered(group, (stayed, calls, training.train(12), doubts[0]))
    assert by_rank[0] == by_rank[1]
    stayed, calls, moved, doubt = by_rank[0]
    assert stayed == (0, 3, 6) and calls == ["watch"]
    assert moved[1] > 3 and doubt == 1.0


@pytest.mark.slow
def test_a_rank_that_dies_while_units_come_home_leaves_nobody_waiting(tmp_path):
    def check(rank, group):
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=5))
        training = Training(pair)
        training.units.has_settled = True
        training.pace.of_rank = 3.0 if rank == 1 else 1.0
        if rank == 1:
            training.units.leave = lambda boundaries: os._exit(0)
        begin = time.perf_counter()
        with pytest.raises(RuntimeError) as caught:
            training.train(12)
        assert time.perf_counter() - begin < 20.0
        assert training.pipeline.boundaries == (0, 3, 6)
        return str(caught.value)

    (text,) = told_by_survivors(check, 2, tmp_path).values()
    assert text.startswith("nothing has moved or changed") and "ranks [1]" in text
