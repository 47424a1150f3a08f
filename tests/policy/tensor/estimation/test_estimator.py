"""Full-work numbers of one rank, with how sure they are, learned from the times of its steps."""

import pytest
from helpers.states import resumed
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.group import Shares
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.estimator import RankEstimator
from zeroresize.policy.tensor.estimation.times import StepTimes
from zeroresize.utils.codec import encoded

CALIBRATED = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.015, 0.02, 0.01))
REST_S, GEMM_S = 0.3, 0.7


def steps(ratio, truth=CALIBRATED, chi=1.0, number=5, borrowed=0.0, gather_fill_scale=1.0, noise=None):
    """Steps at γ whose multiplications cost what ``truth`` says."""
    times = []
    for _ in range(number):
        factors = 1.0 + noise.normal(0.0, 0.02, 3) if noise is not None else (1.0, 1.0, 1.0)
        executed = truth.gemm_share_at(ratio) + (truth.borrowed_at(borrowed) if borrowed else 0.0)
        gemm_s, gather_fill_s = factors[0] * chi * GEMM_S * executed, gather_fill_scale * truth.gather_fill_at(ratio)
        times.append(
            StepTimes(factors[1] * REST_S + gemm_s + gather_fill_s, gemm_s, gather_fill_s, Shares(ratio, 0.0, borrowed))
        )
    return times


def with_calibration_step(ratio, truth=CALIBRATED, chi=1.0, **changes):
    return [*steps(0.0, truth, chi, number=1), *steps(ratio, truth, chi, **changes)]


def learned(*intervals, calibrated=CALIBRATED):
    estimator = RankEstimator(calibrated)
    for interval in intervals:
        estimator.learn(interval)
    return estimator


@given(st.floats(0.0, 0.9), st.floats(0.3, 8.0))
def test_a_rank_that_is_first_seen_under_a_plan_is_told_by_the_calibration(ratio, chi):
    times = learned(steps(ratio, chi=chi)).times
    assert times.gemm_s == pytest.approx(chi * GEMM_S, rel=1e-6)
    assert times.rest_s == pytest.approx(REST_S, rel=1e-6)


@settings(deadline=None)
@given(st.floats(0.6, 1.6), st.floats(0.1, 0.9), st.booleans())
def test_a_wrong_calibration_is_corrected_by_calibration_steps_or_by_a_change_of_plan(factor, ratio, calibrates):
    truth = CALIBRATED.scaled([factor] * 4)
    begins = [with_calibration_step(ratio, truth)] if calibrates else [steps(0.0, truth), steps(ratio, truth)]
    estimator = learned(*begins, *[steps(ratio, truth)] * 4)
    assert estimator.cost.gemm_share_at(ratio) == pytest.approx(truth.gemm_share_at(ratio), rel=0.05)
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.05)
    assert estimator.times.busy_s == pytest.approx(REST_S + GEMM_S, rel=0.05)


@pytest.mark.parametrize("chi", [0.25, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("ratio", [0.0, 0.6])
def test_a_jump_under_one_plan_is_one_of_speed(chi, ratio):
    estimator = learned(*[steps(ratio)] * 4)
    before = estimator.cost
    estimator.learn(steps(ratio, chi=chi))
    assert estimator.times.gemm_s == pytest.approx(chi * GEMM_S, rel=0.02)
    assert estimator.cost.gemm_share == pytest.approx(before.gemm_share, rel=0.02)


@pytest.mark.parametrize("chi", [0.25, 4.0])
def test_without_one_it_is_unsure_until_something_tells(chi):
    surprised = learned(*[steps(0.0)] * 4, steps(0.6, chi=chi))
    expected = learned(*[steps(0.0)] * 4, steps(0.6))
    assert surprised.times.deviation > 0.15 > 0.05 > expected.times.deviation
    surprised.learn(steps(0.0, chi=chi))
    assert surprised.times.gemm_s == pytest.approx(chi * GEMM_S, rel=0.05)
    assert surprised.cost.gemm_share_at(0.6) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("full_gemm_s", [0.0, 0.01, 50.0])
def test_a_hiccup_is_not_taken_for_the_cost_of_pruning(full_gemm_s):
    """Nor a step in which the layers did not run: of several steps it is none that counts."""
    estimator = learned(*[steps(0.6)] * 3)
    before = estimator.cost
    usual = steps(0.6)
    estimator.learn([*usual[:2], StepTimes(60.0, full_gemm_s, 0.0, Shares(0.6)), *usual[2:]])
    estimator.learn([*steps(0.6), StepTimes(0.1, 0.0, 0.0, Shares(0.6))])
    assert estimator.cost.gemm_share == pytest.approx(before.gemm_share, rel=0.01)
    assert estimator.times.busy_s == pytest.approx(REST_S + GEMM_S, rel=0.02)


def test_how_long_gathers_take_is_told_where_they_were_measured():
    estimator = learned(*[steps(0.6, gather_fill_scale=1.7)] * 6)
    assert estimator.times.gather_fill_scale == pytest.approx(1.7, rel=0.01)
    estimator.learn(steps(0.005, gather_fill_scale=9.0))
    assert estimator.times.gather_fill_scale == pytest.approx(1.7, rel=0.01), "so few are only guessed"


@settings(deadline=None)
@given(st.floats(0.6, 2.5), st.floats(0.3, 1.5), st.floats(0.0, 0.8))
def test_what_borrowed_columns_cost_is_learned(factor, share, spared):
    truth = CALIBRATED.scaled([1.0] * 4, borrowing=factor)
    estimator = learned(*[steps(0.0)] * 3, *[steps(spared)] * 3)
    for _ in range(6):
        estimator.learn([*steps(spared, number=1), *steps(spared, truth, borrowed=share)])
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.06)
    measured = truth.gemm_share_at(spared) + truth.borrowed_at(share)
    believed = estimator.cost.gemm_share_at(spared) + estimator.cost.borrowed_at(share)
    assert believed == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("shares", [(0.7, 0.36, 0.02, 0.02, 0.02), (0.1,) * 5])
def test_a_calibration_that_flops_contradict_is_not_believed(shares):
    ratios = (0.0, 0.18, 0.36, 0.54, 0.72, 0.9)
    estimator = RankEstimator(ResizingCost(ratios, (1.0, *shares), (0.0,) * 6))
    assert all(share >= 0.79 * (1.0 - ratio) for ratio, share in zip(ratios, estimator.cost.gemm_share, strict=True))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.6, 0.9]), st.floats(0.2, 8.0)), min_size=1, max_size=6))
@settings(deadline=None)
def test_an_estimator_goes_on_from_its_state_bit_for_bit(intervals):
    """Also in a process whose own calibration said something else."""
    truth = CALIBRATED.scaled([1.4] * 4)
    saved = RankEstimator(CALIBRATED)
    for ratio, chi in intervals:
        saved.learn(steps(ratio, truth, chi))
    loaded = resumed(saved, RankEstimator(ResizingCost.linear(0.9)))
    assert (loaded.times, loaded.cost) == (saved.times, saved.cost)
    for estimator in (saved, loaded):
        estimator.learn(with_calibration_step(0.5, truth))
        estimator.learn(steps(0.5, truth, 2.0, borrowed=0.1))
    assert (loaded.times, loaded.cost, repr(encoded(loaded))) == (saved.times, saved.cost, repr(encoded(saved)))


def test_a_rank_that_computes_no_products_tells_nothing_of_its_speed():
    """Products of no columns take microseconds all the same."""
    estimator = RankEstimator(CALIBRATED)
    estimator.learn([StepTimes(1.0, 0.8, 0.0)] * 5)
    before = estimator.times
    for _ in range(20):
        estimator.learn([StepTimes(0.3, 2e-5, 0.0, Shares(lent=1.0))] * 5)
    assert estimator.times.gemm_s == before.gemm_s
    estimator.learn([StepTimes(1.0, 0.8, 0.0)] * 5)
    assert estimator.times.gemm_s == pytest.approx(before.gemm_s, rel=0.05)
