"""Full-work numbers of one rank, learned from the times of its steps."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.estimate import FullWorkEstimate
from zeroresize.policy.times import StepTimes

CALIBRATED = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.015, 0.02, 0.01))
REST_S, GEMM_S = 0.3, 0.7


def steps(ratio, truth=CALIBRATED, chi=1.0, number=5):
    """Steps at γ whose multiplications cost what ``truth`` says."""
    gemm_s, gather_fill_s = chi * GEMM_S * truth.gemm_share_at(ratio), truth.gather_fill_at(ratio)
    return [StepTimes(REST_S + gemm_s + gather_fill_s, gemm_s, gather_fill_s, ratio)] * number


def with_full_step(ratio, truth=CALIBRATED, chi=1.0):
    return [*steps(0.0, truth, chi, number=1), *steps(ratio, truth, chi)]


def test_nothing_is_known_before_the_first_interval():
    estimate = FullWorkEstimate(CALIBRATED)
    estimate.learn([])
    assert estimate.times is None and estimate.cost == CALIBRATED


@given(st.floats(0.6, 1.6), st.floats(0.1, 0.9))
def test_a_wrong_pre_test_is_corrected_by_steps_at_full_work(factor, ratio):
    truth, estimate = CALIBRATED.scaled([factor] * 4), FullWorkEstimate(CALIBRATED)
    for _ in range(20):
        estimate.learn(with_full_step(ratio, truth))
    assert estimate.cost.gemm_share_at(ratio) == pytest.approx(truth.gemm_share_at(ratio), rel=0.01)
    assert estimate.times.gemm_s == pytest.approx(GEMM_S, rel=0.01)
    assert estimate.times.busy_s == pytest.approx(REST_S + GEMM_S, rel=0.01)


def test_one_noisy_step_moves_what_is_far_from_it_only_little():
    estimate = FullWorkEstimate(CALIBRATED)
    estimate.learn([*steps(0.0, number=1), *steps(0.25, chi=1.2)])
    assert estimate.cost.gemm_share_at(0.3) == pytest.approx(0.75 * 1.2**0.8)
    assert estimate.cost.gemm_share_at(0.9) == pytest.approx(0.15 * 1.2**0.2)


@pytest.mark.parametrize("chi", [0.25, 0.5, 0.8, 1.5, 4.0])
def test_a_change_of_speed_from_one_interval_to_the_next_is_not_taken_for_the_cost_of_pruning(chi):
    estimate = FullWorkEstimate(CALIBRATED)
    for interval in (steps(0.0), steps(0.6, chi=chi), steps(0.0)):
        estimate.learn(interval)
        assert estimate.cost == CALIBRATED
    estimate.learn(steps(0.6, chi=chi))
    assert estimate.times.gemm_s == pytest.approx(chi * GEMM_S)


@pytest.mark.parametrize("full_gemm_s", [0.0, 0.01, 50.0])
def test_a_hiccup_is_not_taken_for_the_cost_of_pruning(full_gemm_s):
    """Nor a step in which the layers did not run."""
    estimate = FullWorkEstimate(CALIBRATED)
    estimate.learn([StepTimes(60.0, full_gemm_s, 0.0, 0.0), *steps(0.6)])
    estimate.learn([*steps(0.0), StepTimes(0.1, 0.0, 0.0, 0.6)])
    assert estimate.cost == CALIBRATED


def test_a_ratio_that_someone_forced_is_not_taken_for_what_decided_ones_cost():
    """It need not leave a number of columns that is fast to multiply."""
    estimate = FullWorkEstimate(CALIBRATED)
    estimate.learn(
        [*steps(0.0, number=1), *(dataclasses.replace(step, is_forced=True) for step in steps(0.6, chi=1.3))]
    )
    assert estimate.cost == CALIBRATED


def test_an_interval_of_two_plans_counts_the_last_one():
    estimate = FullWorkEstimate(CALIBRATED)
    estimate.learn([*steps(0.6, chi=9.0), *steps(0.3)])
    assert estimate.times.gemm_s == pytest.approx(GEMM_S)


def borrowing_steps(share, factor, spared=0.0):
    """A step at full work, then some in which another rank's columns take ``factor`` times as long as own ones."""
    executed = CALIBRATED.gemm_share_at(spared) + factor * CALIBRATED.borrowed_at(share)
    gather_fill_s = CALIBRATED.gather_fill_at(spared)
    gemm_s = GEMM_S * executed
    return [
        *steps(0.0, number=1),
        *[StepTimes(REST_S + gemm_s + gather_fill_s, gemm_s, gather_fill_s, spared, share)] * 5,
    ]


@given(st.floats(0.6, 2.5), st.floats(0.1, 1.5), st.floats(0.0, 0.8))
def test_what_borrowed_columns_cost_is_learned_by_steps_at_full_work(factor, share, spared):
    estimate = FullWorkEstimate(CALIBRATED)
    for _ in range(80):
        estimate.learn(borrowing_steps(share, factor, spared))
    assert estimate.cost.borrowed_at(share) == pytest.approx(factor * CALIBRATED.borrowed_at(share), rel=0.02)
    assert estimate.times.gemm_s == pytest.approx(GEMM_S, rel=0.02)
    assert estimate.cost.gemm_share == CALIBRATED.gemm_share, "of its own columns it says nothing"


def test_the_noisy_time_of_a_few_borrowed_columns_says_little():
    estimate = FullWorkEstimate(CALIBRATED)
    normal = borrowing_steps(0.02, 1.0)
    estimate.learn([normal[0], *(dataclasses.replace(step, gemm_s=1.05 * step.gemm_s) for step in normal[1:])])
    assert estimate.cost.borrowed_at(0.5) == pytest.approx(CALIBRATED.borrowed_at(0.5), rel=0.05)


def test_an_estimate_goes_on_from_its_state():
    """Also in a process whose own calibration said something else."""
    truth = CALIBRATED.scaled([1.4] * 4)
    one, other = FullWorkEstimate(CALIBRATED), FullWorkEstimate(ResizingCost.linear(0.9))
    one.learn(with_full_step(0.6, truth))
    one.learn(borrowing_steps(0.4, 1.5))
    other.load_state_dict(one.state_dict())
    assert other.cost == one.cost != CALIBRATED
    for estimate in (one, other):
        estimate.learn(with_full_step(0.5, truth))
    assert other.times == one.times and other.cost == one.cost
