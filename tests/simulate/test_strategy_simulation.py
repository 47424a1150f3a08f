"""Strategies on a simulated cluster: arithmetic of layers, and the combinations of the slides' Table 3."""

import numpy as np
import pytest

from lm_examples.length_distributions import DISTRIBUTIONS
from scripts.bench import strategy_tables
from scripts.bench.strategy_tables import (
    COMBINATIONS,
    EDGES,
    PAPER,
    STATIC,
    Memory,
    in_best_optimizer_strategy,
    mini_batches,
    ranges_of,
    searched,
)
from scripts.simulated.llama_tensors import LLAMA_32B
from scripts.simulated.strategies import (
    GpuCluster,
    llama_cost_model,
    llama_layer_costs,
    padded_rows,
)
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.forecast import packed_by_work
from zeroresize.policy.strategy.costs.search import search_strategies

K = 1024
CLUSTER = GpuCluster()
LIMIT = 72e9


@pytest.fixture(scope="module")
def cost():
    return llama_cost_model(LLAMA_32B, CLUSTER, (1, 2, 4, 8, 16))


def test_layers_cost_their_products_and_messages():
    costs = llama_layer_costs(LLAMA_32B, CLUSTER, (1, 8, 16))
    whole, node, nodes = (costs.stage_cost(range(60), tp) for tp in (1, 8, 16))
    num_weights = sum(own.num_bytes for own in llama_cost_model(LLAMA_32B, CLUSTER, (1,)).tensors) / 2
    # Norms and the embedding multiply nothing.
    assert whole.token_s * 156e12 / 6 == pytest.approx(num_weights, rel=0.01)
    assert whole.fixed_s == 0.0 and node.square_s == pytest.approx(whole.square_s / 8)
    message = 60 * 4 * 2 * 6656 * 2  # all-reduces of all blocks, twice their bytes
    assert node.token_s - whole.token_s / 8 == pytest.approx(message * 7 / 8 / 200e9)
    assert nodes.token_s - whole.token_s / 16 == pytest.approx(message * 15 / 16 / 200e9)
    slow = llama_layer_costs(LLAMA_32B, GpuCluster(between_bytes_per_s=1e9), (8, 16))
    assert slow.stage_cost(range(60), 16).token_s - whole.token_s / 16 == pytest.approx(message * 15 / 16 / 8e9)
    assert slow.stage_cost(range(60), 8).token_s == node.token_s


def test_rows_are_padded_and_sequences_are_not():
    assert padded_rows([5, 5, 3, 2], 8, 2) == [[[8]], [[8]]]
    assert sorted(packed_by_work([5, 5, 3, 2], 8, 2)) == [[[5, 2]], [[5, 3]]]


def test_every_combination_of_the_slides_fits_and_the_search_is_no_worse(cost):
    sample = [DISTRIBUTIONS["github"].mini_batch(2**21, 32 * K, np.random.default_rng(0))]
    memory = Memory(cost, LIMIT)
    slides = {
        name: in_best_optimizer_strategy(ranges_of(combination), sample, cost, padded_rows, memory)
        for name, combination in {"static": STATIC, **COMBINATIONS}.items()
    }
    candidates = [Strategy(8, 4, 1), *(Strategy(*own) for own in ((4, 2, 4), (4, 4, 2), (2, 8, 2), (1, 16, 2)))]
    result = search_strategies(
        sample, candidates, cost, memory_limit=LIMIT, thresholds=[K, 4 * K, 8 * K, 16 * K, 32 * K], pack=padded_rows,
        max_ranges=5,
    )  # fmt: skip
    assert result.best.step_s <= min(own.step_s for own in slides.values()) * (1 + 1e-12)
    assert slides["C1"].step_s < slides["static"].step_s
    # Each further strategy has its switches.
    assert slides["C1"].switch_s < slides["C2"].switch_s < slides["C3"].switch_s
    # Long sequences fit with much tensor parallelism alone: what (4, 2, 4) has room for ends soon behind 4K.
    optimizer_strategy = Strategy(1, 16, 2)
    assert cost.fits(Strategy(4, 2, 4), optimizer_strategy, 4 * K, LIMIT) and not cost.fits(
        Strategy(4, 2, 4), optimizer_strategy, 8 * K, LIMIT
    )


def test_what_is_searched_fits_the_memory_to_which_the_slides_combinations_are_held(monkeypatch):
    """Gradients are held in 32 bits; by those of 16, (8, 4, 1) would train more than it has room for."""
    degrees = ((8, 4, 1), (4, 2, 4), (4, 8, 1), (2, 16, 1), (1, 8, 4))
    candidates = [Strategy(*own) for own in degrees]
    monkeypatch.setattr(strategy_tables, "candidate_strategies", lambda *_, **__: candidates)
    slow = llama_cost_model(LLAMA_32B, GpuCluster(between_bytes_per_s=5.25e9), (1, 2, 4, 8, 16, 32))
    sample, memory = mini_batches("GitHub", 1, slow, packed_by_work), Memory(slow, LIMIT)
    in_32_bits = searched(sample, slow, packed_by_work, memory)
    in_16_bits = search_strategies(
        sample, candidates, slow, memory_limit=LIMIT, thresholds=EDGES, pack=packed_by_work, max_ranges=5
    )

    def forecast(result):
        return in_best_optimizer_strategy(
            result.ranges, sample, slow, packed_by_work, memory, [result.optimizer_strategy]
        )

    assert forecast(in_32_bits).ranges == in_32_bits.ranges
    with pytest.raises(ValueError, match="need more than"):
        forecast(in_16_bits)


@pytest.mark.parametrize("data", list(PAPER))
def test_at_the_fitted_bandwidth_the_totals_are_within_a_tenth_of_the_slides(data):
    """One number is fitted to six; what is not hidden of C3's switches is 4.9 s in the slides."""
    slow = llama_cost_model(LLAMA_32B, GpuCluster(between_bytes_per_s=5.25e9), (1, 2, 4, 8, 16))
    sample = mini_batches(data, 8, slow, packed_by_work)
    for name, (_, others_s, total_s) in PAPER[data].items():
        forecast = in_best_optimizer_strategy(
            ranges_of(COMBINATIONS[name]), sample, slow, packed_by_work, Memory(slow, LIMIT)
        )
        assert forecast.step_s == pytest.approx(total_s, rel=0.1), name
        assert forecast.switch_s + forecast.reduction_s < 1.1 * others_s
