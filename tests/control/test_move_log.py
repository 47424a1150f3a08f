"""The line that an operator reads when units change hands, from made-up moves."""

import math

import pytest

from zeroresize.control.move_log import MoveLog
from zeroresize.plan.group import RankPlan, WorkloadPlan
from zeroresize.resharding.units.owned_units import Move


def move(num_ranks, total_bytes=38e6, seconds=0.4, after=None, owned_before=None, **changes):
    """Of ``changes`` by kind; ``owned_before`` is 1,000 neurons and 12 heads of each rank where it is not told."""
    owned = {"neurons": 1000, "heads": 12}
    return Move(
        before=(1.0,) * num_ranks,
        after=after or (0.5, *[1.0] * (num_ranks - 1)),
        sent_bytes=0,
        received_bytes=0,
        total_bytes=int(total_bytes),
        most_bytes=0,
        seconds=seconds,
        changes={kind: tuple(own) for kind, own in changes.items()},
        owned_before=owned_before or {kind: (owned[kind],) * num_ranks for kind in changes},
    )


def plan(num_ranks, stragglers=(), step_s=math.nan):
    ranks = tuple(RankPlan(is_straggler=rank in stragglers) for rank in range(num_ranks))
    return WorkloadPlan(ranks, step_s)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_one_straggler_is_told_with_what_moves_what_it_costs_and_what_it_brings():
    clock = Clock()
    log = MoveLog(clock)
    log.planned(plan(4, step_s=0.31))  # at 100 s: the decision after this finds rank 3 slow
    clock.now = 120.0
    log.planned(plan(4, {3}, 0.31))
    clock.now = 140.0
    log.planned(plan(4, {3}, 0.31))
    line = log.line(
        move(4, neurons=(143, 143, 144, -430), heads=(1, 1, 1, -3)),
        plan(4, {3}, 0.205),
        (0.1, 0.1, 0.1, 0.21),
        num_steps=40,
        step_s=0.31,
    )
    assert line == (
        "rank 3 is 2.1 times slower than the fastest for 40 s: 43 % of rank 3's neurons and 25 % of its heads move "
        "to ranks 0, 1, 2: 38 MB, 0.4 s; a step took 310 ms, expected 205 ms"
    )


def test_a_rank_that_recovered_in_between_is_slow_since_it_was_found_again():
    clock = Clock()
    log = MoveLog(clock)
    for at, stragglers in ((100, {1}), (110, set()), (120, set()), (130, {1})):
        clock.now = at
        log.planned(plan(2, stragglers))
    clock.now = 135
    line = log.line(move(2, neurons=(100, -100)), plan(2, {1}), (0.1, 0.2))
    assert line.startswith("rank 1 is 2.0 times slower than the fastest for 15 s: ")  # found after 120 s


def test_several_givers_are_told_each_with_its_own_part():
    line = MoveLog().line(
        move(4, neurons=(-500, 750, 0, -250), heads=(-12, 12, 0, 0)), plan(4, {0, 3}), (0.4, 0.1, 0.1, 0.15)
    )
    assert line == (
        "rank 0 is 4.0 times slower than the fastest, rank 3 is 1.5 times slower than the fastest: "
        "50 % of rank 0's neurons and all of its heads, 25 % of rank 3's neurons move to rank 1: 38 MB, 0.4 s"
    )


def test_a_rank_that_keeps_nothing_and_one_that_gives_next_to_nothing():
    line = MoveLog().line(move(3, neurons=(-1000, 1004, -4)), plan(3), ())
    assert line == "all of rank 0's neurons, less than 1 % of rank 2's neurons move to rank 1: 38 MB, 0.4 s"


def test_coming_home_is_told_by_itself_though_another_rank_is_slow():
    """Nobody's slowness is why units come home."""
    back = move(3, after=(1.0, 1.0, 1.0), neurons=(-200, 400, -200))
    line = MoveLog().line(back, plan(3, {2}, 0.25), (0.1, 0.1, 0.2), step_s=0.5)
    assert line == (
        "even shares are faster now: units come home to rank 1: 38 MB, 0.4 s; a step took 500 ms, expected 250 ms"
    )
    line = MoveLog().line(back, plan(3, (), 0.1), (0.1, 0.1, 0.1), step_s=0.5)
    assert line.startswith("no rank is slow any more: units come home to rank 1: ")


def test_an_expectation_above_what_was_measured_is_left_out_with_the_reason():
    """It rests on older times, and reads as if the move made steps longer."""
    log = MoveLog()
    back = move(3, after=(1.0, 1.0, 1.0), neurons=(-200, 400, -200))
    line = log.line(back, plan(3, (), 0.255), (0.1, 0.1, 0.1), num_steps=5, step_s=0.101)
    assert line == (
        "no rank is slow any more: units come home to rank 1: 38 MB, 0.4 s; a step took 101 ms, less than by the "
        "older times that decided this"
    )
    assert log.came_of(0.09) == (
        "since units moved at step 5 a step takes 90 ms, 101 ms before: steps are 11 % shorter"
    )


def test_a_slow_rank_whose_units_stay_is_not_told_as_the_cause():
    line = MoveLog().line(move(3, neurons=(-200, 200, 0)), plan(3, {2}), (0.1, 0.1, 0.2))
    assert line == "20 % of rank 0's neurons move to rank 1: 38 MB, 0.4 s"


def test_a_straggler_that_is_less_slow_than_before_takes_units_back():
    line = MoveLog().line(move(2, neurons=(-300, 300)), plan(2, {1}), (0.1, 0.15))
    assert line.startswith("rank 1 is 1.5 times slower than the fastest: 30 % of rank 0's neurons move to rank 1: ")


def test_by_hand_before_anything_is_measured():
    line = MoveLog().line(move(2, neurons=(-500, 500)), plan(2), ())
    assert line == "50 % of rank 0's neurons move to rank 1: 38 MB, 0.4 s"


def test_after_loading_a_state_nothing_was_decided_yet_but_times_are_known():
    line = MoveLog().line(move(2, neurons=(500, -500)), plan(2, {1}, 0.2), (0.1, 0.3))
    assert line == (
        "rank 1 is 3.0 times slower than the fastest: 50 % of rank 1's neurons move to rank 0: 38 MB, 0.4 s; "
        "expected step 200 ms"
    )


def test_shares_that_move_no_unit_say_so():
    assert MoveLog().line(move(2, neurons=(0, 0)), plan(2, {1}), (0.1, 0.2)) == (
        "shares change by less than a unit: nothing moves"
    )


def test_what_came_of_a_move_is_told_once():
    log = MoveLog()
    assert log.came_of(0.3) is None
    log.line(move(2, neurons=(500, -500)), plan(2, {1}, 0.2), (0.1, 0.3), num_steps=40, step_s=0.29)
    assert log.came_of(math.nan) is None, "nothing was measured yet"
    assert log.came_of(0.18) == (
        "since units moved at step 40 a step takes 180 ms, 290 ms before, 200 ms were expected: steps are 38 % shorter"
    )
    assert log.came_of(0.18) is None


@pytest.mark.parametrize(
    ("step_s", "change"), [(0.292, "steps are as long as before"), (0.348, "steps are 20 % longer")]
)
@pytest.mark.parametrize("is_another_wanted", [False, True])
def test_a_move_in_vain_is_called_so_and_the_balancer_s_verdict_follows_its_next_decision(
    step_s, change, is_another_wanted
):
    log = MoveLog()
    log.planned(plan(2, {1}))
    log.line(move(2, neurons=(500, -500)), plan(2, {1}, 0.2), (0.1, 0.3), num_steps=40, step_s=0.29)
    assert log.verdict(is_another_wanted) is None
    line = log.came_of(step_s, 60)
    assert line.endswith(f" ms before, 200 ms were expected: {change}. The balancer decides by these times at step 60")
    log.planned(plan(2, {1}))  # by what was measured before the move
    assert log.verdict(is_another_wanted) is None
    log.planned(plan(2, {1}))  # by what was measured after it
    assert log.verdict(is_another_wanted) == (
        "the move at step 40 has not made steps shorter; another division would be faster, and units move once it "
        "would have saved as much as the move takes"
        if is_another_wanted
        else "the move at step 40 has not made steps shorter; units stay for now, as no other division would be faster"
    )
    assert log.verdict(is_another_wanted) is None


def test_no_verdict_follows_a_move_that_helped_or_that_another_has_followed():
    for came_of_s in (0.2, 0.3):
        log = MoveLog()
        log.line(move(2, neurons=(500, -500)), plan(2, {1}, 0.2), (0.1, 0.3), num_steps=40, step_s=0.29)
        log.came_of(came_of_s, 60)
        if came_of_s == 0.3:
            log.line(move(2, neurons=(-500, 500)), plan(2), (0.1, 0.1), num_steps=60, step_s=0.3)
        log.planned(plan(2))
        log.planned(plan(2))
        assert log.verdict(False) is None


def test_the_time_of_the_move_and_that_of_comparing_products_are_told_apart():
    line = MoveLog().line(move(2, neurons=(500, -500)), plan(2, {1}, 0.2), (0.1, 0.3), step_s=0.29, comparing_s=0.21)
    assert line.endswith(": 38 MB, 0.4 s, then 0.21 s to compare products; a step took 290 ms, expected 200 ms")


def test_comparing_before_the_first_step_had_nothing_to_compare_and_is_left_out():
    line = MoveLog().line(move(2, neurons=(500, -500)), plan(2), (), comparing_s=1.9e-5)
    assert line == "50 % of rank 1's neurons move to rank 0: 38 MB, 0.4 s"


def test_a_move_by_hand_is_told_as_such_and_promises_nothing():
    log = MoveLog()
    line = log.line(move(2, neurons=(500, -500)), plan(2, {1}, 0.2), (0.1, 0.3), step_s=0.29, cause="by hand")
    assert line == "by hand: 50 % of rank 1's neurons move to rank 0: 38 MB, 0.4 s"
    assert log.came_of(0.18) is None


def test_a_move_of_a_checkpoint_names_no_straggler_and_tells_whether_shares_are_held():
    log = MoveLog()
    of_checkpoint = {"step_s": 0.29, "cause": "as in the checkpoint"}
    line = log.line(move(2, neurons=(500, -500)), plan(2, {1}, 0.2), (0.1, 0.3), is_held=True, **of_checkpoint)
    assert line == (
        "as in the checkpoint: 50 % of rank 1's neurons move to rank 0: 38 MB, 0.4 s; these shares are held until "
        "move(None)"
    )
    assert log.came_of(0.18) is None
    line = log.line(move(2, neurons=(500, -500)), plan(2, {1}, 0.2), (0.1, 0.3), **of_checkpoint)
    assert line == "as in the checkpoint: 50 % of rank 1's neurons move to rank 0: 38 MB, 0.4 s"


@pytest.mark.parametrize("num_slow", [1, 2, 500])
def test_the_line_of_a_large_group_is_short(num_slow):
    num_ranks = 1024
    slow = set(range(num_slow))
    busy_s = [0.2 + 0.001 * rank if rank in slow else 0.1 for rank in range(num_ranks)]
    neurons = [-600 + rank if rank in slow else 1 for rank in range(num_ranks)]
    line = MoveLog().line(move(num_ranks, neurons=neurons), plan(num_ranks, slow, 0.2), busy_s)
    assert len(line) < 250
    assert f" move to {num_ranks - num_slow} ranks: " in line
    if num_slow == 500:
        assert line.startswith("500 ranks are slower than the fastest, rank 499 most, 7.0 times: up to 60 % of the ")
    else:
        assert "rank 0 is 2.0 times slower" in line and "60 % of rank 0's neurons" in line


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "step_s", "said"),
    [
        (3.106e6, 0.1109, 0.3189, "3.11 MB, 0.11 s; expected step 319 ms"),
        (812.0, 0.0021, 0.00042, "0.812 kB, 0.0021 s; expected step 0.42 ms"),
        (38.4e9, 123.4, 12.3, "38.4 GB, 123 s; expected step 12300 ms"),
        (998e6, 9.96, 0.0996, "998 MB, 10 s; expected step 100 ms"),
    ],
)
def test_numbers_are_read_without_exponents(num_bytes, seconds, step_s, said):
    line = MoveLog().line(move(2, num_bytes, seconds, neurons=(500, -500)), plan(2, step_s=step_s), ())
    assert line.endswith(f"move to rank 0: {said}")
