"""Whether a plan that comes late is worth it for a rank that is slow, by how long ranks were slow before."""

import pytest
from helpers.states import resumed
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.tensor.estimation.spells import Spells


def lived(*updates, num_ranks=4, cost=0.7):
    """After updates at which these ranks were slow."""
    spells = Spells(num_ranks)
    for slow in updates:
        spells.learn([rank in slow for rank in range(num_ranks)], [cost] * num_ranks)
    return spells


@pytest.mark.parametrize("steps", [1, 2, 4, 10, 1000])
def test_much_is_worth_it_at_once_and_little_only_when_it_lasts(steps):
    assert lived({0}).is_worth_it(0, 0.73, steps)
    assert not lived({0}).is_worth_it(0, 0.3, steps)
    assert lived(*[{0}] * 3).is_worth_it(0, 0.15, steps)


def test_a_single_step_tells_less_than_ten():
    assert lived({0}).is_worth_it(0, 0.5, 10) and not lived({0}).is_worth_it(0, 0.5, 1)


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.integers(1, 8), st.integers(1, 20))
def test_what_is_worth_it_is_so_for_more_and_for_longer(saved, more, age, steps):
    less, later = sorted([saved, more])
    if lived(*[{0}] * age).is_worth_it(0, less, steps):
        assert lived(*[{0}] * age).is_worth_it(0, later, steps)
        assert lived(*[{0}] * (age + 1)).is_worth_it(0, less, steps)


@pytest.mark.parametrize("on", [1, 2])
def test_what_came_and_went_is_left_alone_the_fourth_time_whoever_it_is(on):
    updates = []
    for rank in range(3):
        updates += [{rank}] * on + [set()]
    assert not lived(*updates, {3}).is_worth_it(3, 0.73, 10)


def test_what_lasted_for_eight_updates_is_met_the_next_time_too():
    updates = []
    for _ in range(3):
        updates += [{0}] * 8 + [set()] * 3
    assert lived(*updates, {0}).is_worth_it(0, 0.3, 10), "even if it is small"
    assert lived(*updates, {1}).is_worth_it(1, 0.73, 10)


def test_that_another_rank_was_slow_for_long_says_nothing():
    assert not lived(*[{0}] * 8, set(), {1}).is_worth_it(1, 0.3, 10)


def test_small_spells_that_passed_say_nothing_of_a_large_one():
    spells = lived(*[{0}, set()] * 4, cost=0.1)
    spells.learn([True, False, False, False], [0.7] * 4)
    assert spells.is_worth_it(0, 0.7, 10)


def test_what_was_long_ago_is_forgotten():
    updates = [{0}, set()] * 4
    assert not lived(*updates, {0}).is_worth_it(0, 0.73, 10)
    assert lived(*updates, *[set()] * 400, {0}).is_worth_it(0, 0.73, 10)


@given(st.lists(st.sets(st.integers(0, 3)), max_size=12), st.lists(st.sets(st.integers(0, 3)), max_size=12))
def test_it_goes_on_from_its_state(before, after):
    saved = lived(*before)
    loaded = resumed(saved)
    for slow in after:
        for spells in (saved, loaded):
            spells.learn([rank in slow for rank in range(4)], [0.5] * 4)
    assert loaded == saved
    assert len(saved.past) <= 16
