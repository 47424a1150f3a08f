"""What steps take on slow ranks where their samples or layers are planned anew, and what fits into memory then."""

import math

import numpy as np
import pytest
from helpers.micro_batches import Lengths, table_of

from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.plan import PlanningOptions
from zeroresize.policy.microbatches.planning import plan_iteration
from zeroresize.policy.microbatches.replanned_costs import PlannedModel, ReplannedCosts

NUM_LAYERS = 8
LENGTHS = Lengths("gpt", 40)(0)
LAYER_BYTES = 64


def costs_and_plan(strategy, memory_limit=math.inf):
    """Costs of a job, its plan, and what its micro-batches take."""
    costs_of = table_of("gpt", num_layers=NUM_LAYERS).costs
    tensors = [TensorSpec(f"layers.{number}.weight", number, (LAYER_BYTES,), 1) for number in range(NUM_LAYERS)]
    model = PlannedModel(strategy, NUM_LAYERS, tensors, [0] * strategy.num_ranks, (12,), (23,))
    options = PlanningOptions(strategy.dp, memory_limit)
    table = costs_of(strategy.partition(NUM_LAYERS).boundaries)
    return ReplannedCosts(model, costs_of, options), plan_iteration(0, LENGTHS, table, options), table


def test_a_slow_replica_takes_fewer_samples_and_a_slow_stage_fewer_layers():
    """Ideally 4 / 3 of what it was, both ways; without a new plan it is nearly twice as much."""
    for strategy, moved, slow in (
        (Strategy(2), Strategy(2), (1.0, 0.5)),
        (Strategy(pp=2), Strategy(pp=2, boundaries=(0, 3, NUM_LAYERS)), (0.5, 1.0)),
    ):
        costs, plan, _ = costs_and_plan(strategy)
        costs.expect([plan])
        as_it_was_s = costs.as_planned_s((strategy,), slow)
        assert 1.1 * costs.range_s(0, moved, slow) < as_it_was_s <= 2.0 * plan.expected_s * (1.0 + 1e-9)
        assert costs.range_s(0, strategy, (1.0, 1.0)) == pytest.approx(plan.expected_s, rel=0.15)
    assert costs_and_plan(Strategy(2))[0].options_of(Strategy(2), (1.0, 0.5)).slowness == ((1.0,), (2.0,))


def test_what_takes_too_much_memory_does_not_fit():
    """With seven layers instead of four the longest sample does not fit, whatever is computed again."""
    table = table_of("gpt", num_layers=NUM_LAYERS).costs((0, 4, NUM_LAYERS))["layers"]
    longest = float(table.prices(np.ones(1, dtype=int), LENGTHS.max(axis=0)[None]).activation_bytes.max())
    strategy, moved = Strategy(pp=2), Strategy(pp=2, boundaries=(0, 1, NUM_LAYERS))
    costs, plan, _ = costs_and_plan(strategy, memory_limit=1.3 * longest + 4.0 * LAYER_BYTES * 3.0)
    # weights, gradients and Adam's two of three layers more
    assert costs.options_of(moved).memory_limit == pytest.approx(1.3 * longest)
    costs.expect([plan])
    assert costs.fits(0, strategy, strategy) and not costs.fits(0, moved, moved)


def test_what_a_rank_should_take_is_its_stages_part_of_its_replicas_micro_batches():
    strategy = Strategy(2, 1, 2)
    costs, plan, table = costs_and_plan(strategy)
    for rank in range(4):
        position = strategy.position_of(rank)
        expected = 0.0
        for each in plan.replicas[position.replica].microbatches:
            prices = table[plan.recomputation].prices(np.array([each.size]), np.array([each.lengths]))
            expected += float((prices.forward_s + prices.backward_s)[0, position.stage])
        assert costs.work_s(plan, strategy, rank) == pytest.approx(expected)
    assert costs.range_s(0, Strategy(1, 2, 2), (1.0,) * 4) == math.inf  # nobody knows what halves of layers take
