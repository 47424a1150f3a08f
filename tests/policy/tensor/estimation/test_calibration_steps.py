"""Calibration steps take a hundredth of the time, and no more ahead of it than an allowance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.tensor.estimation.calibration_steps import BUDGET, CalibrationSteps

NUM_STEPS = 10
#: (price of a calibration step in usual steps, for how many intervals it is that)
PHASES = st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 400)), min_size=1, max_size=4)
ON_CREDIT = [{"is_new": True, "is_unsure": False}, {"is_new": False, "is_unsure": True}]


def paid(
    steps: CalibrationSteps,
    price: float,
    num_intervals: int,
    num_steps: int = NUM_STEPS,
    *,
    is_new: bool = False,
    is_unsure: bool = False,
) -> float:
    """Usual steps' time that was paid in so many intervals, each step under the plan taking 1 s."""
    due = [steps.due(num_steps, 1.0, 1.0 + price, is_new=is_new, is_unsure=is_unsure) for _ in range(num_intervals)]
    assert set(due) <= {0, 1 if num_steps >= 4 else num_steps}
    return price * sum(due)


@given(phases=PHASES, every=st.integers(1, 20))
def test_in_the_long_run_they_take_a_hundredth(phases, every):
    steps = CalibrationSteps()
    total = sum(paid(steps, price, intervals, every) for price, intervals in phases)
    num_steps = every * sum(intervals for _, intervals in phases)
    assert total <= BUDGET * num_steps + 1e-9


@given(phases=PHASES, price=st.floats(1.0, 30.0))
def test_whatever_was_before_a_window_takes_a_hundredth_and_one_step(phases, price):
    """A long phase in which they cost next to nothing leaves nothing to be spent when they are dear."""
    steps = CalibrationSteps()
    for earlier_price, intervals in phases:
        paid(steps, earlier_price, intervals)
    dearest = max(price, *(earlier for earlier, _ in phases))
    assert paid(steps, price, 200) <= BUDGET * 200 * NUM_STEPS + dearest + 1e-9


@pytest.mark.parametrize("every", [1, 3, 10])
def test_they_come_as_often_as_a_hundredth_allows(every):
    assert paid(CalibrationSteps(), 2.0, 1000, every) == pytest.approx(BUDGET * 1000 * every, abs=6.0)


@pytest.mark.parametrize("reason", ON_CREDIT, ids=lambda reason: max(reason, key=reason.get))
def test_what_is_new_or_unsure_may_be_measured_ahead_of_the_budget(reason):
    steps = CalibrationSteps()
    assert paid(steps, 6.0, 1, **reason) == 6.0
    assert paid(steps, 6.0, 59) == 0.0, "59 intervals of 10 steps have not earned 6 steps' time"


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_short_interval_is_given_whole_and_not_for_what_is_only_new(every):
    assert paid(CalibrationSteps(), 6.0, 1, every, is_new=True) == 0.0
    assert paid(CalibrationSteps(), 6.0, 1, every, is_unsure=True) == 6.0 * every


@pytest.mark.parametrize("price", [-0.5, 0.0])
def test_those_that_cost_nothing_are_rare_all_the_same(price):
    """While one lasts nothing is learned of the plan."""
    steps = CalibrationSteps()
    due = [steps.due(1, 1.0, 1.0 + price, is_new=False, is_unsure=False) for _ in range(1000)]
    assert 1 <= sum(due) <= 40


def test_what_was_spent_on_long_steps_is_not_owed_by_short_ones_for_ever() -> None:
    steps = CalibrationSteps()
    for _ in range(10):
        steps.due(NUM_STEPS, 10.0, 100.0, is_new=False, is_unsure=True)
    due = [steps.due(NUM_STEPS, 0.1, 0.2, is_new=False, is_unsure=False) for _ in range(400)]
    assert any(due)
