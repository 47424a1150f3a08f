"""Staying is rented, a change is bought: what holds whatever happens, what is remembered, and what a verdict says."""

import math

import pytest
from helpers.states import resumed
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.moves.rental import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MOST_DOUBT,
    Option,
    Reason,
    Rental,
)

STEP_S = 1.0
#: Of an update: by how much each candidate makes its step shorter, and whether a move can be made.
SAVINGS = st.dictionaries(st.sampled_from("abc"), st.floats(-2.0, 2.0), min_size=1)


def test_option_is_due_once_staying_has_cost_its_price():
    rental = Rental()
    option = Option("move", saving_s=0.25, price_s=2.0)
    verdicts = [rental.decide([option], STEP_S, num_steps=2) for _ in range(4)]
    assert [verdict.reason for verdict in verdicts] == [Reason.NOT_YET] * 3 + [Reason.DUE]
    assert [verdict.owed_s for verdict in verdicts] == [0.5, 1.0, 1.5, 2.0]
    assert [verdict.is_due for verdict in verdicts] == [False, False, False, True]


def test_what_is_owed_falls_where_changing_would_have_lost_and_noise_counts_as_nothing():
    rental = Rental()
    rental.decide([Option("move", 0.5, 10.0)], STEP_S, 2)
    assert rental.owed_s == {"move": 1.0}
    assert rental.decide([Option("move", 0.01, 10.0)], STEP_S, 50).reason is Reason.NOTHING_SAVES
    assert rental.owed_s == {"move": 1.0}
    rental.decide([Option("move", -0.25, 10.0)], STEP_S, 2)
    assert rental.owed_s == {"move": 0.5}
    rental.decide([Option("move", -0.25, 10.0)], STEP_S, 20)
    assert rental.owed_s == {}


def test_of_several_the_best_that_is_due_and_the_rest_stays_owed():
    rental = Rental()
    options = [Option("little", 0.1, 0.1), Option("much", 0.5, 3.0), Option("worse", -0.5, 0.0)]
    assert rental.decide(options, STEP_S, 2).option == options[0]
    verdict = rental.decide(options, STEP_S, 4)
    assert verdict.option == options[1] and verdict.is_due
    rental.settle("little")
    assert rental.owed_s == {"much": pytest.approx(2.4)}
    rental.settle()
    assert rental.owed_s == {}


def test_work_that_is_known_to_last_pays_one_way_at_once():
    option = Option("move", saving_s=0.1, price_s=2.0, lasts_steps=10.0)
    assert Rental().decide([option], STEP_S, 1).reason is Reason.LASTS
    assert not Rental().decide([Option("move", 0.1, 2.0, lasts_steps=9.0)], STEP_S, 1).is_due


def test_changes_that_disappoint_double_prices_until_one_does_not():
    rental = Rental()
    for factor in (2.0, 4.0):
        rental.judge(is_kept=False)
        assert rental.decide([Option("move", 0.5, 1.0)], STEP_S, 0).needed_s == factor
    for _ in range(10):
        rental.judge(is_kept=False)
    assert rental.doubt == MOST_DOUBT
    for _ in range(10):
        rental.judge(is_kept=True)
    assert rental.decide([Option("move", 0.5, 1.0)], STEP_S, 2).is_due


def test_refused_changes_pause_twice_as_long_each_time():
    rental, option = Rental(), Option("move", 0.5, 0.1)
    for pause in (FIRST_PAUSE, 2 * FIRST_PAUSE):
        rental.refuse()
        reasons = [rental.decide([option], STEP_S, 1).reason for _ in range(pause)]
        assert reasons == [Reason.PAUSED] * (pause - 1) + [Reason.DUE]
    for _ in range(20):
        rental.refuse()
    assert rental.pause == LONGEST_PAUSE
    rental.succeed()
    rental.refuse()
    assert rental.pause == FIRST_PAUSE


def test_staying_and_changing_take_at_most_twice_the_best_in_hindsight():
    for num_updates in range(1, 60):
        rental, option, total_s, is_changed = Rental(), Option("move", 0.25, 4.0), 0.0, False
        for _ in range(num_updates):
            total_s += 0.0 if is_changed else option.saving_s
            if not is_changed and rental.decide([option], STEP_S, 1).is_due:
                is_changed, total_s = True, total_s + option.price_s
        best_s = min(num_updates * option.saving_s, option.price_s)
        assert total_s <= 2.0 * best_s + 1e-9
        assert math.isfinite(total_s)


@given(st.lists(st.booleans(), max_size=200), st.floats(0.05, 1.0), st.floats(0.5, 10.0))
def test_slowness_that_comes_and_goes_takes_at_most_three_times_the_best_who_knew_it(is_slow, saved_s, move_s):
    """Two divisions, each the better one at times: no rule that does not know the future can do better than that."""
    rental, place, taken_s = Rental(), False, 0.0
    least_s = [0.0, move_s]  # of all that end at home, and away
    for slow in is_slow:
        lost_s = [saved_s if slow else 0.0, 0.0 if slow else saved_s]
        taken_s += lost_s[place]
        least_s = [min(least_s[own], least_s[1 - own] + move_s) + lost_s[own] for own in (0, 1)]
        option = Option(str(not place), lost_s[place] - lost_s[1 - place], 2.0 * move_s)
        if rental.decide([option], STEP_S, 1, least_saving=0.0).is_due:
            rental.settle(option.name)
            taken_s, place = taken_s + move_s, not place
    assert taken_s <= (3.0 + saved_s / move_s) * (min(least_s) + move_s) + 2.0 * saved_s + 1e-6


@given(st.integers(1, 20), st.floats(0.01, 3.0))
def test_slowness_that_alternates_faster_than_a_move_pays_is_never_followed(period, saved_s):
    rental, price_s = Rental(), 1.01 * period * saved_s
    for step in range(40 * period):
        option = Option("away", saved_s if step // period % 2 else -saved_s, price_s)
        assert not rental.decide([option], STEP_S, 1, least_saving=0.0).is_due


@given(
    st.lists(st.tuples(SAVINGS, st.sampled_from(["move", "refuse", "disappoint", "nothing"])), max_size=60),
    st.integers(0, 60),
)
def test_it_goes_on_from_its_state(updates, saved_after):
    whole, rental = Rental(), Rental()
    for number, (saved_s, what) in enumerate(updates):
        if number == saved_after:
            rental = resumed(rental)
        options = [Option(name, saving_s, 1.5) for name, saving_s in saved_s.items()]
        verdicts = [each.decide(options, STEP_S, 1) for each in (whole, rental)]
        assert str(verdicts[0]) == str(verdicts[1]) and whole == rental
        for each, verdict in zip((whole, rental), verdicts, strict=True):
            if what == "disappoint":
                each.judge(is_kept=False)
            elif verdict.is_due and what == "move":
                each.settle(verdict.option.name)
                each.succeed()
            elif verdict.is_due and what == "refuse":
                each.refuse()
