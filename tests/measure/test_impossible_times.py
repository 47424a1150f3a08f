"""Times that no step can have taken are left out, whoever tells them and whatever else is told."""

import itertools
import math

import pytest
from helpers.processes import instances_of
from helpers.virtual_training import Run
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zeroresize import BalanceConfig
from zeroresize.config.keys import MODES
from zeroresize.measure import calibration
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.estimator import RankEstimator
from zeroresize.policy.tensor.estimation.times import RankTimes, StepTimes
from zeroresize.utils.codec import encoded

REALISTIC = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.01, 0.01, 0.01))
NOT_MEASURED = RankTimes(math.nan, math.nan, math.nan, REALISTIC)
IMPOSSIBLE = [0.0, -0.0, -1.0, math.inf, -math.inf, math.nan, 1e300, 5e-324]
UPDATES, RANKS = 8, 3
CONFIGS = [
    *({"mode": mode} for mode in MODES),
    {"mode": "semi", "budget": 0.0},
    {"mode": "semi", "paper": {"semi_rule": "paper"}},
]
CONFIGS += [
    {"mode": "mig", "paper": {"mig_rule": "paper"}},
    {"mode": "mig", "ratio": 0.5, "ranks": [0]},
    {"target": "mean"},
]

any_float = st.floats() | st.sampled_from(IMPOSSIBLE)
times = st.floats(0.1, 5.0)
points = st.tuples(any_float, any_float, any_float)


def measured(chi=1.0):
    return RankTimes(0.3, 0.7 * chi, 1.0, REALISTIC)


def test_an_impossible_time_counts_as_none():
    """Of a rank that is known and of one that is not, beside others that are measured."""
    for config, seconds in itertools.product(CONFIGS, (0.0, -1.0, math.inf, 1e300)):
        first, second = (Controller(BalanceConfig(**config), RANKS) for _ in range(2))
        wrong = RankTimes(0.3, seconds, 1.0, REALISTIC)
        for samples in ([wrong, measured(), measured(4.0)], [measured()] * 2, [measured(), wrong]):
            times = [*samples, measured(4.0)][:RANKS]
            known_times = [NOT_MEASURED if sample is wrong else sample for sample in times]
            assert repr(first.update(times)) == repr(second.update(known_times)), (config, seconds)
            assert repr(encoded(first)) == repr(encoded(second)), (config, seconds)


def a_cost(gather_fill_s, share, borrowing):
    """Others are refused where they are made."""
    try:
        return ResizingCost(REALISTIC.ratios, (1.0, share, 0.5, 0.15), (0.0, gather_fill_s, 0.01, 0.01), borrowing)
    except ValueError:
        return REALISTIC


samples = st.builds(RankTimes, any_float | times, any_float | times, any_float | st.just(1.0), st.just(REALISTIC)) | (
    st.builds(RankTimes, times, times, st.just(1.0), points.map(lambda three: a_cost(*three)))
)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    config=st.sampled_from(CONFIGS),
    updates=st.lists(
        st.tuples(st.lists(samples, min_size=RANKS, max_size=RANKS), any_float), min_size=1, max_size=UPDATES
    ),
    migration=st.none() | st.builds(MigrationCost, st.floats(0, 1), st.floats(0, 1)),
)
@example(
    config={"mode": "semi"},
    updates=[([measured(), measured(4.0), measured()], -1.0)] * 4,
    migration=MigrationCost(),
)
def test_whatever_is_told_plans_stay_within_limits_and_are_the_same_on_all_ranks(config, updates, migration):
    config = BalanceConfig(**config)
    controllers = [Controller(config, RANKS) for _ in range(2)]
    plans = [controller.initial_plan() for controller in controllers]
    for times, wait_s in updates:
        collectives = CollectiveTimes(wait_s, tuple(rank.lent for rank in plans[0].ranks), migration)
        plans = [controller.update(times, collectives) for controller in controllers]
        assert repr(plans[0]) == repr(plans[1])
        plan = plans[0]
        assert math.isnan(plan.predicted_step_s) or 0.0 < plan.predicted_step_s < math.inf
        for rank in plan.ranks:
            assert 0.0 <= rank.pruned <= config.max_ratio and 0.0 <= rank.lent <= 1.0
            assert rank.spared <= 1.0
        for loan in plan.loans:
            assert math.fsum(loan.parts) == pytest.approx(1.0) and min(loan.parts) >= 0.0
            assert loan.owner not in loan.receivers
        assert controllers[0].fingerprint(plan) == controllers[1].fingerprint(plan)
    chis = [1.0, 4.0, 1.0]
    for _ in range(12):  # and they follow what is measured as soon as it can be believed
        plan = controllers[0].update([measured(chi) for chi in chis])
    assert 0.0 < plan.predicted_step_s < math.inf
    if config.forced_ratio is None:
        assert [rank.is_straggler for rank in plan.ranks] == [False, True, False]


@given(st.lists(st.tuples(any_float, any_float, any_float), min_size=1, max_size=6))
def test_impossible_steps_are_left_out_of_an_interval(steps):
    estimate = RankEstimator(REALISTIC)
    usual = StepTimes(1.0, 0.7, 0.0)
    wrong = [StepTimes(*step) for step in steps]
    estimate.learn([usual, *(step for step in wrong if not step.is_possible), usual])
    assert estimate.times.rest_s == pytest.approx(0.3) and estimate.times.gemm_s == pytest.approx(0.7)
    assert 0.0 < estimate.times.deviation < 0.1
    estimate.learn(wrong)
    assert math.isfinite(estimate.cost.borrowing)


def test_a_calibration_whose_clock_stands_still_tells_nothing(run_ranks, monkeypatch):
    monkeypatch.setattr(calibration, "time_in_turn", lambda layer, cases, *_, **__: [[(0.0, 0.0)]] * len(cases))

    def train(rank, group):
        with instances_of(RankMonitor) as monitors:
            run = Run(group)
        run.steps(1)
        return monitors[0].cost == ResizingCost.linear(0.9)

    assert run_ranks(train, 2) == [True, True]
