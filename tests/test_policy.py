"""Decisions on plain numbers: what must hold for any times a group may measure."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zeroresize.config import BalanceConfig
from zeroresize.policy.column_order import ALIGNMENT, decided_columns, pruned_of_order, random_order
from zeroresize.policy.controller import Controller
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.estimate import FullWorkEstimate
from zeroresize.policy.ratio import find_stragglers, pruning_ratios, reference_time
from zeroresize.policy.rules import HEADROOM
from zeroresize.policy.selector import ColumnSelector, Relief
from zeroresize.policy.smoothing import smoothed, steadied
from zeroresize.policy.times import RankTimes, StepTimes, full_work

LINEAR = ResizingCost.linear(0.9)
#: Half the columns take .6 of the time, gathering takes up to 20 ms.
REALISTIC = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0, 0.015, 0.02, 0.01))

seconds = st.floats(0.01, 10.0)
ranks_times = st.lists(
    st.builds(RankTimes, seconds, seconds, st.just(1.0), st.sampled_from([LINEAR, REALISTIC])), min_size=2, max_size=9
)


def rank(rest_s, gemm_s, cost=LINEAR, overhead_scale=1.0):
    return RankTimes(rest_s, gemm_s, overhead_scale, cost)


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


def test_a_useless_ratio_is_not_chosen():
    cost = ResizingCost((0.0, 0.5, 0.9), (1.0, 0.9, 0.9), (0.0, 0.0, 0.05))
    assert rank(0.0, 1.0, cost).ratio_to_reach(0.5) == 0.5


@given(seconds, seconds, st.floats(0.0, 0.9))
def test_full_work_undoes_the_plan_that_was_in_force(rest_s, gemm_s, ratio):
    truth = rank(rest_s, gemm_s, REALISTIC, overhead_scale=1.7)
    measured_gemm_s = gemm_s * REALISTIC.gemm_share_at(ratio)
    measured_overhead_s = 1.7 * REALISTIC.overhead_at(ratio)
    seen = full_work(truth.busy_at(ratio), measured_gemm_s, measured_overhead_s, ratio, REALISTIC, last_scale=1.7)
    assert seen.busy_s == pytest.approx(truth.busy_s)
    assert seen.gemm_s == pytest.approx(gemm_s)
    assert seen.overhead_scale == pytest.approx(1.7)


def test_reference_time_of_many_ranks_is_a_low_quantile():
    assert reference_time([3.0, 1.0, 2.0], "min") == 1.0
    assert reference_time([3.0, 1.0, 2.0], "mean") == 2.0
    assert reference_time([float(t) for t in range(1, 102)], "min") == 26.0


def test_who_was_a_straggler_is_let_go_at_half_the_tolerance():
    assert find_stragglers([1.0, 1.08], 1.0, 0.1, [False, False]) == (False, False)
    assert find_stragglers([1.0, 1.08], 1.0, 0.1, [False, True]) == (False, True)
    assert find_stragglers([1.0, 1.04], 1.0, 0.1, [False, True]) == (False, False)


@given(st.integers(1, 200), st.integers(1, 40), st.floats(0, 1, exclude_max=True))
def test_pruned_columns_are_whole_blocks_and_leave_some(num_columns, block, ratio):
    order = random_order(num_columns, block=block, seed=0, epoch=0, rank=0, layer=0)
    pruned = pruned_of_order(order, ratio, block)
    kept = order[len(pruned) :]
    assert len(kept) >= 1
    assert set(pruned // block).isdisjoint(kept // block)
    if num_columns > block:
        wanted = min(ratio, 1 - block / num_columns) * num_columns
        short = -num_columns % block  # missing in the last block
        assert wanted - block / 2 - short <= len(pruned) <= ratio * num_columns + block / 2


@given(st.integers(1, 200), st.integers(1, 40), st.floats(0, 1, exclude_max=True), st.floats(0.1, 0.95))
def test_no_more_columns_are_pruned_than_the_largest_ratio_allows(num_columns, block, ratio, max_ratio):
    order = random_order(num_columns, block=block, seed=0, epoch=0, rank=0, layer=0)
    pruned = pruned_of_order(order, ratio, block, max_ratio)
    assert len(pruned) <= max_ratio * num_columns + 1e-9
    assert set(pruned // block).isdisjoint(order[len(pruned) :] // block)


@given(st.integers(1, 4096), st.floats(0, 1, exclude_max=True), st.floats(0.1, 0.95))
def test_what_a_controller_decides_keeps_a_multiple_of_eight_columns_where_there_are_enough(k, ratio, max_ratio):
    ratio = min(ratio, max_ratio)
    num_pruned = len(decided_columns(np.arange(k), ratio, 1, max_ratio))
    assert num_pruned <= max_ratio * k + 1e-9
    assert abs(num_pruned / k - ratio) <= max(0.025, 1 / k) + 1e-9
    nearest = max(round((1 - ratio) * k / 8) * 8, 0)
    if ratio > 0.0 and k - nearest <= max_ratio * k and abs(1 - nearest / k - ratio) < 0.024:
        assert (k - num_pruned) % ALIGNMENT == 0 or num_pruned == 0


def test_a_forced_ratio_is_kept_to_the_column_and_a_decided_one_aligned():
    selector = ColumnSelector(BalanceConfig(), 0, {"small": 48, "large": 768}, {"small": 1.0, "large": 1.0})
    forced = selector.pruned_columns(Relief(0.3, is_forced=True))
    decided = selector.pruned_columns(Relief(0.3))
    assert {name: len(columns) for name, columns in forced.items()} == {"small": 14, "large": 230}
    assert {name: len(columns) for name, columns in decided.items()} == {"small": 14, "large": 232}
    assert set(forced["large"]) < set(decided["large"])


@given(
    st.integers(2, 800), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.99]), st.integers(1, 3)
)
@example(num_columns=384, spared=1.0, part=0.99, max_ratio=0.99, block=1)
@example(num_columns=8, spared=1.0, part=0.5, max_ratio=0.95, block=1)
def test_what_is_pruned_beside_a_loan_stays_within_the_largest_ratio(num_columns, spared, part, max_ratio, block):
    config = BalanceConfig(mode="semi", max_ratio=max_ratio, block=block)
    selector = ColumnSelector(config, 0, {"layer": num_columns}, {"layer": 1.0})
    relief = Relief(pruned=max_ratio * spared * part, lent=max_ratio * spared * (1.0 - part))
    pruned, lent = selector.pruned_columns(relief)["layer"], selector.lent_columns(relief)["layer"]
    assert set(pruned).isdisjoint(lent)
    assert not len(pruned) or len(pruned) + len(lent) <= max_ratio * num_columns + 1e-9


@given(st.integers(1, 100), st.integers(1, 20), st.integers(0, 5), st.integers(0, 5))
def test_random_order_is_a_permutation_of_whole_blocks(num_columns, block, epoch, rank_number):
    order = random_order(num_columns, block=block, seed=1, epoch=epoch, rank=rank_number, layer=0)
    assert sorted(order) == list(range(num_columns))
    blocks = [column // block for column in order]
    assert len(set(blocks)) == len(list(itertools.groupby(blocks)))
    again = random_order(num_columns, block=block, seed=1, epoch=epoch, rank=rank_number, layer=0)
    assert np.array_equal(order, again)


def test_orders_differ_by_epoch_rank_layer_and_seed():
    base = dict(block=1, seed=0, epoch=0, rank=0, layer=0)
    orders = [random_order(64, **base)] + [
        random_order(64, **{**base, k: 1}) for k in ("seed", "epoch", "rank", "layer")
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_smoothing_keeps_missing_averages_noise_and_follows_jumps():
    assert math.isnan(smoothed(math.nan, math.nan, 0.7))
    assert smoothed(1.0, math.nan, 0.7) == 1.0
    assert smoothed(math.nan, 2.0, 0.7) == 2.0
    assert smoothed(1.0, 1.1, 0.7) == pytest.approx(1.07)
    assert smoothed(1.0, 4.0, 0.7) == 4.0


def test_small_changes_of_the_ratio_must_be_wanted_twice():
    assert steadied(0.5, 0.55, 0.50, 0.02) == 0.5
    assert steadied(0.5, 0.55, 0.53, 0.02) == pytest.approx(0.53)
    assert steadied(0.5, 0.55, 0.45, 0.02) == 0.5
    assert steadied(0.5, 0.7, 0.5, 0.02) == 0.7
    assert steadied(0.5, 0.0, 0.5, 0.02) == 0.0
    assert steadied(0.5, 0.2, 0.5, 0.02) == 0.2


def test_a_small_start_must_be_wanted_twice_and_a_large_one_happens_at_once():
    assert steadied(0.0, 0.2, 0.0, 0.02) == 0.0
    assert steadied(0.0, 0.2, 0.15, 0.02) == 0.15
    assert steadied(0.0, 0.5, 0.0, 0.02) == 0.5


class SimulatedRank:
    """A rank whose products take χ times their time; tells what it would measure under a ratio."""

    def __init__(self, rest_s=0.3, gemm_s=0.7, cost=REALISTIC, noise=None, believed=None):
        self.rest_s, self.gemm_s, self.cost, self.chi = rest_s, gemm_s, cost, 1.0
        self._estimate = FullWorkEstimate(believed or cost)
        self._noise = noise or (lambda: 1.0)

    def measure(self, ratio, begins_at_full_work):
        steps = [self._step(0.0 if begins_at_full_work else ratio)] + [self._step(ratio) for _ in range(9)]
        self._estimate.learn(steps)
        return self._estimate.times

    def _step(self, ratio):
        truth = rank(self.rest_s * self._noise(), self.gemm_s * self.chi * self._noise(), self.cost)
        gemm_s = truth.gemm_s * self.cost.gemm_share_at(ratio)
        return StepTimes(truth.busy_at(ratio), gemm_s, self.cost.overhead_at(ratio), ratio)


def run_closed_loop(config, ranks, chi_at_update, num_updates):
    """γ of every rank after every update; what is measured in an interval is decided on one update later."""
    controller = Controller(config, len(ranks))
    plan, posted, trace = controller.initial_plan(), None, []
    for update in range(num_updates):
        for rank_number, simulated in enumerate(ranks):
            simulated.chi = chi_at_update(update).get(rank_number, 1.0)
        measured = [r.measure(p.pruned, plan.begins_at_full_work) for r, p in zip(ranks, plan.ranks, strict=True)]
        if posted is not None:
            plan = controller.update(posted)
        posted = measured
        trace.append([p.pruned for p in plan.ranks])
    return np.array(trace)


@pytest.mark.parametrize("chi", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_ratio_settles_in_three_updates_stays_and_lets_go_in_three(chi, noise):
    generator = np.random.default_rng(0)
    jitter = lambda: 1.0 + noise * generator.standard_normal()  # noqa: E731
    ranks = [SimulatedRank(noise=jitter) for _ in range(4)]
    trace = run_closed_loop(
        BalanceConfig(mode="zero-rd"), ranks, lambda update: {2: chi} if 5 <= update < 30 else {}, 40
    )[:, 2]
    steady = trace[8:30]
    assert steady.mean() > 0.3
    assert np.abs(steady - steady.mean()).max() <= 0.05
    assert (trace[33:] == 0.0).all()
    assert (trace[:5] == 0.0).all()


@pytest.mark.parametrize("chi", [1.5, 2.0, 4.0, 8.0])
@pytest.mark.parametrize("error", [0.8, 0.9, 1.0, 1.2, 1.4])
def test_a_wrong_pre_test_keeps_nobody_from_being_let_go(chi, error):
    """Where multiplications really take ``error`` times the share that was measured, at every ratio but 0."""
    truth = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, *(min(1.0, error * s) for s in (0.75, 0.5, 0.15))), (0.0,) * 4)
    believed = ResizingCost((0.0, 0.3, 0.6, 0.9), (1.0, 0.75, 0.5, 0.15), (0.0,) * 4)
    ranks = [SimulatedRank(cost=truth, believed=believed) for _ in range(2)]
    chi_at = lambda update: {1: chi} if 5 <= update < 30 else {}  # noqa: E731
    trace = run_closed_loop(BalanceConfig(mode="zero-rd"), ranks, chi_at, 45)[:, 1]
    assert (trace[8:30] > 0.0).all()
    assert (trace[32:] == 0.0).all()


def test_mean_target_asks_less_of_a_straggler_than_min():
    settled = {}
    for target in ("mean", "min"):
        ranks = [SimulatedRank(cost=LINEAR) for _ in range(4)]
        trace = run_closed_loop(BalanceConfig(mode="zero-rd", target=target), ranks, lambda _: {0: 2.0}, 6)
        settled[target] = trace[-1, 0]
    mean_busy = (3 * 1.0 + 1.7) / 4
    assert settled["mean"] == pytest.approx((1.7 - mean_busy) / 1.4)
    assert settled["min"] == pytest.approx((1.7 - (1 - HEADROOM) * 1.0) / 1.4)


def test_every_rank_slow_at_once_is_nobody_slow():
    ranks = [SimulatedRank() for _ in range(4)]
    trace = run_closed_loop(BalanceConfig(mode="zero-rd"), ranks, lambda _: dict.fromkeys(range(4), 6.0), 6)
    assert (trace == 0.0).all()


def test_off_measures_but_never_prunes():
    controller = Controller(BalanceConfig(mode="off"), 2)
    plan = controller.update([rank(0.3, 0.7), rank(0.3, 5.6)])
    assert [p.pruned for p in plan.ranks] == [0.0, 0.0]
    assert [p.is_straggler for p in plan.ranks] == [False, True]


def test_forced_ratio_on_named_ranks_holds_from_the_start_and_whatever_is_measured():
    controller = Controller(BalanceConfig(mode="zero-rd", ratio=0.5, ranks=[1]), 3)
    assert [p.pruned for p in controller.initial_plan().ranks] == [0.0, 0.5, 0.0]
    plan = controller.update([rank(0.3, 5.6), rank(0.3, 0.7), rank(0.3, 0.7)])
    assert [p.pruned for p in plan.ranks] == [0.0, 0.5, 0.0]


def test_forced_ratio_on_stragglers_waits_for_one_to_be_found():
    controller = Controller(BalanceConfig(mode="zero-rd", ratio=0.5), 2)
    assert [p.pruned for p in controller.initial_plan().ranks] == [0.0, 0.0]
    assert [p.pruned for p in controller.update([rank(0.3, 0.7), rank(0.3, 2.8)]).ranks] == [0.0, 0.5]


def test_a_rank_that_measured_nothing_yet_changes_nothing():
    controller = Controller(BalanceConfig(mode="zero-rd"), 2)
    plan = controller.update([rank(0.3, 0.7), rank(math.nan, math.nan)])
    assert [p.pruned for p in plan.ranks] == [0.0, 0.0]


def test_controller_goes_on_from_its_state():
    samples = [rank(0.3, 0.7), rank(0.3, 2.8)]
    one, other = (Controller(BalanceConfig(mode="zero-rd"), 2) for _ in range(2))
    one.update(samples)
    other.load_state_dict(one.state_dict())
    assert other.current_plan().ranks == one.current_plan().ranks
    assert other.update(samples) == one.update(samples)
    with pytest.raises(ValueError, match="of 2 ranks, this process group has 3"):
        Controller(BalanceConfig(), 3).load_state_dict(one.state_dict())


def test_beyond_what_was_measured_cost_follows_the_columns_left():
    assert REALISTIC.gemm_share_at(0.95) == pytest.approx(0.15 / 2)


def test_a_missing_sample_of_a_known_rank_changes_nothing():
    controller = Controller(BalanceConfig(mode="zero-rd"), 2)
    before = controller.update([rank(0.3, 0.7), rank(0.3, 2.8)])
    missing = RankTimes(math.nan, math.nan, math.nan, LINEAR)
    assert controller.update([rank(0.3, 0.7), missing]).ranks == before.ranks


def test_overhead_below_the_first_measured_ratio_says_nothing_of_its_scale():
    seen = full_work(1.0, 0.7, 0.045, ratio=0.005, cost=REALISTIC, last_scale=1.3)
    assert seen.overhead_scale == 1.3


@pytest.mark.parametrize("mode", ["zero-rd", "zero-pridiff"])
def test_however_layers_differ_no_segment_waits_for_a_straggler_that_prunes_another(mode):
    """Ranks meet after each segment, so time that one saves is no help in the other."""
    columns = {name: 64 for name in ("query", "value", "out", "fc1", "fc2")}
    costs = {"query": 1.0, "value": 1.0, "out": 1.0, "fc1": 4.0, "fc2": 4.0}
    segments = [["query", "value", "out"], ["fc1", "fc2"]]
    selector = ColumnSelector(BalanceConfig(mode=mode), 0, columns, costs, segments)
    rng = np.random.default_rng(0)
    selector.end_epoch({name: rng.random(64) * (1 + 9 * (name > "o")) for name in columns}, incremental=False)
    for ratio in (0.1, 0.5, 0.8):
        ratios = selector.layer_ratios(Relief(ratio))
        for segment in segments:
            spared = sum(costs[name] * ratios[name] for name in segment) / sum(costs[name] for name in segment)
            assert spared == pytest.approx(ratio, abs=0.02)
