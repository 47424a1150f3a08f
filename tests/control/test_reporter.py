"""The lines that an operator reads, from made-up moves and decisions."""

import logging
import math
from types import SimpleNamespace

import pytest

from zeroresize.comm.pausing import Restraint
from zeroresize.config import BalanceConfig
from zeroresize.control.reporter import Reporter
from zeroresize.plan.group import RankPlan, WorkloadPlan
from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.ownership_decision import OwnershipDecision
from zeroresize.resharding.units.owned_units import Move

AWAY = (1.6, 0.4)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def lines(caplog):
    """Lines since the last call."""

    def taken():
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    with caplog.at_level(logging.INFO, logger="zeroresize"):
        yield taken


def move(num_ranks, total_bytes=38e6, seconds=0.4, after=None, **changes):
    """Of ``changes`` by kind, of 1,000 neurons and 12 heads of each rank."""
    owned = {"neurons": 1000, "heads": 12}
    return Move(
        before=(1.0,) * num_ranks,
        after=after or (0.5, *[1.0] * (num_ranks - 1)),
        sent_bytes=0,
        received_bytes=0,
        total_bytes=int(total_bytes),
        most_bytes=0,
        seconds=seconds,
        changes=changes,
        owned_before={kind: (owned[kind],) * num_ranks for kind in changes},
    )


def plan(num_ranks, stragglers=(), step_s=math.nan, **of_slow):
    slow, other = RankPlan(is_straggler=True, **of_slow), RankPlan()
    return WorkloadPlan(tuple(slow if rank in stragglers else other for rank in range(num_ranks)), step_s)


def decided(decided_plan, busy_s=(0.1, 0.19), outside_s=(), ownership=None, memory=None):
    controller = SimpleNamespace(
        busy_s=busy_s,
        ownership=ownership or OwnershipDecision(2, [SegmentWork(1000, 1, 1.0)]),
        config=BalanceConfig(),
    )
    plans = {"plan": decided_plan, "decided": decided_plan, "restraint": Restraint()}
    return SimpleNamespace(**plans, outside_s=outside_s, memory=memory, controller=controller)


UNITS = SimpleNamespace(segments=[None], why_not_movable=None, shares=(1.0, 1.0))


def test_one_straggler_is_told_with_what_moves_what_it_costs_and_what_it_brings(lines):
    clock = Clock()
    reporter, slow = Reporter(0.1, speaks=True, clock=clock), plan(4, {3}, 0.205)
    reporter.decided(20, plan(4), decided(slow, ()), None)
    clock.now = 140.0
    busy_s, changes = (0.1, 0.1, 0.1, 0.21), {"neurons": (143, 143, 144, -430), "heads": (1, 1, 1, -3)}
    reporter.moved(40, move(4, **changes), decided(slow, busy_s), 0.31, 0.21)
    assert lines() == [
        "step 40: rank 3 is 2.1 times slower than the fastest for 40 s: 43 % of rank 3's neurons and 25 % of its heads "
        "move to ranks 0, 1, 2: 38 MB, 400 ms, then 210 ms to compare products; a step took 310 ms, expected 205 ms"
    ]


def test_lines_of_other_moves(lines):
    """Units that come home, that a rank which is less slow takes back, a user's, a checkpoint's, and none."""
    home, half = move(2, after=(1.0, 1.0), neurons=(-200, 200)), move(2, neurons=(500, -500))
    slow, quick, to_rank_0 = plan(2, {1}, 0.2), plan(2), "50 % of rank 1's neurons move to rank 0"
    small = move(2, 812.0, 0.0021, neurons=(500, -500))
    to_home = "units come home to rank 1: 38 MB, 400 ms; a step took 101 ms"
    held = {"cause": "as in the checkpoint", "is_held": True}
    cases = [
        ((home, plan(2, (), 0.255), (0.1, 0.1)), {"step_s": 0.101}, f"no rank is slow any more: {to_home}"),
        (
            (home, plan(2, {1}, 0.09), (0.1, 0.2)),
            {"step_s": 0.101},
            f"even shares are faster now: {to_home}, expected 90 ms",
        ),
        ((half, quick, ()), {"comparing_s": 1.9e-5}, f"{to_rank_0}: 38 MB, 400 ms"),
        ((half, slow, (0.1, 0.3)), {"step_s": 0.29, "cause": "by hand"}, f"by hand: {to_rank_0}: 38 MB, 400 ms"),
        (
            (half, quick, ()),
            held,
            f"as in the checkpoint: {to_rank_0}: 38 MB, 400 ms; these shares are held until move(None)",
        ),
        ((move(2, neurons=(0, 0)), slow, (0.1, 0.2)), {}, "shares change by less than a unit: nothing moves"),
        ((small, plan(2, step_s=0.00042), ()), {}, f"{to_rank_0}: 812 B, 2.1 ms; expected step 420 µs"),
    ]
    for (moved, of_plan, busy_s), options, line in cases:
        Reporter(0.1, speaks=True).moved(5, moved, decided(of_plan, busy_s), **options)
        assert lines() == [f"step 5: {line}"]


def test_what_came_of_a_move_is_told_once_and_only_where_measurements_made_it(lines):
    half = move(2, neurons=(500, -500)), decided(plan(2, {1}, 0.2), (0.1, 0.3))
    for step_s, change in ((0.18, "38 % shorter"), (0.292, "as long as before"), (0.348, "20 % longer")):
        reporter = Reporter(0.1, speaks=True)
        reporter.moved(40, *half, step_s=0.29)
        lines()
        for seconds in (math.nan, step_s, step_s):
            reporter.measured(44, seconds)
        assert lines() == [
            f"step 44: since units moved at step 40 a step takes {1e3 * step_s:.0f} ms, 290 ms before, 200 ms were "
            f"expected: steps are {change}"
        ]
    reporter.moved(50, *half, step_s=0.29, cause="by hand")
    lines()
    reporter.measured(54, 0.18)
    assert lines() == []


def test_a_rank_that_is_still_slow_is_named_where_it_lends_or_prunes_no_longer(lines):
    for way, given in (("lending", {"lent": 0.4}), ("pruning", {"pruned": 0.4})):
        relieved = plan(2, {1}, **given)
        for after, is_said in ((plan(2, {1}), True), (plan(2), False), (relieved, False)):
            Reporter(0.1, speaks=True).decided(5, relieved, decided(after), None)
            assert (f"1.9 times slower than the fastest: {way} does not pay now" in "".join(lines())) == is_said


def test_why_units_stay_is_the_decisions_own_verdict_and_said_at_each_doubling(lines):
    ownership = OwnershipDecision(2, [SegmentWork(1000, 1, 1.0)], bytes_of_units=1e9)
    ownership.cost = MoveCost(1e-9, 0.1)
    reporter, slow, said = Reporter(0.1, speaks=True), plan(2, {1}), {}
    for update in range(1, 101):
        ownership.update({AWAY: 1e-3}, 0.2, 2)
        reporter.decided(update, slow, decided(slow, ownership=ownership), UNITS)
        if texts := lines():
            said[update] = texts
    assert list(said) == [8, 16, 32, 64]
    assert said[8] == [
        "step 8: rank 1 is 1.9 times slower than the fastest, and units stay where they are: staying has not cost as "
        "much as the change yet: it would save 1 ms of 200 ms a step and take 1.4 s; staying has cost 16 ms of 2.8 s"
    ]
    ownership.refuse((1.0, 1.0))
    ownership.update({AWAY: 1e-3}, 0.2, 2)
    assert "the last change could not be made" in str(ownership.verdict)
    for quiet in (plan(2), plan(2, {1}, owned=0.6)):
        reporter = Reporter(0.1, speaks=True)
        for update in range(100):
            reporter.decided(update, quiet, decided(quiet, ownership=ownership), UNITS)
        assert lines() == []
    ownership.put(AWAY, is_held=True)
    for update in range(100):
        reporter.decided(update, slow, decided(slow, ownership=ownership), UNITS)
    assert lines() == []


def test_who_comes_late_is_said_once_of_what_lasts_and_matters(lines):
    reporter, nobody = Reporter(0.1, speaks=True), plan(2)
    for outside_s in ((0.1, 0.15), (0.1, 0.1), (0.1, 0.19), (0.1, 0.1), (0.1, 0.3), ()):  # 9 % of a step, now and then
        reporter.decided(5, nobody, decided(nobody, (1.0, 1.0), outside_s), None)
    for _ in range(3):
        reporter.decided(5, nobody, decided(nobody, (0.01, 0.01), (0.001, 0.005)), None)
    assert lines() == []
    for _ in range(4):
        reporter.decided(5, nobody, decided(nobody, (1.0, 1.0), (0.1, 0.3)), None)
    (line,) = lines()
    assert "ranks come late to the model in every step: rank 1 by 200 ms" in line
