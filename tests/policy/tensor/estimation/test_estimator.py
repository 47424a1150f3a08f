"""Full-work numbers of one rank, with how sure they are, learned from the times of its steps, whatever it owns."""

import dataclasses

import numpy as np
import pytest
from helpers.states import resumed
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.group import Workshares
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.estimator import RankEstimator
from zeroresize.policy.tensor.estimation.times import MOVING_REST, StepTimes
from zeroresize.utils.codec import encoded

COST = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.015, 0.02, 0.01))
REST_S, GEMM_S = 0.3, 0.7


def steps(
    ratio=0.0, truth=COST, chi=1.0, number=5, *, owned=1.0, borrowed=0.0, rho=0.0, rest_chi=1.0, gathers=1.0, noise=None
):
    """Steps at γ of a rank that owns so much, whose multiplications cost what ``truth`` says."""
    times = []
    for _ in range(number):
        factors = 1.0 + noise.normal(0.0, 0.02, 2) if noise is not None else (1.0, 1.0)
        executed = truth.executed_at(owned, ratio) + (truth.borrowed_at(borrowed) if borrowed else 0.0)
        gemm_s = factors[0] * chi * GEMM_S * executed
        gather_fill_s = gathers * owned * truth.gather_fill_at(ratio)
        rest_s = factors[1] * rest_chi * REST_S * (1.0 - rho * (1.0 - owned))
        shares = Workshares(ratio, 0.0, borrowed, owned)
        times.append(StepTimes(rest_s + gemm_s + gather_fill_s, gemm_s, gather_fill_s, shares))
    return times


def with_calibration_step(ratio, truth=COST, chi=1.0, **changes):
    return [*steps(0.0, truth, chi, number=1), *steps(ratio, truth, chi, **changes)]


def learned(*intervals, calibrated=COST):
    estimator = RankEstimator(calibrated)
    for interval in intervals:
        estimator.learn(interval)
    return estimator


@given(st.floats(0.0, 0.9), st.floats(0.05, 3.0), st.floats(0.3, 8.0))
def test_a_rank_that_is_first_seen_under_a_plan_is_told_by_the_calibration(ratio, owned, chi):
    for shares in ({"ratio": ratio}, {"owned": owned, "rho": MOVING_REST}):
        times = learned(steps(chi=chi, **shares)).times
        assert times.gemm_s == pytest.approx(chi * GEMM_S, rel=1e-6)
        assert times.rest_s == pytest.approx(REST_S, rel=1e-6)


@settings(deadline=None)
@given(st.floats(0.6, 1.6), st.floats(0.1, 0.9), st.booleans())
def test_a_wrong_calibration_is_corrected_by_calibration_steps_or_by_a_change_of_plan(factor, ratio, calibrates):
    truth = COST.scaled([factor] * 4)
    begins = [with_calibration_step(ratio, truth)] if calibrates else [steps(0.0, truth), steps(ratio, truth)]
    estimator = learned(*begins, *[steps(ratio, truth)] * 4)
    assert estimator.cost.gemm_share_at(ratio) == pytest.approx(truth.gemm_share_at(ratio), rel=0.05)
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.05)
    assert estimator.times.busy_s == pytest.approx(REST_S + GEMM_S, rel=0.05)


@pytest.mark.parametrize("chi", [0.25, 0.5, 2.0, 4.0])
@pytest.mark.parametrize("shares", [{}, {"ratio": 0.6}, {"owned": 0.15, "rho": MOVING_REST}, {"owned": 1.2}], ids=str)
def test_a_jump_under_one_plan_is_one_of_speed(chi, shares):
    estimator = learned(*[steps(**shares)] * 4)
    before = estimator.cost
    estimator.learn(steps(chi=chi, **shares))
    assert estimator.times.gemm_s == pytest.approx(chi * GEMM_S, rel=0.05)
    assert estimator.cost.gemm_share == pytest.approx(before.gemm_share, rel=0.02)


@pytest.mark.parametrize("chi", [0.25, 4.0])
def test_a_jump_right_before_a_new_plan_is_unsure_until_a_calibration_step_tells(chi):
    corrected = learned(*[steps(chi=2.0)] * 4, with_calibration_step(0.6, chi=chi))
    assert corrected.times.gemm_s == pytest.approx(chi * GEMM_S, rel=0.03)
    surprised = learned(*[steps()] * 4, steps(0.6, chi=chi))
    expected = learned(*[steps()] * 4, steps(0.6))
    assert surprised.times.deviation > 0.15 > 0.05 > expected.times.deviation
    surprised.learn(steps(chi=chi))
    assert surprised.times.gemm_s == pytest.approx(chi * GEMM_S, rel=0.05)
    for estimator in (corrected, surprised):
        assert estimator.cost.gemm_share_at(0.6) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("full_gemm_s", [0.0, 0.01, 50.0])
def test_a_hiccup_is_not_taken_for_the_cost_of_pruning(full_gemm_s):
    """Nor a step in which the layers did not run: of several steps it is none that counts."""
    estimator = learned(*[steps(0.6)] * 3)
    before, usual = estimator.cost, steps(0.6)
    estimator.learn([*usual[:2], StepTimes(60.0, full_gemm_s, 0.0, Workshares(0.6)), *usual[2:]])
    estimator.learn([*steps(0.6), StepTimes(0.1, 0.0, 0.0, Workshares(0.6))])
    assert estimator.cost.gemm_share == pytest.approx(before.gemm_share, rel=0.01)
    assert estimator.times.busy_s == pytest.approx(REST_S + GEMM_S, rel=0.02)


def test_how_long_gathers_take_is_told_where_they_were_measured():
    estimator = learned(*[steps(0.6, gathers=1.7)] * 6)
    assert estimator.times.gather_fill_scale == pytest.approx(1.7, rel=0.01)
    estimator.learn(steps(0.005, gathers=9.0))
    assert estimator.times.gather_fill_scale == pytest.approx(1.7, rel=0.01), "so few are only guessed"


@settings(deadline=None)
@given(st.floats(0.6, 2.5), st.floats(0.3, 1.5), st.floats(0.0, 0.8))
def test_what_borrowed_columns_cost_is_learned(factor, share, spared):
    truth = COST.scaled([1.0] * 4, borrowing=factor)
    estimator = learned(*[steps()] * 3, *[steps(spared)] * 3)
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
    truth = COST.scaled([1.4] * 4)
    saved = learned(*[steps(ratio, truth, chi) for ratio, chi in intervals])
    loaded = resumed(saved, RankEstimator(ResizingCost.linear(0.9)))
    assert (loaded.times, loaded.cost) == (saved.times, saved.cost)
    for estimator in (saved, loaded):
        estimator.learn(with_calibration_step(0.5, truth))
        estimator.learn(steps(0.5, truth, 2.0, borrowed=0.1))
    assert (loaded.times, loaded.cost, repr(encoded(loaded))) == (saved.times, saved.cost, repr(encoded(saved)))


def test_a_rank_that_computes_no_products_tells_nothing_of_its_speed():
    """Products of no columns take microseconds all the same."""
    estimator = learned(steps())
    before = estimator.times
    for shares in (Workshares(lent=1.0), Workshares(owned=0.0)):
        for _ in range(20):
            estimator.learn([StepTimes(0.3, 2e-5, 0.0, shares)] * 5)
        assert estimator.times.gemm_s == before.gemm_s
    estimator.learn(steps())
    assert estimator.times.gemm_s == pytest.approx(before.gemm_s, rel=0.05)


@pytest.mark.parametrize("chi", [1.0, 4.0])
@pytest.mark.parametrize("rho", [0.0, 0.2, 0.8])
@pytest.mark.parametrize("owned", [0.05, 0.3, 1.14, 1.8])
def test_a_move_is_no_jump_of_speed_and_what_moves_along_is_learned_and_remembered(owned, rho, chi):
    """Whatever of the rest moves along: speed and its certainty stay what they were."""
    noise = np.random.default_rng(3)
    estimator = learned(*[steps(chi=chi, noise=noise) for _ in range(12)])
    before = estimator.times
    for share in (owned, 1.0, owned, 1.0):
        for _ in range(6):
            estimator.learn(steps(owned=share, chi=chi, rho=rho, noise=noise))
            assert estimator.times.gemm_s == pytest.approx(chi * GEMM_S, rel=0.06)
            assert estimator.times.rest_s == pytest.approx(REST_S, rel=0.06)
    assert estimator.times.deviation <= 2.0 * before.deviation + 0.01
    assert abs(owned - 1.0) < 0.5 or estimator.times.moving_rest == pytest.approx(rho, abs=0.06)


@pytest.mark.parametrize("moving_weights", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("update", [0.0, 0.4, 1.0])
def test_before_a_move_what_updates_the_moving_weights_is_taken_to_move_along(update, moving_weights):
    estimator = RankEstimator(COST)
    for _ in range(3):
        updating = [dataclasses.replace(step, update_s=update * REST_S) for step in steps()]
        estimator.learn(updating, moving_weights=moving_weights)
        expected = moving_weights * update + MOVING_REST * (1.0 - update)
        assert estimator.times.moving_rest == pytest.approx(expected)
    for _ in range(12):
        estimator.learn(steps(owned=0.3, rho=0.7), moving_weights=moving_weights)
    assert estimator.times.moving_rest == pytest.approx(0.7, abs=0.06), "a move tells more"


@pytest.mark.parametrize("slows_rest", [False, True])
@pytest.mark.parametrize("chi", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("owned", [0.02, 0.35, 1.14, 1.8])
@pytest.mark.parametrize("wrong", [0.6, 1.0, 1.6])
def test_a_spell_that_ends_just_with_a_move_is_over(owned, chi, slows_rest, wrong):
    """Steps at the old speed under the old plan, steps at the new speed under the new one: products timed in turn
    between them tell which is which."""
    truth = COST.scaled([wrong] * 4)
    slow = steps(chi=chi, rest_chi=chi if slows_rest else 1.0)
    estimator = learned(*[steps()] * 4, *[slow] * 3)
    estimator.compare(owned, truth.executed_at(owned))
    for number in range(3):
        estimator.learn(steps(owned=owned, rho=0.2, truth=truth))
        assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.12), number
    assert estimator.times.busy_s <= 1.35 * (REST_S + GEMM_S) or estimator.times.deviation > 0.15


@pytest.mark.parametrize("before", [1, 2, 5, 8])
@pytest.mark.parametrize("chi", [1.5, 10.0])
@pytest.mark.parametrize("owned", [0.15, 1.0, 1.3])
def test_a_recovery_within_an_interval_is_seen_at_its_end(before, chi, owned):
    """At any step but the last one of ten; one step alone, before or after, is a hiccup."""
    estimator = learned(*[steps()] * 4, *[steps(chi=chi)] * 2)
    estimator.compare(owned, COST.executed_at(owned))
    away = {"owned": owned, "rho": 0.2}
    estimator.learn(steps(chi=chi, **away))
    estimator.learn([*steps(chi=chi, number=before, **away), *steps(number=10 - before, **away)])
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.1)


@pytest.mark.parametrize("slows_rest", [False, True])
@pytest.mark.parametrize("chi", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("beside", [0.5, 1.5])
@pytest.mark.parametrize("sees_old", [False, True])
def test_a_rank_without_units_is_seen_to_recover_by_a_reference(chi, slows_rest, beside, sees_old):
    """Whatever the reference takes beside the products of a step, and whether the first one still saw the old speed."""
    estimator = RankEstimator(COST)
    estimator.learn_reference(beside * GEMM_S, 1.0)
    for interval in (*[steps()] * 4, *[steps(chi=chi, rest_chi=chi if slows_rest else 1.0)] * 3):
        estimator.learn(interval)
    estimator.learn_reference(beside * GEMM_S * (chi if sees_old else 1.0), 0.0)
    for _ in range(4):
        estimator.learn_reference(beside * GEMM_S, 0.0)
        estimator.learn([StepTimes(0.8 * REST_S, 0.0, 0.0, Workshares(owned=0.0))] * 5)
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.15)
    assert estimator.times.rest_s == pytest.approx(REST_S, rel=0.15) or estimator.times.deviation > 0.15


@pytest.mark.parametrize("widening", [0.8, 1.3])
def test_what_is_owned_beyond_an_even_share_need_not_be_in_proportion(widening):
    truth = ResizingCost(COST.ratios, COST.gemm_share, COST.gather_fill_s, widening=widening)
    estimator = learned(*[steps()] * 4)
    estimator.compare(1.6, truth.executed_at(1.6))
    for _ in range(3):
        estimator.learn(steps(owned=1.6, truth=truth, rho=0.2))
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.05)
    assert estimator.cost.executed_at(1.3) == pytest.approx(truth.executed_at(1.3), rel=0.05)


@pytest.mark.parametrize(("fixed", "shares"), [(0.6, [1.5]), (0.6, [1.5, 1.7, 1.9]), (0.6, [0.5]), (0.3, [0.5, 0.37])])
def test_what_no_move_takes_along_is_no_slowness_where_moves_alone_tell(fixed, shares):
    """Of hosts' own forwards a part stays however many units a rank has."""
    estimator = RankEstimator(ResizingCost.linear(0.9))
    for owned in (1.0, *shares):
        gemm_s = GEMM_S * (fixed + (1.0 - fixed) * owned)
        for _ in range(3):
            times = [dataclasses.replace(step, busy_s=REST_S + gemm_s, gemm_s=gemm_s) for step in steps(owned=owned)]
            estimator.learn(times, by_moves=True)
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.1)
    assert estimator.times.owning(owned).gemm_s == pytest.approx(gemm_s, rel=0.05)
