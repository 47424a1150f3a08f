"""Calibration steps take a hundredth of the time, and no more ahead of it than an allowance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.tensor.estimation.calibration_steps import BUDGET, CREDIT, CalibrationSteps

NUM_STEPS = 10
#: (price of a calibration step in usual steps, for how many intervals it is that)
PHASES = st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 400)), min_size=1, max_size=4)


def paid(steps, price, num_intervals, num_steps=NUM_STEPS, *, is_new=False, is_unsure=False):
    """Usual steps' time that was paid in so many intervals, each step under the plan taking 1 s."""
    due = [steps.due(num_steps, 1.0, 1.0 + price, is_new=is_new, is_unsure=is_unsure) for _ in range(num_intervals)]
    assert set(due) <= {0, 1 if num_steps >= 4 else num_steps}
    return price * sum(due)


@given(phases=PHASES, price=st.floats(1.0, 30.0), every=st.integers(1, 20))
def test_in_the_long_run_they_take_a_hundredth_and_one_step_more_after_whatever_was_before(phases, price, every):
    """A long phase in which they cost next to nothing leaves nothing to be spent when they are dear."""
    steps = CalibrationSteps()
    total = sum(paid(steps, price, intervals, every) for price, intervals in phases)
    assert total <= BUDGET * every * sum(intervals for _, intervals in phases) + 1e-9
    most = every * max(price, *(earlier for earlier, _ in phases))
    assert paid(steps, price, 200, every) <= BUDGET * 200 * every + most + 1e-9


@pytest.mark.parametrize("every", [1, 3, 10])
def test_they_come_as_often_as_a_hundredth_allows_and_those_that_cost_nothing_are_rare_all_the_same(every):
    assert paid(CalibrationSteps(), 2.0, 1000, every) == pytest.approx(BUDGET * 1000 * every, abs=6.0)
    for price in (-0.5, 0.0):
        steps = CalibrationSteps()
        assert 1 <= sum(steps.due(1, 1.0, 1.0 + price, is_new=False, is_unsure=False) for _ in range(1000)) <= 40


@pytest.mark.parametrize("reason", ["is_new", "is_unsure"])
def test_what_is_new_or_unsure_may_be_measured_ahead_of_the_budget(reason):
    steps = CalibrationSteps()
    assert paid(steps, 6.0, 1) == 0.0
    assert paid(steps, 6.0, 1, **{reason: True}) == 6.0 <= CREDIT
    assert paid(steps, 6.0, 58) == 0.0, "58 intervals of 10 steps have not earned 6 steps' time"
    for every in (1, 2, 3):  # a short interval is given whole, and not for what is only new
        assert paid(CalibrationSteps(), 6.0, 1, every, **{reason: True}) == 6.0 * every * (reason == "is_unsure")
