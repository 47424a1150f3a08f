"""Pipelines that are balanced on paper."""

import numpy as np
import pytest

from scripts.simulated.pipeline_training import simulate_pipeline
from scripts.simulated.pipelines import LayerLoads, PipelineCluster
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.rebalancing import RebalancingRule
from zeroresize.runtime.simulated_steps import simulated_step

STEPS, LAYERS, MICRO, EVERY = 60, 16, 8, 10
UNIFORM = Partition.uniform(LAYERS, 4).boundaries


def loads_of(work=None):
    work = np.ones((STEPS, LAYERS)) if work is None else work
    return LayerLoads(0.001 * work, 0.002 * work, np.full(LAYERS, 4e6))


def slow_from(step, stage=2, speed=0.5):
    speeds = np.ones((STEPS, 4))
    speeds[step:, stage] = speed
    return speeds


def balanced(loads, cluster, boundaries=UNIFORM, every=EVERY, **options):
    rule = RebalancingRule("time", "1f1b", MICRO, every)
    return simulate_pipeline(loads, cluster, boundaries, num_microbatches=MICRO, rule=rule, **options)


def test_a_static_pipeline_takes_what_its_schedule_takes():
    trace = simulate_pipeline(loads_of(), PipelineCluster(4, slow_from(30)), UNIFORM, num_microbatches=MICRO)
    quick, slow = (
        simulated_step([0.004, 0.004, third, 0.004], [0.008, 0.008, 2 * third, 0.008], MICRO)
        for third in (0.004, 0.008)
    )
    assert trace.step_s == pytest.approx([quick.step_s] * 30 + [slow.step_s] * 30)
    assert trace.bubble_ratios[0] == pytest.approx(quick.bubble_ratio)
    assert (trace.num_moves, trace.overhead, set(trace.boundaries)) == (0, 0.0, {UNIFORM})
    assert trace.total_s == pytest.approx(sum(trace.step_s))


def test_a_slow_stage_is_relieved_once_it_was_measured_twice():
    cluster = PipelineCluster(4, slow_from(25), move=MoveCost(0.0, 0.01), profiled_share=0.05)
    static = simulate_pipeline(loads_of(), cluster, UNIFORM, num_microbatches=MICRO)
    trace = balanced(loads_of(), cluster)
    # measured in steps 1, 11, 21, 31 and, as that wants a move, 33; known one step later, and made in the next
    assert trace.boundaries[35] == UNIFORM and trace.boundaries[36] != UNIFORM
    between = balanced(loads_of(), cluster, move_during_backward=False)
    assert between.boundaries[34] == UNIFORM and between.boundaries[35] != UNIFORM
    assert trace.num_moves == 1 and trace.move_s == pytest.approx(0.01)
    assert trace.step_s[-1] < 0.7 * static.step_s[-1]
    assert trace.bubble_ratios[-1] < static.bubble_ratios[-1]
    assert trace.total_s == pytest.approx(sum(trace.step_s) + trace.profile_s + trace.move_s)
    num_profiles = trace.profile_s / (0.05 * trace.step_s[0])
    assert 6 <= num_profiles <= 12


@pytest.mark.parametrize(("during", "delay"), [(True, 5), (False, 4)])
def test_work_of_which_the_balancer_is_told_is_followed_at_once(during, delay):
    """Told behind step 20: measured in 21 and, to confirm, in 22; known one step later."""
    work = np.ones((STEPS, LAYERS))
    work[21:, :8] = 0.1
    trace = balanced(loads_of(work), PipelineCluster(4), changes=[20], move_during_backward=during)
    assert trace.boundaries[20 + delay - 1] == UNIFORM and trace.boundaries[20 + delay] != UNIFORM


@pytest.mark.parametrize(("every", "is_known"), [(4, True), (10, True), (10, False)])
def test_work_that_changes_to_and_fro_is_never_much_worse_than_off(every, is_known):
    """Halves of the layers alternate, and no division is good for both: what moves lose is noticed, and undone."""
    num_steps = 300
    work = np.ones((num_steps, LAYERS))
    for begin in range(0, num_steps, every):
        half = slice(LAYERS // 2) if begin // every % 2 else slice(LAYERS // 2, LAYERS)
        work[begin : begin + every, half] = 2.0
    changes = range(every - 1, num_steps, every) if is_known else ()
    cluster = PipelineCluster(4, move=MoveCost(0.0, 0.05), profiled_share=0.05)
    static = simulate_pipeline(loads_of(work), cluster, UNIFORM, num_microbatches=MICRO)
    trace = balanced(loads_of(work), cluster, every=10, changes=changes, max_measuring=0.01)
    assert trace.total_s <= static.total_s * 1.06 + trace.profile_s


def test_a_move_that_was_wanted_for_other_work_is_not_made():
    """Known at the end of step 34, when the work becomes even on all devices."""
    speeds = slow_from(25)
    speeds[35:] = 1.0
    assert balanced(loads_of(), PipelineCluster(4, speeds), changes=[34]).num_moves == 0
    assert balanced(loads_of(), PipelineCluster(4, speeds)).num_moves > 0


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("num_stages", [4, 8])
def test_a_stage_that_recovers_gets_its_layers_back(num_stages, every):
    """With two layers a stage as with four. Or others do that are as fast: which divisions are depends on filling."""
    num_steps, uniform = 400, Partition.uniform(LAYERS, num_stages).boundaries
    speeds = np.ones((num_steps, num_stages))
    speeds[100:250, 1] = 0.25
    loads = LayerLoads(*(seconds * np.ones((num_steps, LAYERS)) for seconds in (0.001, 0.002)), np.full(LAYERS, 4e6))
    trace = balanced(loads, PipelineCluster(num_stages, speeds, noise=0.02), uniform, every)
    static = simulate_pipeline(loads, PipelineCluster(num_stages, speeds), uniform, num_microbatches=MICRO)
    assert np.mean(trace.step_s[160:250]) < 0.7 * np.mean(static.step_s[160:250])
    assert np.mean(trace.step_s[300:]) < 1.03 * np.mean(static.step_s[300:])
