"""What a group's windows tell: who, since when, why, what it has cost, and what a division by speed would save."""

import math

import pytest

from zeroresize.policy.slowness.group_slowness import GroupSlowness
from zeroresize.policy.slowness.lines import lines_of
from zeroresize.policy.slowness.windows import (
    StepWindow,
    WatchedStep,
    share_saved,
    shares_of_causes,
    window_of,
)

EVERY = 10


def window(end_step, loader_s=0.01, products_s=0.06, rest_s=0.03, step_s=0.1):
    busy_s = loader_s + products_s + rest_s
    return StepWindow(end_step, EVERY, busy_s, max(step_s, busy_s), loader_s, products_s)


def run(group, rounds, slow=None, num_ranks=3, begins=0):
    """Feed ``rounds`` rounds in which ranks have the parts of ``slow``; return all events with their steps."""
    events = []
    for number in range(begins + 1, begins + rounds + 1):
        step_s = max(sum({"loader_s": 0.01, "products_s": 0.06, "rest_s": 0.03, **p}.values()) for p in slow.values())
        windows = [window(number * EVERY, **slow.get(rank, {}), step_s=step_s) for rank in range(num_ranks)]
        events += [(number * EVERY, event) for event in group.update(windows)]
    return events


WELL = {0: {}}


@pytest.mark.parametrize(
    ("part", "seconds", "cause"),
    [("products_s", 0.12, "products"), ("rest_s", 0.09, "rest"), ("loader_s", 0.07, "loader")],
)
def test_who_since_when_by_how_much_and_why(part, seconds, cause):
    group = GroupSlowness(3)
    assert run(group, 20, WELL) == []
    ((step, event),) = run(group, 10, {1: {part: seconds}}, begins=20)
    assert (event.kind, event.slow.rank, event.slow.since_step, event.slow.cause) == ("begins", 1, 200, cause)
    assert step == 220
    assert event.slow.times == pytest.approx(1.6)
    assert event.slow.causes == pytest.approx({cause: 1.0})
    report = group.report()
    assert [slow.rank for slow in report.slow] == [1]
    assert report.scores == pytest.approx((1.0, 1 / 1.6, 1.0))
    assert (report.slow[0].num_steps, report.slow[0].seconds) == (100, pytest.approx(16.0))
    ((_, ended),) = run(group, 10, WELL, begins=30)
    assert ended.kind == "ends"
    assert ended.slow.cause == cause
    assert ended.times_before == pytest.approx(1.6) == group.report().ended[0].times
    assert group.report().slow == ()
    assert group.report().scores == pytest.approx((1.0,) * 3)


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_rank_that_has_recovered_was_slow_from_to_for_the_reason_told_and_is_not_now(rounds):
    """From the first round on that shows it: a report in between must not take what it sees then for the slowness."""
    group = GroupSlowness(5)
    run(group, 20, WELL, num_ranks=5)
    run(group, 4, {1: {"loader_s": 0.21}}, num_ranks=5, begins=20)
    (slow,) = group.report().slow
    for number in range(rounds):
        run(group, 1, {1: {"loader_s": 0.001, "products_s": 0.02, "rest_s": 0.05}}, num_ranks=5, begins=24 + number)
        report = group.report()
        assert report.slow == ()
        assert report.ended == (slow,)
    assert (slow.since_step, slow.num_steps, slow.cause) == (200, 40, "loader")
    assert slow.times == pytest.approx(3.0, rel=0.01)
    run(group, 20, WELL, num_ranks=5, begins=24 + rounds)
    run(group, 8, {1: {"rest_s": 0.5}}, num_ranks=5, begins=44 + rounds)
    report = group.report()
    assert [(rank.rank, rank.cause) for rank in report.slow] == [(1, "rest")]
    assert report.ended == ()


def test_cost_counts_from_the_first_slow_step_and_once_for_two_that_are_slow_together():
    group = GroupSlowness(4)
    run(group, 20, WELL, num_ranks=4)
    run(group, 10, {1: {"rest_s": 0.05}, 2: {"rest_s": 0.08}}, num_ranks=4, begins=20)
    report = group.report()
    assert [slow.cost_s for slow in report.slow] == pytest.approx([100 * 0.02, 100 * 0.05])
    assert report.cost_s == pytest.approx(100 * 0.05)
    run(group, 30, WELL, num_ranks=4, begins=30)
    assert group.report().cost_s == pytest.approx(100 * 0.05)


def test_a_round_in_which_a_rank_has_measured_nothing_is_left_out():
    group = GroupSlowness(2)
    unmeasured = window_of([], 10)
    assert math.isnan(unmeasured.busy_s)
    assert group.update([window(10), unmeasured]) == []
    assert group.report().scores == ()
    assert math.isnan(group.report().share_saved)


def test_one_long_step_of_a_window_is_not_usual_and_timed_steps_are_left_out():
    steps = [WatchedStep(0.1, 0.05, 0.01)] * 8 + [WatchedStep(5.0, 0.0, 4.9), WatchedStep(0.12, 0.03, 0.01, 0.06)]
    usual = window_of(steps, 10)
    assert (usual.busy_s, usual.loader_s, usual.products_s, usual.num_steps) == (0.1, 0.01, 0.06, 10)
    assert usual.step_s == pytest.approx(0.15)


def test_where_products_were_not_timed_the_cause_is_computing_or_the_loader():
    slow, other = window(10, products_s=math.nan), window(10, products_s=math.nan)
    slow = StepWindow(10, EVERY, 0.2, 0.2, 0.02, math.nan)
    other = StepWindow(10, EVERY, 0.1, 0.2, 0.01, math.nan)
    shares = shares_of_causes(slow, [other, other])
    assert shares == pytest.approx({"compute": 0.9, "loader": 0.1})


def test_a_division_by_speed_saves_what_the_harmonic_mean_tells_and_nothing_of_the_loader():
    def of_rank(loader_s, computing_s):
        return window(10, loader_s=loader_s, products_s=computing_s, rest_s=0.0, step_s=0.0)

    assert share_saved([of_rank(0.0, 0.1), of_rank(0.0, 0.2)]) == pytest.approx(1.0 - (2.0 / (10.0 + 5.0)) / 0.2)
    assert share_saved([of_rank(0.0, 0.1)] * 4) == pytest.approx(0.0)
    assert share_saved([of_rank(1.0, 0.1), of_rank(0.0, 0.1)]) == pytest.approx(0.1 / 1.1)  # all waits for the loader


def test_lines_say_who_since_when_why_and_what_it_costs():
    group = GroupSlowness(2)
    run(group, 20, WELL, num_ranks=2)
    ((_, begins),) = run(group, 4, {1: {"products_s": 0.11}}, num_ranks=2, begins=20)
    assert lines_of([begins], group.report(), compares_work=True) == [
        "rank 1 is 1.50 times slower than the others, since step 200: matrix products take longer; check clocks and "
        "cooling of its node; cost 1 s; work by speed: 20 % shorter steps at most"
    ]
    (_, changes), *_ = run(group, 6, {1: {"products_s": 0.26}}, num_ranks=2, begins=24)
    (line,) = lines_of([changes], group.report(), compares_work=True)
    assert line.startswith("rank 1 is 3.00 times slower than the others now, 1.50 times before, since step 200")
    (_, ends), *_ = run(group, 6, WELL, num_ranks=2, begins=30)
    (line,) = lines_of([ends], group.report(), compares_work=True)
    assert line.startswith("rank 1 is as fast as the others again: it was 3.00 times slower, from step 200 on for ")


def test_of_many_ranks_there_is_a_single_line():
    group = GroupSlowness(16)
    run(group, 20, WELL, num_ranks=16)
    slow = {rank: {"loader_s": 0.05 + 0.01 * rank} for rank in range(5)}
    events = [event for _, event in run(group, 4, slow, num_ranks=16, begins=20)]
    assert len(events) == 5
    (line,) = lines_of(events, group.report(), compares_work=True)
    assert line == (
        "rank 4 is 1.80 times slower than the others, since step 200: it comes late to the model; and 4 others alike; "
        "give it more loader workers or faster storage; cost 1.6 s"
    )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_slowness_of_a_rank_is_no_noise_of_the_others(num_ranks):
    group = GroupSlowness(num_ranks)
    run(group, 30, WELL, num_ranks=num_ranks)
    run(group, 20, {1: {"rest_s": 0.5}}, num_ranks=num_ranks, begins=30)
    run(group, 20, WELL, num_ranks=num_ranks, begins=50)
    ((step, event),) = run(group, 4, {0: {"rest_s": 0.037}}, num_ranks=num_ranks, begins=70)
    assert (event.kind, event.slow.rank, step) == ("begins", 0, 720)


def windows_of(end_step, works, chi, counts):
    """Of ranks that take 1 ms for a unit of work, rank 1 ``chi`` times as long, in steps of uneven work."""
    windows = []
    for rank, work in enumerate(works):
        unit_s = 0.001 * (chi if rank == 1 else 1.0)
        steps = []
        for step in range(EVERY):
            here = work * (1.0 + 0.2 * (step % 3))
            times = (unit_s * here, 0.05, 0.1 * unit_s * here)
            steps.append(WatchedStep(*times, work=here if counts else math.nan))
        sent = window_of([*steps, WatchedStep(9.0, 0.0, work=0.0 if counts else math.nan)], end_step)
        windows.append(StepWindow.of_numbers(sent.as_numbers()))
    return windows


@pytest.mark.parametrize("counts", [True, False])
def test_a_rank_with_longer_rows_is_slow_only_where_work_is_not_counted(counts):
    group, events = GroupSlowness(3), []
    for number in range(1, 31):
        rows = [100, 200, 100] if number > 10 else [100, 100, 100]
        events += group.update(windows_of(EVERY * number, rows, 1.0, counts))
    assert group.compares_work == counts
    if counts:
        assert events == [] and group.report().scores == pytest.approx((1.0,) * 3)
        for number in range(31, 51):  # twice the work, and 1.5 times as long for it
            events += group.update(windows_of(EVERY * number, [100, 200, 100], 1.5, counts))
        (begins,) = events
        assert begins.slow.rank == 1 and begins.slow.times == pytest.approx(1.5)
        assert "more work" not in lines_of(events, group.report(), compares_work=True)[0]
    else:
        (begins,) = events
        (line,) = lines_of(events, group.report(), compares_work=False)
        assert begins.slow.rank == 1 and "what it computes takes longer, or it has more work; check" in line
