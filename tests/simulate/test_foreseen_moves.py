"""Moves of layers by somebody who knows all that is to come."""

import itertools

import numpy as np
import pytest
from helpers.pipelines import all_partitions

from scripts.simulated.foreseen_moves import simulate_foreseen
from scripts.simulated.pipeline_training import LayerLoads, PipelineCluster, simulate_oracle, simulate_pipeline
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingRule

LAYERS, STAGES, MICRO, SPAN = 6, 3, 6, 4
EVEN = Partition.uniform(LAYERS, STAGES).boundaries


def loads_of(seed, num_spans=3):
    random = np.random.default_rng(seed)
    work = np.repeat(random.uniform(0.1, 2.0, (num_spans, LAYERS)), SPAN, axis=0)
    return LayerLoads(0.001 * work, 0.002 * work, np.full(LAYERS, 1e6))


def foreseen(loads, price_s, **options):
    cluster = PipelineCluster(STAGES, move=MoveCost(0.0, price_s))
    return simulate_foreseen(loads, cluster, EVEN, num_microbatches=MICRO, **options)


@pytest.mark.parametrize("seed", range(5))
def test_moves_for_nothing_are_the_oracles(seed):
    loads = loads_of(seed)
    oracle = simulate_oracle(loads, PipelineCluster(STAGES), num_microbatches=MICRO)
    assert foreseen(loads, 0.0).total_s == pytest.approx(oracle.total_s)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_no_sequence_of_divisions_is_faster(seed, delay):
    """All 1,000 sequences of ten divisions; a division that is best for no mean may be missed."""
    loads, price_s = loads_of(seed), 0.01
    cluster = PipelineCluster(STAGES)
    steps_s = {
        division.boundaries: simulate_pipeline(loads, cluster, division.boundaries, num_microbatches=MICRO).step_s
        for division in all_partitions(LAYERS, STAGES)
    }
    totals = []
    for divisions in itertools.product(steps_s, repeat=3):
        total, before = 0.0, EVEN
        for span, division in enumerate(divisions):
            moved = span * SPAN + (delay if span else 0)
            total += sum(steps_s[before][span * SPAN : moved]) + sum(steps_s[division][moved : (span + 1) * SPAN])
            total += price_s * (division != before)
            before = division
        totals.append(total)
    trace = foreseen(loads, price_s, delay=delay)
    assert min(totals) - 1e-12 <= trace.total_s <= 1.05 * min(totals)
    assert trace.total_s == pytest.approx(sum(trace.step_s) + price_s * trace.num_moves)
    changes = sum(before != after for before, after in itertools.pairwise((EVEN, *trace.boundaries)))
    assert changes == trace.num_moves


def test_what_costs_more_than_it_saves_is_left():
    loads = loads_of(0)
    static = simulate_pipeline(loads, PipelineCluster(STAGES), EVEN, num_microbatches=MICRO)
    assert foreseen(loads, 1e3).num_moves == 0
    assert foreseen(loads, 1e3).total_s == pytest.approx(static.total_s)
    assert foreseen(loads, 0.0, delay=SPAN).total_s <= static.total_s


def test_no_policy_gains_more():
    loads = loads_of(1, num_spans=12)
    cluster = PipelineCluster(STAGES, links=MoveCost(0.0, 0.01))
    rule = RebalancingRule("time", "1f1b", MICRO, 1)
    changes = range(SPAN - 1, 12 * SPAN, SPAN)
    balanced = simulate_pipeline(loads, cluster, EVEN, num_microbatches=MICRO, rule=rule, changes=changes)
    assert balanced.total_s >= foreseen(loads, 0.01).total_s


def test_work_that_changes_in_every_step_is_taken_together():
    random = np.random.default_rng(3)
    work = random.uniform(0.5, 1.5, (40, LAYERS)) * np.linspace(0.2, 2.0, LAYERS)
    loads = LayerLoads(0.001 * work, 0.002 * work, np.full(LAYERS, 1e6))
    static = simulate_pipeline(loads, PipelineCluster(STAGES), EVEN, num_microbatches=MICRO)
    trace = foreseen(loads, 1e-3)
    assert trace.total_s < static.total_s and trace.num_moves <= 16
