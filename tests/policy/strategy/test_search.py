"""The search for ranges and strategies, beside trying everything."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.layout import TensorSpec, UnitDivision
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel, LayerCost, LayerCostTable
from zeroresize.policy.strategy.costs.search import candidate_strategies, default_thresholds, search_strategies
from zeroresize.policy.strategy.packing import packed_sums
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds

TENSORS = tuple(TensorSpec(f"{layer}.weight", layer, (8, 25), 4, UnitDivision(0, 8, 1)) for layer in range(4))
CANDIDATES = [Strategy(dp=4), Strategy(tp=4), Strategy(dp=2, tp=2), Strategy(pp=4)]


def cost_model(bytes_per_s, communication=1.0, token_bytes=0.0):
    """Tensor parallelism divides what tokens cost, but adds to it; data parallelism waits for long sequences."""
    costs = {
        tp: LayerCost(0.2, (1.0 + communication * (tp - 1) / 4) / tp, 0.05 / tp, token_bytes / tp) for tp in (1, 2, 4)
    }
    layers = LayerCostTable(("block",) * 4, {"block": costs}, 0.1)
    return CostModel(layers, TENSORS, (0, 0, 1, 1), LinkSpeeds(bytes_per_s, bytes_per_s / 4))


def long_tailed(seed, num_batches, num_sequences=6, longest=32):
    lengths = np.random.default_rng(seed).pareto(1.0, (num_batches, num_sequences)) * 2 + 1
    return lengths.astype(int).clip(1, longest).tolist()


def everything(sample, cost, memory_limit, thresholds, max_ranges):
    """The least step of all ranges, strategies, strategies of the optimizer and orders that fit."""
    best, switch_s = (
        np.inf,
        {optimizer_strategy: switches(optimizer_strategy, cost, memory_limit) for optimizer_strategy in CANDIDATES},
    )
    work = functools.cache(lambda way, own, up_to: cost.work_seconds(way, packed_sums(own, up_to, way.dp)))
    fits = functools.cache(lambda *values: cost.fits(*values, memory_limit))
    for count in range(1, max_ranges + 1):
        for ends in itertools.combinations(thresholds[:-1], count - 1):
            for optimizer_strategy, *chosen in itertools.product(CANDIDATES, repeat=count + 1):
                pairs = list(zip((*ends, thresholds[-1]), chosen, strict=True))
                # One and the same strategy in two neighbouring ranges is not what the search looks for.
                is_meant = all(one != other for one, other in itertools.pairwise(chosen))
                if is_meant and all(fits(own, optimizer_strategy, up_to) for up_to, own in pairs):
                    step = step_seconds(pairs, optimizer_strategy, sample, work, switch_s[optimizer_strategy])
                    best = min(best, step + cost.reduction_seconds(optimizer_strategy))
    return best


def switches(optimizer_strategy, cost, limit):
    """Seconds of every switch, infinite where one does not fit into the memory."""
    number = CANDIDATES.index(optimizer_strategy)
    fits = cost.switches_fit(CANDIDATES, number, limit)
    seconds = np.where(fits, cost.switches.seconds(CANDIDATES, number), np.inf)
    return {pair: seconds[pair] for pair in itertools.product(range(len(CANDIDATES)), repeat=2)}


def step_seconds(pairs, optimizer_strategy, sample, work, switch_s):
    """Of ranges (up_to, strategy), by every order of the switches."""
    total, start = 0.0, CANDIDATES.index(optimizer_strategy)
    for lengths in sample:
        used, shortest = set(), 0
        for up_to, strategy in pairs:
            in_range = tuple(sorted(length for length in lengths if shortest < length <= up_to))
            shortest = up_to
            if in_range:
                total += work(strategy, in_range, up_to)
                used.add(CANDIDATES.index(strategy))
        total += min(
            sum(switch_s[one, other] for one, other in itertools.pairwise((start, *order, start)))
            for order in itertools.permutations(used - {start})
        )
    return total / len(sample)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    speed=st.sampled_from([1e2, 1e3, 1e4, 1e5]),
    communication=st.sampled_from([0.2, 1.0, 4.0]),
    is_tight=st.booleans(),
)
def test_nothing_that_fits_is_faster(seed, speed, communication, is_tight):
    cost = cost_model(speed, communication, token_bytes=40.0)
    sample, thresholds = long_tailed(seed, num_batches=2, num_sequences=12), [4, 12, 32]
    # Tight: the longest sequences fit with tensor parallelism alone.
    limit = 5000.0 if is_tight else 1e9
    result = search_strategies(sample, CANDIDATES, cost, memory_limit=limit, thresholds=thresholds, max_ranges=3)
    assert result.best.step_s == pytest.approx(everything(sample, cost, limit, thresholds, 3), rel=1e-12)
    assert result.best.step_s <= result.static.step_s


def search(cost, sample, **changes):
    values = {"memory_limit": 1e9, "thresholds": [4, 8, 16, 32], "max_ranges": 4}
    return search_strategies(sample, CANDIDATES, cost, **(values | changes))


def test_switching_pays_where_links_are_fast_and_not_where_they_are_slow():
    sample = [[4] * 32 + [32]] * 2
    fast, slow = (search(cost_model(speed, communication=4.0), sample) for speed in (1e9, 1.0))
    assert len({own.strategy for own in fast.ranges}) > 1 and fast.speedup > 1.1
    assert len(slow.ranges) == 1 and slow.speedup == 1.0 and slow.optimizer_strategy == slow.ranges[0].strategy
    assert search(cost_model(1e3), sample, max_ranges=1).best == search(cost_model(1e3), sample).static


def test_mini_batches_pay_for_the_strategies_that_they_need_alone():
    cost, short = cost_model(1e5, communication=4.0), [4] * 32
    sample = [*[[*short, 32]] * 3, short]
    for max_tokens in (None, 64):
        result = search(cost, sample, thresholds=[4, 32], max_tokens=max_tokens)
        assert [each.max_tokens for each in result.ranges] == [max_tokens or each.up_to for each in result.ranges]
        assert len(result.ranges) > 1
        limits = {each.up_to: each.max_tokens for each in result.ranges}
        expected = step_seconds(
            [(each.up_to, each.strategy) for each in result.ranges],
            result.optimizer_strategy,
            sample,
            lambda way, own, up_to, limits=limits: cost.work_seconds(way, packed_sums(own, limits[up_to], way.dp)),
            switches(result.optimizer_strategy, cost, 1e9),
        )
        assert result.best.step_s == pytest.approx(expected + cost.reduction_seconds(result.optimizer_strategy))


def test_candidates_are_all_degrees_that_divide():
    strategies = candidate_strategies(8, 4, units=[12, 48], ranks_per_node=4)
    assert {own.degrees for own in strategies} == {(8, 1, 1), (4, 1, 2), (2, 1, 4), (4, 2, 1), (2, 2, 2), (1, 2, 4),
                                             (2, 4, 1), (1, 4, 2)}  # fmt: skip
    assert Strategy(tp=8) in candidate_strategies(8, 4, units=[8], ranks_per_node=4)
    assert Strategy(tp=6) not in candidate_strategies(6, 4, units=[6], ranks_per_node=4)
    assert default_thresholds(4096, 500) == [512, 1024, 2048, 4096]


def test_what_cannot_be_searched_is_refused():
    for changes, message in (
        ({"thresholds": [8, 8]}, "that rise"),
        ({"thresholds": [4, 8]}, "sequences of 1 to 32 tokens: allowed are 1 to 8"),
        ({"max_tokens": 16}, "max_tokens=16 is not allowed"),
        ({"max_ranges": 0}, "max_ranges=0"),
        ({"memory_limit": 10.0}, "none of the strategies"),
    ):
        with pytest.raises(ValueError, match=message):
            search(cost_model(1e3), [[1, 32]], **changes)
