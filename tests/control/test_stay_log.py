"""What an operator reads while a rank stays slow, from made-up plans and decisions."""

import math

import pytest

from zeroresize.control.stay_log import StayLog, why_relief_ended
from zeroresize.plan.group import RankPlan, WorkloadPlan
from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.ownership_decision import OwnershipDecision

BUSY_S = (0.1, 0.19)


def plan(*ranks):
    return WorkloadPlan(tuple(RankPlan(**own) for own in ranks))


def decision(**changes):
    """A move of half of a rank's units takes about 1 s."""
    made = OwnershipDecision(2, [SegmentWork(1000, 1, 1.0)], bytes_of_units=1e9)
    made.cost = MoveCost(1e-9, 0.1)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


SLOW = plan({}, {"is_straggler": True})
FAST = plan({}, {})


@pytest.mark.parametrize(("given", "way"), [({"lent": 0.4}, "lending"), ({"pruned": 0.4}, "pruning")])
def test_a_rank_that_is_still_slow_is_named_where_it_lends_or_prunes_no_longer(given, way):
    before = plan({}, {"is_straggler": True, **given})
    assert why_relief_ended(before, SLOW, BUSY_S) == (
        f", though rank 1 is still 1.9 times slower than the fastest: {way} does not pay now"
    )


def test_nothing_is_added_where_the_rank_recovered_goes_on_or_gives_units_away():
    before = plan({}, {"is_straggler": True, "lent": 0.4})
    moved = plan({"owned": 1.4}, {"is_straggler": True, "owned": 0.6})
    for after in (FAST, before, moved):
        assert why_relief_ended(before, after, BUSY_S) == ""


def test_why_units_stay_is_said_at_each_doubling_and_not_while_nobody_is_slow():
    log, ownership = StayLog(), decision()
    lines = {update: log.line(SLOW, BUSY_S, ownership) for update in range(1, 101)}
    assert [update for update, line in lines.items() if line is not None] == [8, 16, 32, 64]
    assert all(log.line(FAST, BUSY_S, ownership) is None for _ in range(1000))


def test_what_staying_has_cost_is_told_beside_what_a_move_would():
    def line(**changes):
        log, ownership = StayLog(), decision(**changes)
        return [log.line(SLOW, BUSY_S, ownership) for _ in range(8)][-1]

    ownership = decision()
    ownership.rental.charge({"wanted": 0.01}, 25)
    text = line(rental=ownership.rental)
    assert text.startswith("rank 1 is still 1.9 times slower than the fastest, and units stay where they are: ")
    move_s = float(text.partition(" would cost about ")[2].split()[0])
    assert move_s == pytest.approx(ownership.price_s((1.31, 0.69)), rel=0.05) and not math.isnan(move_s)
    assert text.endswith(" s, and staying has cost 0.25 s so far")
    ownership.rental.charge({"wanted": 1.0}, 100)
    assert "staying has cost 100 s so far; more is asked for where" in line(rental=ownership.rental)
    assert line().endswith(": no other division of them would surely make steps shorter")
    ownership.rental.refuse()
    assert line(rental=ownership.rental).endswith("could not be made, and it is tried again after 8 updates")


def test_shares_that_a_user_holds_and_a_rank_that_has_given_units_away_are_no_riddle():
    away = plan({"owned": 1.4}, {"is_straggler": True, "owned": 0.6})
    for of_rank, ownership in ((SLOW, decision(is_held=True)), (away, decision())):
        log = StayLog()
        assert all(log.line(of_rank, BUSY_S, ownership) is None for _ in range(100))


def test_after_a_move_it_is_counted_anew():
    log, ownership = StayLog(), decision()
    for _ in range(100):
        log.line(SLOW, BUSY_S, ownership)
    log.line(plan({"owned": 1.4}, {"is_straggler": True, "owned": 0.6}), BUSY_S, ownership)
    lines = [log.line(SLOW, BUSY_S, ownership) for _ in range(8)]
    assert lines[-1] is not None and lines[:-1] == [None] * 7
