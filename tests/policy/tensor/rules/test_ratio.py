"""How much a straggler prunes, from full-work times: Eq. (1) where cost is linear, the least that helps anywhere."""

import numpy as np
import pytest
from helpers.virtual_training import LINEAR, REALISTIC
from hypothesis import given
from hypothesis import strategies as st

from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.by_mode import wanted_division
from zeroresize.policy.tensor.rules.ratio import find_stragglers, pruning_ratios, reference_time

seconds = st.floats(0.01, 10.0)
ranks_times = st.lists(
    st.builds(RankTimes, seconds, seconds, st.just(1.0), st.sampled_from([LINEAR, REALISTIC])), min_size=2, max_size=9
)


def rank(rest_s, gemm_s, cost=LINEAR, gather_fill_scale=1.0):
    return RankTimes(rest_s, gemm_s, gather_fill_scale, cost)


def test_ratio_is_equation_1_where_cost_is_linear():
    times = [rank(0.2, 0.8), rank(0.2, 1.6)]  # T = 1.0 and 1.8
    ratios = pruning_ratios(times, [False, True], reference_s=1.0)
    assert ratios == [0.0, pytest.approx((1.8 - 1.0) / 1.6)]


@given(ranks_times, st.sampled_from(["mean", "min"]))
def test_ratios_are_the_least_that_bring_the_step_to_what_can_be_reached(times, target):
    reference_s = reference_time([t.busy_s for t in times], target)
    stragglers = find_stragglers([t.busy_s for t in times], reference_s, 0.1, [False] * len(times))
    ratios = pruning_ratios(times, stragglers, reference_s)
    floors_s = [1.01 * t.least_busy_s if slow else t.busy_s for t, slow in zip(times, stragglers, strict=True)]
    target_s = max(reference_s, *floors_s)
    for t, ratio, slow in zip(times, ratios, stragglers, strict=True):
        assert 0.0 <= ratio <= 0.9
        assert slow or ratio == 0.0
        assert t.busy_at(ratio) <= target_s * (1 + 1e-9)
        if ratio > 0.01:
            assert all(t.busy_at(less) > target_s * (1 - 1e-9) for less in np.linspace(0, ratio - 0.01, 20))


def test_a_rank_that_is_slow_outside_its_products_prunes_nothing():
    assert pruning_ratios([rank(1.0, 1.0), rank(4.0, 0.01)], [False, True], reference_s=2.0) == [0.0, 0.0]


def test_a_straggler_does_not_prune_below_what_the_slowest_can_reach():
    hopeless, mild = rank(2.0, 1.0), rank(0.5, 1.0)
    ratios = pruning_ratios([rank(0.5, 0.5), hopeless, mild], [False, True, True], reference_s=1.0)
    assert hopeless.busy_at(ratios[1]) == pytest.approx(1.01 * hopeless.least_busy_s)
    assert ratios[2] == 0.0, "the hopeless rank needs 2.1 s whatever the mild one (1.5 s) drops"


def test_reference_time_of_many_ranks_is_a_low_quantile():
    assert reference_time([3.0, 1.0, 2.0], "min") == 1.0
    assert reference_time([3.0, 1.0, 2.0], "mean") == 2.0
    assert reference_time([float(t) for t in range(1, 102)], "min") == 26.0


def test_who_was_a_straggler_is_let_go_at_half_the_tolerance():
    assert find_stragglers([1.0, 1.08], 1.0, 0.1, [False, False]) == (False, False)
    assert find_stragglers([1.0, 1.08], 1.0, 0.1, [False, True]) == (False, True)
    assert find_stragglers([1.0, 1.04], 1.0, 0.1, [False, True]) == (False, False)
    assert find_stragglers([1.0, 1.3], 1.0, 0.1, [False, False], [0.9, 1.01]) == (False, True)
    assert find_stragglers([1.0, 1.3], 1.0, 0.1, [False, True], [0.9, 0.99]) == (False, False)


@given(ranks_times, st.floats(0.0, 1.0))
def test_no_more_than_the_budget_is_pruned_and_all_of_it_where_that_helps(times, budget):
    reference_s = reference_time([t.busy_s for t in times], "min")
    stragglers = find_stragglers([t.busy_s for t in times], reference_s, 0.1, [False] * len(times))
    unbounded = pruning_ratios(times, stragglers, reference_s)
    ratios = pruning_ratios(times, stragglers, reference_s, budget=budget)
    dropped = sum(ratios) / len(ratios)
    assert dropped <= budget + 1e-9
    if sum(unbounded) / len(ratios) <= budget:
        assert ratios == unbounded
    assert all(ratio <= most + 1e-9 for ratio, most in zip(ratios, unbounded, strict=True))


@given(ranks_times, st.floats(0.0, 2.0))
def test_what_is_pruned_is_all_that_helps_if_that_is_worth_it_else_nothing(times, min_gain):
    """What is saved of the slowest straggler's time, less what each share that is pruned must save."""
    reference_s = reference_time([t.busy_s for t in times], "min")
    stragglers = find_stragglers([t.busy_s for t in times], reference_s, 0.1, [False] * len(times))
    fastest = pruning_ratios(times, stragglers, reference_s)
    chosen = pruning_ratios(times, stragglers, reference_s, min_gain=min_gain)
    slow = [(t, ratio) for t, ratio, is_slow in zip(times, fastest, stragglers, strict=True) if is_slow]
    before_s = max((t.busy_s for t, _ in slow), default=1.0)
    saved = 1.0 - max((t.busy_at(ratio) for t, ratio in slow), default=1.0) / before_s
    worth = saved - min_gain * sum(fastest) / max(len(slow), 1)
    assert abs(worth) < 1e-9 or chosen == (fastest if worth > 0.0 else [0.0] * len(times))


DEAR, CHEAP = MigrationCost(0.5, 1.0), MigrationCost(0.001, 0.005)


def few_products(num_ranks):
    """A tenth of a normal step; the last rank's take 2.5 times as long."""
    return [rank(0.09, 0.01)] * (num_ranks - 1) + [rank(0.09, 0.025)]


def division(times, migration=None, **config):
    stragglers = [False] * (len(times) - 1) + [True]
    return wanted_division(BalanceConfig(**config), times, stragglers, times[0].busy_s, migration)


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("mode", ["zero-rd", "zero-pri", "zero-pridiff", "semi"])
@pytest.mark.parametrize("migration", [None, DEAR])
def test_by_default_few_products_are_not_pruned(mode, num_ranks, migration):
    divided = division(few_products(num_ranks), migration, mode=mode)
    assert sum(divided.pruned) == sum(divided.lent) == 0.0
    assert sum(division(few_products(num_ranks), migration, mode=mode, min_gain=0.0).pruned) > 0.3


def test_semi_does_what_is_exact_where_pruning_is_not_worth_it():
    times = few_products(8)
    exact = division(times, CHEAP, mode="semi", budget=0.0)
    divided = division(times, CHEAP, mode="semi", min_gain=5.0)
    assert sum(divided.pruned) == 0.0
    assert sum(divided.lent) == pytest.approx(sum(exact.lent), abs=0.01) and sum(divided.lent) > 0.3
