"""When a change of ownership pays, and what is remembered of moves."""

import math

import pytest
from helpers.states import resumed
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import FIRST_PAUSE, LONGEST_PAUSE
from zeroresize.policy.tensor.ownership_decision import OwnershipDecision
from zeroresize.utils.codec import encoded

SEGMENTS = (SegmentWork(4800, 1, 1.0),)
HOME, AWAY = (1.0,) * 4, (1.2, 1.2, 1.2, 0.4)
OTHER = (1.2, 1.2, 0.4, 1.2)
#: Moving 0.6 of a rank's units there and back takes 2 (1 + 0.6 · 5) = 8 seconds.
COST, PRICE_S = MoveCost(0.05, 1.0), 8.0


def moving(owned=HOME, cost=COST):
    made = OwnershipDecision(4, SEGMENTS, bytes_of_units=100.0)
    made.owned = owned
    made.cost = cost
    return made


def test_a_move_away_costs_what_the_rank_with_most_bytes_takes_there_and_back_and_one_home_one_way():
    assert moving().price_s(AWAY) == pytest.approx(PRICE_S)
    assert moving(AWAY).price_s(HOME) == pytest.approx(PRICE_S / 2)
    assert moving().price_s(HOME) == 0.0
    assert moving(AWAY).price_s(OTHER) == pytest.approx(2 * (1.0 + 0.8 * 5.0))


@given(st.floats(0.01, 30.0), st.integers(1, 20))
def test_it_moves_when_not_moving_has_cost_as_much_as_the_move_there_and_back(saved_s, num_steps):
    made, owed_s = moving(), 0.0
    while not made.update(AWAY, saved_s, num_steps):
        owed_s += saved_s * num_steps
        assert owed_s < made.price_s(AWAY) + 1e-6 and made.owned == HOME
    assert owed_s + saved_s * num_steps >= made.price_s(HOME) and made.owned == AWAY
    assert made.owned_before == HOME


@given(st.integers(0, 400), st.floats(0.05, 3.0))
def test_it_costs_at_most_twice_what_the_best_would_have_in_hindsight(lasts, saved_s):
    """And what is lost until the next decision."""
    made, cost_s = moving(), 0.0
    for _ in range(lasts):
        cost_s += saved_s if made.owned == HOME else 0.0
        if made.update(AWAY, saved_s, 1):
            cost_s += PRICE_S
    best_s = min(lasts * saved_s, PRICE_S)
    assert cost_s <= 2.0 * best_s + saved_s + 1e-6


def test_a_straggler_that_changes_place_is_never_worth_a_move():
    made = moving()
    for update in range(400):
        wanted = tuple(0.4 if rank == update // 3 % 4 else 1.2 for rank in range(4))
        assert not made.update(wanted, 0.3, 8)


def test_what_another_rank_owes_does_not_count():
    made = moving()
    assert not made.update(AWAY, 0.9 * PRICE_S, 1)
    assert not made.update(OTHER, 0.9 * PRICE_S, 1)
    assert made.update(OTHER, 0.2 * PRICE_S, 1) and made.owned == OTHER


def test_a_second_straggler_now_and_then_does_not_begin_the_count_anew():
    made = moving()
    both = (1.6, 1.6, 0.4, 0.4)
    for wanted in (AWAY, both, AWAY):
        assert not made.update(wanted, 0.3 * PRICE_S, 1)
    assert made.update(AWAY, 0.3 * PRICE_S, 1)


def test_nobody_slow_for_an_update_begins_the_count_anew():
    made = moving()
    for wanted in (AWAY, HOME, AWAY):
        assert not made.update(wanted, 0.6 * PRICE_S if wanted == AWAY else 0.0, 1)
    assert made.update(AWAY, 0.6 * PRICE_S, 1)


def test_what_moving_would_have_lost_is_taken_off():
    made = moving()
    for saved_s in (0.9 * PRICE_S, -0.5 * PRICE_S, 0.5 * PRICE_S):
        assert not made.update(AWAY, saved_s, 1)
    assert made.update(AWAY, 0.2 * PRICE_S, 1)
    assert not made.rental.owed_s


def test_units_come_home_when_that_has_cost_one_way():
    made = moving(AWAY)
    assert not made.update(HOME, 0.3 * PRICE_S, 1)
    assert made.update(HOME, 0.3 * PRICE_S, 1) and made.is_home


def test_units_come_home_after_some_updates_in_which_that_was_better_however_little():
    made = moving(AWAY)
    came_home = [made.update(HOME, saved_s, 1) for saved_s in (1e-3, 1e-3, -1e-3, 1e-3, 1e-3, 1e-3, 1e-3)]
    assert came_home == [False] * 6 + [True] and made.is_home


def updates_until_away(made, saved_s, step_s):
    for number in range(1, 100_000):
        if made.update(AWAY, saved_s, 1, step_s=step_s):
            return number
    raise AssertionError("units never move")


def there_and_back(made, saved_s, step_s):
    """After how many updates units are away; then they come home."""
    number = updates_until_away(made, saved_s, step_s)
    assert made.update(HOME, PRICE_S, 1, step_s=step_s)
    return number


def test_small_gains_are_not_chased_and_large_ones_are():
    small, large = moving(), moving()
    first, second, third = (there_and_back(small, 0.05 * PRICE_S, PRICE_S) for _ in range(3))
    assert 20 * first < second < third
    first, second = (there_and_back(large, 0.05 * PRICE_S, 0.1 * PRICE_S) for _ in range(2))
    assert second <= 1.1 * first


def test_a_debt_is_first_earned_by_slowness():
    made = moving()
    made.account.take(3.0 * PRICE_S, 100.0 * PRICE_S, 1)  # one in a hundred was allowed; with the next move four
    assert updates_until_away(made, 0.5 * PRICE_S, PRICE_S) == pytest.approx(2 * (1 + 10 * 3), abs=1)


def test_only_the_first_move_is_free_and_later_ones_fit_into_what_may_be_lost():
    made = moving()
    assert updates_until_away(made, PRICE_S, PRICE_S) == 1
    made.account.take(PRICE_S, 99.0 * PRICE_S, 1)  # in vain
    made.put(HOME, is_held=False)
    made.moves_lately = 0.0
    assert updates_until_away(made, PRICE_S, PRICE_S) > 5
    made.put(HOME, is_held=False)
    made.moves_lately = 0.0
    made.account.take(0.0, 101.0 * PRICE_S, 1)
    assert updates_until_away(made, PRICE_S, PRICE_S) == 1


def test_comparing_products_is_part_of_a_move_away_and_is_learned_apart():
    made = moving()
    made.comparing_s = 2.0
    assert made.price_s(AWAY) == pytest.approx(PRICE_S + 2.0)
    made.learn(60.0, 4.0, 4.0)
    assert made.price_s(AWAY) == pytest.approx(PRICE_S + 2.0 + 0.7 * 2.0)
    assert made.account.lost_s == pytest.approx(8.0)
    made.learn(60.0, 4.0)
    assert made.comparing_s == pytest.approx(3.4)
    made.owned = AWAY
    assert made.price_s(HOME) == pytest.approx(PRICE_S / 2)


def test_a_refused_move_leaves_things_as_they_are_and_is_tried_ever_more_rarely():
    made, pauses = moving(), []
    for _ in range(10):
        waited = 0
        while not made.update(AWAY, 2 * PRICE_S, 1):
            waited += 1
        pauses.append(waited)
        made.refuse(HOME)
        assert made.owned == HOME and not made.rental.owed_s
    assert pauses[0] == 0
    assert pauses[1:] == [min(FIRST_PAUSE * 2**n, LONGEST_PAUSE) - 1 for n in range(9)]
    for _ in range(LONGEST_PAUSE):
        made.update(AWAY, 2 * PRICE_S, 1)
    assert made.owned == AWAY
    made.learn(60.0, 4.0)
    made.refuse(HOME)
    assert made.rental.pause == FIRST_PAUSE, "after a move that was made, failures are new"


def test_what_a_user_holds_stays_until_it_is_released():
    made = moving()
    made.put((2, 1, 1, 0), is_held=True)
    assert made.owned == (2.0, 1.0, 1.0, 0.0)
    assert not any(made.update(HOME, 2 * PRICE_S, 1) for _ in range(20))
    made.put(made.owned, is_held=False)
    assert made.update(HOME, 2 * PRICE_S, 1) and made.is_home


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


def gone_away(gain_s=1.0):
    made = moving()
    while not made.update(AWAY, 1.0, 10, gain_s=gain_s):
        pass
    return made


def test_what_coming_late_costs_is_learned_of_decided_divisions_only_and_forgotten():
    by_hand = moving()
    by_hand.put(AWAY, is_held=False)
    made = gone_away()
    for decision in (by_hand, made):
        decision.came_late(1.5)
    assert by_hand.late_s == 0.0 and made.late_s == 1.5
    for _ in range(640):
        made.update(AWAY, 0.0, 10)
    assert made.late_s < 1e-3


def test_one_interval_of_which_nobody_expected_it_counts_little():
    made = gone_away(gain_s=1.0)
    made.came_late(33.0)
    assert made.late_s == 2.0


def test_who_waits_owes_all_the_same():
    made = moving()
    for _ in range(5):
        assert not made.update(AWAY, 1.0, 10, waits=True)
    assert made.rental.owed_s == {"wanted": 50.0} and made.owned == HOME
    assert made.update(AWAY, 1.0, 10)


def test_it_goes_on_from_its_state():
    made = moving()
    made.update(OTHER, 2 * PRICE_S, 1, gain_s=1.0)
    made.came_late(0.5)
    made.refuse(HOME)
    for _ in range(FIRST_PAUSE):
        made.update(AWAY, 0.05 * PRICE_S, 1)
    assert made.late_s > 0.0
    other = resumed(made, OwnershipDecision(4, SEGMENTS, bytes_of_units=100.0))
    assert encoded(other) == encoded(made)
    for _ in range(30):
        assert made.update(AWAY, 0.1 * PRICE_S, 1) == other.update(AWAY, 0.1 * PRICE_S, 1)
    assert made.owned == other.owned == AWAY


def test_a_state_of_another_group_is_refused():
    with pytest.raises(ValueError, match="it is of 4 ranks, this process group has 3"):
        resumed(moving(), OwnershipDecision(3, SEGMENTS))
