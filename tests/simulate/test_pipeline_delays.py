"""Pipelines whose links change, on numbers: what steps take, which division is wanted, and what moves cost."""

import itertools

import numpy as np
import pytest

from scripts.simulated.pipeline_delays import DelayRule, simulate_delays, simulate_delays_oracle
from scripts.simulated.pipeline_training import LayerLoads
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.bubbles import simulated_step

FREE = MoveCost(0.0, 0.0)


def loads_of(layer_s, num_steps):
    """Two thirds are backward; a layer has one byte."""
    layer_s = np.tile(layer_s, (num_steps, 1))
    return LayerLoads(layer_s / 3, layer_s * 2 / 3, np.ones(layer_s.shape[1]))


def counts_of(boundaries):
    return Partition(boundaries).counts


def test_a_static_pipeline_takes_in_each_step_what_its_messages_make_it_take():
    random = np.random.default_rng(0)
    layer_s, message_s = random.uniform(0.5, 1.5, 6), random.uniform(0.0, 2.0, (5, 2))
    trace = simulate_delays(loads_of(layer_s, 5), message_s, (0, 1, 4, 6), num_microbatches=4)
    stage_s = [layer_s[:1].sum(), layer_s[1:4].sum(), layer_s[4:].sum()]
    steps = [
        simulated_step([row / 3 for row in stage_s], [row * 2 / 3 for row in stage_s], 4, communication_s=row.tolist())
        for row in message_s
    ]
    assert trace.step_s == pytest.approx([step.step_s for step in steps])
    assert trace.bubble_ratios == pytest.approx([step.bubble_ratio for step in steps])
    assert (trace.num_moves, trace.move_s) == (0, 0.0)


@pytest.mark.parametrize("method", ["partition", "diffusion"])
@pytest.mark.parametrize("messages", ["newest", "running"])
def test_stages_beside_a_link_that_becomes_slow_give_layers_away(messages, method):
    """From step 10 on both neighbours wait for what four layers take; measured there, they have fewer from 13 on."""
    message_s = np.zeros((40, 3))
    message_s[10:, 1] = 4.0
    rule = DelayRule(messages, method, every=10, cost_of_move=FREE)
    trace = simulate_delays(loads_of(np.ones(16), 40), message_s, (0, 4, 8, 12, 16), num_microbatches=32, rule=rule)
    assert next(step for step, row in enumerate(trace.boundaries) if counts_of(row) != (4, 4, 4, 4)) == 13
    assert counts_of(trace.boundaries[-1]) == (6, 2, 2, 6)


def test_what_ignores_messages_stays_where_they_matter():
    message_s = np.tile([0.0, 4.0, 0.0], (40, 1))
    rule = DelayRule("ignored", every=10, cost_of_move=FREE)
    trace = simulate_delays(loads_of(np.ones(16), 40), message_s, (0, 4, 8, 12, 16), num_microbatches=32, rule=rule)
    assert trace.num_moves == 0


@pytest.mark.parametrize(
    ("messages", "counts"),
    # 3 s to the next stage; 4 s from the first stage to the last, and 2 s from the second.
    [("sent", (3, 3, 6)), ("arrival", (2, 4, 6))],
)
def test_both_readings_of_the_supplement(messages, counts):
    message_s = {"sent": [3.0, 3.0], "arrival": [2.0, 2.0]}[messages]
    rule = DelayRule(messages, "partition", every=1, cost_of_move=FREE)
    trace = simulate_delays(
        loads_of(np.ones(12), 5), np.tile(message_s, (5, 1)), (0, 4, 8, 12), num_microbatches=32, rule=rule
    )
    assert counts_of(trace.boundaries[-1]) == counts


def test_layers_move_when_staying_has_cost_the_move_there_and_back():
    """Stages of 3 and of 2 layers differ by 40 s a step: ten steps cost 400 s without a move of 1,001 s each way."""
    loads, message_s = loads_of(np.ones(4), 60), np.zeros((60, 1))
    rule = DelayRule(every=10, cost_of_move=MoveCost(1.0, 1000.0))
    trace = simulate_delays(loads, message_s, (0, 1, 4), num_microbatches=40, rule=rule)
    moved = [step for step, row in enumerate(trace.boundaries) if row == (0, 2, 4)]
    # The sixth profile, of step 50, makes it 2,400 s.
    assert moved == [53, 54, 55, 56, 57, 58, 59]
    assert (trace.num_moves, trace.move_s) == (1, 1001.0)


def test_the_oracle_has_the_shortest_of_all_steps():
    random = np.random.default_rng(0)
    layer_s, message_s = random.lognormal(0.0, 0.5, 7), random.uniform(0.0, 1.5, (6, 2))
    loads = loads_of(layer_s, 6)
    static = [
        simulate_delays(loads, message_s, (0, *inner, 7), num_microbatches=24).step_s
        for inner in itertools.combinations(range(1, 7), 2)
    ]
    assert simulate_delays_oracle(loads, message_s, num_microbatches=24).step_s == pytest.approx(np.min(static, axis=0))


def test_delays_of_other_steps_are_an_error():
    with pytest.raises(ValueError, match="is not of 3 steps"):
        simulate_delays(loads_of(np.ones(4), 3), np.zeros((2, 1)), (0, 2, 4), num_microbatches=2)


@pytest.mark.parametrize("wrong", [{"messages": "known"}, {"method": "best"}, {"every": 0}])
def test_rules_that_do_not_exist_are_an_error(wrong):
    with pytest.raises(ValueError, match="are not allowed"):
        DelayRule(**wrong)
