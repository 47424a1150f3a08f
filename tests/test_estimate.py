"""Full-work numbers of one rank, learned from the times of its steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.estimate import FullWorkEstimate, StepTimes

PRETESTED = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.015, 0.02, 0.01))
REST_S, GEMM_S = 0.3, 0.7


def steps(ratio, truth=PRETESTED, chi=1.0, number=5):
    """Steps at γ whose multiplications cost what ``truth`` says."""
    gemm_s, overhead_s = chi * GEMM_S * truth.gemm_share_at(ratio), truth.overhead_at(ratio)
    return [StepTimes(REST_S + gemm_s + overhead_s, gemm_s, overhead_s, ratio)] * number


def test_nothing_is_known_before_the_first_interval():
    estimate = FullWorkEstimate(PRETESTED)
    estimate.learn([])
    assert estimate.times is None and estimate.cost == PRETESTED


@given(st.floats(0.5, 2.0), st.floats(0.4, 0.9), st.booleans())
def test_a_wrong_pre_test_is_corrected_by_steps_at_full_work(exponent, ratio, in_one_interval):
    """Seen right before pruning began, or in a step at full work in its midst."""
    truth, estimate = PRETESTED.with_exponents([exponent] * 4), FullWorkEstimate(PRETESTED)
    for _ in range(16):
        if in_one_interval:
            estimate.learn([*steps(0.0, truth, number=1), *steps(ratio, truth)])
        else:
            estimate.learn(steps(0.0, truth))
            estimate.learn(steps(ratio, truth))
    assert estimate.cost.gemm_share_at(ratio) == pytest.approx(truth.gemm_share_at(ratio), rel=0.01)
    assert estimate.times.gemm_s == pytest.approx(GEMM_S, rel=0.01)
    assert estimate.times.busy_s == pytest.approx(REST_S + GEMM_S, rel=0.01)


@pytest.mark.parametrize("chi", [0.3, 4.0])
def test_a_change_of_speed_is_not_taken_for_the_cost_of_pruning(chi):
    estimate = FullWorkEstimate(PRETESTED)
    estimate.learn(steps(0.0))
    estimate.learn(steps(0.6, chi=chi))
    assert estimate.cost == PRETESTED
    assert estimate.times.gemm_s == pytest.approx(chi * GEMM_S)


def test_what_was_measured_long_before_tells_nothing_of_the_cost():
    """Pruning, its ratio changed, at another speed: no step at full work in this interval or the one before."""
    estimate = FullWorkEstimate(PRETESTED)
    for interval in (steps(0.0), steps(0.6), steps(0.8, chi=1.3)):
        estimate.learn(interval)
    assert estimate.cost.gemm_share == pytest.approx(PRETESTED.gemm_share)


def test_a_ratio_that_hardly_shrinks_the_products_tells_nothing_of_the_cost():
    estimate = FullWorkEstimate(PRETESTED)
    estimate.learn(steps(0.0))
    estimate.learn(steps(0.05, chi=0.9))
    assert estimate.cost == PRETESTED


def test_an_interval_of_two_plans_counts_the_last_one():
    estimate = FullWorkEstimate(PRETESTED)
    estimate.learn([*steps(0.6, chi=9.0), *steps(0.3)])
    assert estimate.times.gemm_s == pytest.approx(GEMM_S)


def test_an_estimate_goes_on_from_its_state():
    truth = PRETESTED.with_exponents([0.6] * 4)
    one, other = FullWorkEstimate(PRETESTED), FullWorkEstimate(PRETESTED)
    for interval in (steps(0.0, truth), steps(0.6, truth), steps(0.0, truth)):
        one.learn(interval)
    other.load_state_dict(one.state_dict())
    for estimate in (one, other):
        estimate.learn(steps(0.5, truth))
    assert other.times == one.times and other.exponents == one.exponents != [None] * 4
