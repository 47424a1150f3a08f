"""When a change of ownership pays, and what is remembered of moves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import FIRST_PAUSE, Reason
from zeroresize.policy.tensor.ownership_decision import OwnershipDecision

SEGMENTS = (SegmentWork(4800, 1, 1.0),)
HOME, AWAY = (1.0,) * 4, (1.2, 1.2, 1.2, 0.4)
OTHER = (1.2, 1.2, 0.4, 1.2)
#: Moving 0.6 of a rank's units there and back takes 2 (1 + 0.6 · 5) = 8 seconds.
COST, PRICE_S = MoveCost(0.05, 1.0), 8.0


def moving(owned=HOME, is_way_home_paid=True):
    made = OwnershipDecision(4, SEGMENTS, bytes_of_units=100.0)
    made.owned, made.cost, made.is_way_home_paid = owned, COST, is_way_home_paid
    made.rental.doubt = 1.0  # as after moves that have saved their price
    return made


def moves(made, savings_s, num_steps=1, **options):
    """Whether units move where these divisions save so many seconds of a step."""
    return made.update(savings_s, 1.0, num_steps, **options).is_due


def test_a_move_away_costs_there_and_back_and_the_way_home_is_paid_then():
    assert moving().price_s(AWAY) == pytest.approx(PRICE_S)
    assert moving(AWAY).price_s(HOME) == 0.0
    assert moving(AWAY, False).price_s(HOME) == pytest.approx(PRICE_S / 2), "memory has moved them"
    assert moving(AWAY).price_s(OTHER) == pytest.approx(2 * (1.0 + 0.8 * 5.0))
    made = moving()
    made.comparing_s = 2.0
    assert made.price_s(AWAY) == pytest.approx(PRICE_S + 2.0)
    made.learn(60.0, 4.0, 4.0)
    made.learn(60.0, 4.0)
    assert made.comparing_s == pytest.approx(3.0)


@given(st.floats(0.01, 30.0), st.integers(1, 20))
def test_it_moves_when_not_moving_has_cost_as_much_as_the_move_there_and_back(saved_s, num_steps):
    made, owed_s = moving(), 0.0
    while not moves(made, {AWAY: saved_s}, num_steps):
        owed_s += saved_s * num_steps
        assert owed_s < PRICE_S + 1e-6 and made.owned == HOME
    assert owed_s + saved_s * num_steps >= PRICE_S - 1e-6 and made.owned == AWAY and made.owned_before == HOME


def test_what_is_owed_is_owed_for_each_rank():
    """Not for another one; and a second straggler now and then does not begin the count anew."""
    made = moving()
    assert not moves(made, {AWAY: 0.9 * PRICE_S}) and not moves(made, {OTHER: 0.9 * PRICE_S})
    assert moves(made, {OTHER: 0.2 * PRICE_S}) and made.owned == OTHER
    made = moving()
    for wanted in (AWAY, (1.6, 1.6, 0.4, 0.4), AWAY):
        assert not moves(made, {wanted: 0.3 * PRICE_S})
    assert moves(made, {AWAY: 0.3 * PRICE_S})
    assert not moves(moved_back := moving(), {AWAY: 0.6 * PRICE_S}) and not moves(moved_back, {})
    assert not moves(moved_back, {AWAY: 0.6 * PRICE_S}), "nobody was slow in between"


def test_units_come_home_as_soon_as_that_makes_steps_shorter():
    made = moving()
    assert moves(made, {AWAY: PRICE_S})
    assert not moves(made, {HOME: 0.0}) and not moves(made, {HOME: -1.0})
    assert moves(made, {HOME: 1e-3}) and made.is_home
    made = moving(AWAY, False)
    assert not moves(made, {HOME: 0.3 * PRICE_S}) and moves(made, {HOME: 0.3 * PRICE_S})


def updates_until_away(made, saved_s=PRICE_S / 16):
    return next(number for number in range(1, 100_000) if moves(made, {AWAY: saved_s}))


def test_a_load_that_swings_is_not_followed_for_what_hardly_pays_and_one_that_pays_is():
    made, waited = moving(), []
    for saved_s in (PRICE_S, 0.0, -PRICE_S, 5.0 * PRICE_S, 5.0 * PRICE_S):
        waited.append(updates_until_away(made))
        moves(made, {}, stay_saves_s=saved_s)
        assert moves(made, {HOME: 1.0})
    assert waited == [16, 32, 64, 128, 64]


def test_a_refused_move_leaves_things_as_they_are_and_is_not_tried_for_a_while():
    made, waited = moving(), 0
    assert moves(made, {AWAY: 2 * PRICE_S})
    made.refuse(HOME)
    assert made.owned == HOME and not made.rental.owed_s
    while not moves(made, {AWAY: 2 * PRICE_S}):
        waited += 1
        assert made.verdict.reason is Reason.PAUSED
    assert waited == FIRST_PAUSE - 1
    made.learn(60.0, 4.0)
    made.refuse(HOME)
    assert made.rental.pause == FIRST_PAUSE, "after a move that was made, failures are new"


@pytest.mark.parametrize(
    "shares", [(1, 1, 1), (1, 1, 1, -1), (0, 0, 0, 0), (1, 1, 1, math.nan), (1, 1, 1, math.inf), (1, 1, 1, "1")]
)
def test_shares_that_are_none_are_refused(shares):
    made = moving()
    with pytest.raises(ValueError, match="wanted are 4 numbers, one for each rank"):
        made.put(shares, is_held=True)
    assert made.is_home and not made.is_held


def test_without_segments_nothing_moves():
    made = OwnershipDecision(2)
    assert made.checked((3, 3)) == (1.0, 1.0)
    with pytest.raises(ValueError, match="no units that can change their owner"):
        made.put((2, 1), is_held=False)
