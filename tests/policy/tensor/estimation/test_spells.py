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


A, B, NOBODY = {0}, {1}, set()
EIGHT, BRIEF = [A] * 8 + [NOBODY] * 3, [A, NOBODY] * 4


@pytest.mark.parametrize(
    ("updates", "rank", "saved", "steps", "is_worth_it"),
    [
        *(([A], 0, 0.73, steps, True) for steps in (1, 10, 1000)),  # much is worth it at once
        *(([A], 0, 0.3, steps, False) for steps in (1, 10, 1000)),  # and little only when it lasts
        *(([A] * 3, 0, 0.15, steps, True) for steps in (1, 10, 1000)),
        ([A], 0, 0.5, 10, True),
        ([A], 0, 0.5, 1, False),  # a single step tells less than ten
        ([A, NOBODY, B, NOBODY, {2}, NOBODY, {3}], 3, 0.73, 10, False),  # left alone the fourth time, whoever it is
        ([A, A, NOBODY, B, B, NOBODY, {2}, {2}, NOBODY, {3}], 3, 0.73, 10, False),
        (EIGHT * 3 + [A], 0, 0.3, 10, True),  # what lasted is met the next time, even if it is small
        (EIGHT * 3 + [B], 1, 0.73, 10, True),
        ([*EIGHT, B], 1, 0.3, 10, False),  # that another rank was slow for long says nothing
        (BRIEF + [A], 0, 0.73, 10, False),
        (BRIEF + [NOBODY] * 400 + [A], 0, 0.73, 10, True),  # what was long ago is forgotten
    ],
    ids=str,
)
def test_whether_a_plan_is_worth_it(updates, rank, saved, steps, is_worth_it):
    assert lived(*updates).is_worth_it(rank, saved, steps) == is_worth_it


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.integers(1, 8), st.integers(1, 20))
def test_what_is_worth_it_is_so_for_more_and_for_longer(saved, more, age, steps):
    less, later = sorted([saved, more])
    if lived(*[{0}] * age).is_worth_it(0, less, steps):
        assert lived(*[{0}] * age).is_worth_it(0, later, steps)
        assert lived(*[{0}] * (age + 1)).is_worth_it(0, less, steps)


@given(st.lists(st.sets(st.integers(0, 3)), max_size=12), st.lists(st.sets(st.integers(0, 3)), max_size=12))
def test_it_goes_on_from_its_state(before, after):
    saved = lived(*before)
    loaded = resumed(saved)
    for slow in after:
        for spells in (saved, loaded):
            spells.learn([rank in slow for rank in range(4)], [0.5] * 4)
    assert loaded == saved
    assert len(saved.past) <= 16
