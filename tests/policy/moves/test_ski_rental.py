"""Staying is rented, a move is bought: what holds whatever happens, and what is remembered."""

from helpers.states import resumed
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.moves.ski_rental import FIRST_PAUSE, LONGEST_PAUSE, MOST_DOUBT, SkiRental

#: Of an update: by how much each candidate makes its step shorter, and whether a move can be made.
SAVINGS = st.dictionaries(st.sampled_from("abc"), st.floats(-2.0, 2.0), min_size=1)


@given(st.integers(0, 400), st.floats(0.01, 3.0), st.floats(0.0, 50.0))
def test_slowness_of_unknown_length_takes_at_most_twice_the_best_in_hindsight(lasts, saved_s, price_s):
    """And one step, since it decides after the step."""
    rental, taken_s, has_moved = SkiRental(), 0.0, False
    for _ in range(lasts):
        taken_s += 0.0 if has_moved else saved_s
        rental.next_update()
        rental.charge({} if has_moved else {"away": saved_s}, 1)
        if not has_moved and rental.is_due("away", price_s):
            rental.settle("away")
            taken_s, has_moved = taken_s + price_s, True
    assert taken_s <= 2.0 * min(lasts * saved_s, price_s) + saved_s + 1e-6


@given(st.lists(st.booleans(), max_size=200), st.floats(0.05, 1.0), st.floats(0.5, 10.0))
def test_slowness_that_comes_and_goes_takes_at_most_three_times_the_best_who_knew_it(is_slow, saved_s, move_s):
    """Two divisions, each the better one at times: no rule that does not know the future can do better than that."""
    rental, place, taken_s = SkiRental(), False, 0.0
    least_s = [0.0, move_s]  # of all that end at home, and away
    for slow in is_slow:
        lost_s = [saved_s if slow else 0.0, 0.0 if slow else saved_s]
        taken_s += lost_s[place]
        least_s = [min(least_s[own], least_s[1 - own] + move_s) + lost_s[own] for own in (0, 1)]
        rental.next_update()
        rental.charge({str(not place): lost_s[place] - lost_s[1 - place]}, 1)
        if rental.is_due(str(not place), 2.0 * move_s):
            rental.settle(str(not place))
            taken_s, place = taken_s + move_s, not place
    assert taken_s <= (3.0 + saved_s / move_s) * (min(least_s) + move_s) + 2.0 * saved_s + 1e-6


@given(st.integers(1, 20), st.floats(0.01, 3.0))
def test_slowness_that_alternates_faster_than_a_move_pays_is_never_followed(period, saved_s):
    rental, price_s = SkiRental(), 1.01 * period * saved_s
    for step in range(40 * period):
        rental.next_update()
        rental.charge({"away": saved_s if step // period % 2 else -saved_s}, 1)
        assert not rental.is_due("away", price_s)


@given(st.lists(st.tuples(SAVINGS, st.integers(1, 10)), max_size=40))
def test_each_candidate_is_charged_by_itself(updates):
    """As if it were the only one; what is not named is forgotten."""
    rental = SkiRental()
    alone = {candidate: SkiRental() for candidate in "abc"}
    for saved_s, num_steps in updates:
        rental.charge(saved_s, num_steps)
        for candidate, single in alone.items():
            single.charge({candidate: saved_s[candidate]} if candidate in saved_s else {}, num_steps)
            assert rental.owed_for(candidate) == single.owed_for(candidate) >= 0.0


def test_what_would_have_been_better_still_is_owed_for_that():
    rental = SkiRental()
    rental.charge({"good": 3.0, "better": 5.0, "worse": 1.0}, 2)
    rental.settle("good")
    assert rental.owed_s == {"better": 4.0}
    rental.settle()
    assert rental.owed_s == {}


def test_a_refusal_pauses_and_each_that_follows_doubles_the_pause_until_a_move_is_made():
    rental, pauses = SkiRental(), []
    for _ in range(10):
        waited = -1
        while not rental.is_due("away", 1.0):
            rental.next_update()
            rental.charge({"away": 1.0}, 1)
            waited += 1
        pauses.append(waited)
        rental.refuse()
        assert rental.owed_s == {}
    assert pauses == [0] + [min(FIRST_PAUSE * 2**number, LONGEST_PAUSE) - 1 for number in range(9)]
    rental.succeed()
    rental.refuse()
    assert rental.pause == FIRST_PAUSE


def test_moves_that_disappoint_make_the_next_one_dearer_until_one_does_not():
    rental, factors = SkiRental(), []
    for _ in range(8):
        rental.judge(is_kept=False)
        factors.append(rental.doubt)
    assert factors == [2.0, 4.0, 8.0, 16.0, 32.0, MOST_DOUBT, MOST_DOUBT, MOST_DOUBT]
    rental.charge({"away": MOST_DOUBT - 1.0}, 1)
    assert not rental.is_due("away", 1.0)
    rental.judge(is_kept=True)
    assert rental.is_due("away", 1.0)


@given(
    st.lists(st.tuples(SAVINGS, st.sampled_from(["move", "refuse", "disappoint", "nothing"])), max_size=60),
    st.integers(0, 60),
)
def test_it_goes_on_from_its_state(updates, saved_after):
    whole, rental = SkiRental(), SkiRental()
    for number, (saved_s, what) in enumerate(updates):
        if number == saved_after:
            rental = resumed(rental)
        due = []
        for account in (whole, rental):
            account.next_update()
            account.charge(saved_s, 1)
            due.append([candidate for candidate in sorted(saved_s) if account.is_due(candidate, 1.5)])
            if what == "disappoint":
                account.judge(is_kept=False)
            elif due[-1] and what == "move":
                account.settle(due[-1][0])
                account.succeed()
            elif due[-1] and what == "refuse":
                account.refuse()
        assert due[0] == due[1] and whole == rental
