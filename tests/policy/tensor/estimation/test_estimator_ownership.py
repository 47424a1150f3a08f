"""What a rank's steps tell of its speed when it owns more or less than at even shares."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.group import Shares
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.estimator import RankEstimator
from zeroresize.policy.tensor.estimation.times import MOVING_REST, StepTimes

COST = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.015, 0.02, 0.01))
REST_S, GEMM_S = 0.3, 0.7


def steps(owned=1.0, chi=1.0, moving_rest=0.0, number=5, noise=None, cost=COST, borrowed=0.0, rest_chi=1.0):
    times = []
    for _ in range(number):
        factors = 1.0 + noise.normal(0.0, 0.02, 2) if noise is not None else (1.0, 1.0)
        executed = cost.executed_at(owned) + (cost.borrowed_at(borrowed) if borrowed else 0.0)
        gemm_s = factors[0] * chi * GEMM_S * executed
        rest_s = factors[1] * rest_chi * REST_S * (1.0 - moving_rest * (1.0 - owned))
        times.append(StepTimes(rest_s + gemm_s, gemm_s, 0.0, Shares(borrowed=borrowed, owned=owned)))
    return times


def learned(*intervals, calibrated=COST):
    estimator = RankEstimator(calibrated)
    for interval in intervals:
        estimator.learn(interval)
    return estimator


@settings(deadline=None)
@given(st.floats(0.05, 3.0), st.floats(0.3, 8.0))
def test_times_are_at_even_shares_whatever_is_owned_at_first(owned, chi):
    times = learned(steps(owned, chi, moving_rest=MOVING_REST)).times
    assert times.gemm_s == pytest.approx(chi * GEMM_S, rel=1e-6)
    assert times.rest_s == pytest.approx(REST_S, rel=1e-6)


@pytest.mark.parametrize("chi", [1.0, 4.0])
@pytest.mark.parametrize("moving_rest", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("owned", [0.05, 0.2, 0.5, 1.14, 1.8])
def test_a_move_is_no_jump_of_speed(owned, moving_rest, chi):
    """Whatever of the rest moves along: speed and its certainty stay what they were."""
    noise = np.random.default_rng(3)
    estimator = learned(*[steps(1.0, chi, noise=noise) for _ in range(12)])
    before = estimator.times
    for _ in range(6):
        estimator.learn(steps(owned, chi, moving_rest, noise=noise))
        assert estimator.times.gemm_s == pytest.approx(chi * GEMM_S, rel=0.06)
        assert estimator.times.rest_s == pytest.approx(REST_S, rel=0.06)
    assert estimator.times.deviation <= 2.0 * before.deviation + 0.01


@pytest.mark.parametrize("moving_rest", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("owned", [0.1, 0.3, 1.8])
def test_what_moves_along_is_learned_and_remembered(owned, moving_rest):
    noise = np.random.default_rng(5)
    estimator = learned(*[steps(noise=noise) for _ in range(12)])
    for _ in range(2):
        for share in (owned, 1.0):
            for _ in range(6):
                estimator.learn(steps(share, moving_rest=moving_rest, noise=noise))
    assert estimator.times.moving_rest == pytest.approx(moving_rest, abs=0.06)
    assert estimator.times.rest_s == pytest.approx(REST_S, rel=0.03)


@pytest.mark.parametrize("chi", [0.25, 4.0])
@pytest.mark.parametrize("owned", [0.15, 1.2])
def test_a_jump_of_speed_while_units_are_away_is_seen(owned, chi):
    estimator = learned(*[steps(1.0, 2.0)] * 4, *[steps(owned, 2.0, MOVING_REST)] * 4)
    estimator.learn(steps(owned, 2.0 * chi, MOVING_REST))
    assert estimator.times.gemm_s == pytest.approx(2.0 * chi * GEMM_S, rel=0.05)


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_wrong_curve_is_corrected_by_what_a_narrow_rank_takes(factor):
    truth = COST.scaled([factor] * 4)
    estimator = learned(*[steps()] * 6, *[steps(0.4, cost=truth, moving_rest=MOVING_REST)] * 6)
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.06)
    assert estimator.cost.executed_at(0.4) == pytest.approx(truth.executed_at(0.4), rel=0.08)


NARROW_TO_WIDE = [0.02, 0.15, 0.35, 0.5, 1.14, 1.8]


@pytest.mark.parametrize("slows_rest", [False, True])
@pytest.mark.parametrize("chi", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("owned", NARROW_TO_WIDE)
@pytest.mark.parametrize("wrong", [0.6, 1.0, 1.6])
def test_a_spell_that_ends_just_with_a_move_is_over(owned, chi, slows_rest, wrong):
    """Steps at the old speed under the old plan, steps at the new speed under the new one: products timed in turn
    between them tell which is which."""
    truth = COST.scaled([wrong] * 4)
    slow, usual = (steps(1.0, factor, rest_chi=factor if slows_rest else 1.0) for factor in (chi, 1.0))
    estimator = learned(*[usual] * 4, *[slow] * 3)
    estimator.compare(owned, truth.executed_at(owned))
    after = steps(owned, 1.0, moving_rest=0.2, cost=truth)
    for number in range(3):
        estimator.learn(after)
        assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.12), number
    assert estimator.times.busy_s <= 1.35 * (REST_S + GEMM_S) or estimator.times.deviation > 0.15


@pytest.mark.parametrize("before", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("chi", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("owned", [0.15, 1.0, 1.3])
def test_a_recovery_within_an_interval_is_seen_at_its_end(before, chi, owned):
    """At any step but the last one of ten; one step alone, before or after, is a hiccup."""
    estimator = learned(*[steps()] * 4, *[steps(1.0, chi)] * 2)
    estimator.compare(owned, COST.executed_at(owned))
    estimator.learn(steps(owned, chi, 0.2))
    estimator.learn([*steps(owned, chi, 0.2, number=before), *steps(owned, 1.0, 0.2, number=10 - before)])
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.1)


@pytest.mark.parametrize("slows_rest", [False, True])
@pytest.mark.parametrize("chi", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("beside", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("sees_old", [False, True])
def test_a_rank_without_units_is_seen_to_recover_by_a_reference(chi, slows_rest, beside, sees_old):
    """Whatever the reference takes beside the products of a step, and whether the first one still saw the old speed."""
    estimator = RankEstimator(COST)
    estimator.learn_reference(beside * GEMM_S, 1.0)
    for interval in (*[steps()] * 4, *[steps(1.0, chi, rest_chi=chi if slows_rest else 1.0)] * 3):
        estimator.learn(interval)
    estimator.learn_reference(beside * GEMM_S * (chi if sees_old else 1.0), 0.0)
    for _ in range(4):
        estimator.learn_reference(beside * GEMM_S, 0.0)
        estimator.learn([StepTimes(0.8 * REST_S, 0.0, 0.0, Shares(owned=0.0))] * 5)
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.15)
    assert estimator.times.rest_s == pytest.approx(REST_S, rel=0.15) or estimator.times.deviation > 0.15


@pytest.mark.parametrize("widening", [0.8, 1.3])
def test_what_is_owned_beyond_an_even_share_need_not_be_in_proportion(widening):
    truth = ResizingCost(COST.ratios, COST.gemm_share, COST.gather_fill_s, widening=widening)
    estimator = learned(*[steps()] * 4)
    estimator.compare(1.6, truth.executed_at(1.6))
    for _ in range(3):
        estimator.learn(steps(1.6, cost=truth, moving_rest=0.2))
    assert estimator.times.gemm_s == pytest.approx(GEMM_S, rel=0.05)
    assert estimator.cost.executed_at(1.3) == pytest.approx(truth.executed_at(1.3), rel=0.05)
