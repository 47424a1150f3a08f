"""Steps at full work take a hundredth of the time, and no more ahead of it than an allowance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.full_work_steps import BUDGET, FullWorkSteps

NUM_STEPS = 10
#: (price of a step at full work in usual steps, for how many intervals it is that)
PHASES = st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 400)), min_size=1, max_size=4)


def paid(steps: FullWorkSteps, price: float, num_intervals: int, *, is_new: bool = False) -> float:
    """Usual steps' time that was paid in so many intervals, each step under the plan taking 1 s."""
    due = [steps.is_due(NUM_STEPS, 1.0, 1.0 + price, is_new=is_new) for _ in range(num_intervals)]
    return price * sum(due)


@given(phases=PHASES)
def test_in_the_long_run_they_take_a_hundredth(phases):
    steps = FullWorkSteps()
    total = sum(paid(steps, price, intervals) for price, intervals in phases)
    num_steps = NUM_STEPS * sum(intervals for _, intervals in phases)
    assert total <= BUDGET * num_steps + 1e-9


@given(phases=PHASES, price=st.floats(1.0, 30.0))
def test_whatever_was_before_a_window_takes_a_hundredth_and_one_step(phases, price):
    """A long phase in which they cost next to nothing leaves nothing to be spent when they are dear."""
    steps = FullWorkSteps()
    for earlier_price, intervals in phases:
        paid(steps, earlier_price, intervals)
    dearest = max(price, *(earlier for earlier, _ in phases))
    assert paid(steps, price, 200) <= BUDGET * 200 * NUM_STEPS + dearest + 1e-9


def test_they_come_as_often_as_a_hundredth_allows():
    assert paid(FullWorkSteps(), 2.0, 1000) == pytest.approx(BUDGET * 1000 * NUM_STEPS, abs=2.0)


def test_a_new_ratio_may_be_measured_ahead_of_the_budget():
    steps = FullWorkSteps()
    assert paid(steps, 6.0, 1, is_new=True) == 6.0
    assert paid(steps, 6.0, 59) == 0.0, "59 intervals of 10 steps have not earned 6 steps' time"


def test_a_short_interval_has_no_room():
    assert not FullWorkSteps().is_due(3, 1.0, 1.0, is_new=True)
