"""Boundaries that shorten the step, not only its slowest stage."""

import itertools

import numpy as np
from helpers.pipelines import all_partitions
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad
from zeroresize.policy.pipeline.shortest_step import refined_partition
from zeroresize.runtime.simulated_steps import simulated_steps


def step_of(load, num_microbatches, schedule="1f1b"):
    def steps_s(boundaries):
        times = np.diff(load.cost_sums[boundaries]) / load.speeds / num_microbatches
        return simulated_steps(times, 2 * times, num_microbatches, schedule=schedule)

    return steps_s, lambda partition: float(steps_s(np.array([partition.boundaries]))[0])


@settings(max_examples=60)
@given(
    costs=st.lists(st.floats(0.1, 10.0), min_size=4, max_size=9),
    num_stages=st.integers(2, 4),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
)
def test_no_shift_of_boundaries_shortens_the_step_and_it_is_never_longer_than_before(costs, num_stages, schedule):
    load = PipelineLoad.of(costs, num_stages)
    (steps_s, step_s), before = step_of(load, 4, schedule), balanced_partition(load)
    after = refined_partition(load, before, steps_s, 1000)
    assert step_s(after) <= step_s(before)
    for (first, last), shift in itertools.product(itertools.combinations(range(1, num_stages + 1), 2), (-1, 1)):
        shifted = np.array(after.boundaries)
        shifted[first:last] += shift
        if np.all(np.diff(shifted) > 0):
            assert step_s(Partition(tuple(shifted.tolist()))) >= step_s(after) * (1 - 1e-6)


def test_most_random_loads_get_the_shortest_step_of_all():
    rng, num_shortest, ratios = np.random.default_rng(0), 0, []
    for _ in range(50):
        load = PipelineLoad.of(rng.lognormal(0.0, 0.5, 9), 3)
        steps_s, step_s = step_of(load, 3)
        refined_s = step_s(refined_partition(load, balanced_partition(load), steps_s, 1000))
        shortest = min(step_s(one) for one in all_partitions(9, 3))
        num_shortest += refined_s <= shortest * (1 + 1e-9)
        ratios.append(step_s(balanced_partition(load)) / refined_s)
    assert num_shortest >= 45
    assert max(ratios) > 1.03 and min(ratios) >= 1.0


def test_memory_limits_are_kept():
    costs = [1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0]
    free = PipelineLoad.of(costs, 3)
    steps_s, step_s = step_of(free, 4)
    assert step_s(Partition((0, 6, 8, 9))) < step_s(Partition((0, 6, 7, 9)))
    assert refined_partition(free, Partition((0, 6, 7, 9)), steps_s, 1000) == Partition((0, 6, 8, 9))
    tight = PipelineLoad.of(costs, 3, layer_bytes=[1.0] * 9, memory_limits=[9.0, 1.0, 9.0])
    assert refined_partition(tight, Partition((0, 6, 7, 9)), steps_s, 1000) == Partition((0, 6, 7, 9))


def test_a_single_stage_stays():
    load = PipelineLoad.of([1.0, 2.0], 1)
    assert refined_partition(load, Partition((0, 2)), lambda boundaries: np.ones(len(boundaries)), 1000) == Partition(
        (0, 2)
    )


@given(
    costs=st.lists(st.floats(0.1, 10.0), min_size=8, max_size=16),
    num_stages=st.integers(2, 8),
    affordable=st.integers(0, 60),
)
def test_no_more_steps_are_simulated_than_are_affordable_and_the_step_never_becomes_longer(
    costs, num_stages, affordable
):
    load, asked = PipelineLoad.of(costs, num_stages), []
    steps_s, step_s = step_of(load, 8)

    def counted(boundaries):
        asked.append(len(boundaries))
        return steps_s(boundaries)

    before = balanced_partition(load)
    after = refined_partition(load, before, counted, affordable)
    assert max(asked, default=0) <= affordable and len(asked) <= 9
    assert step_s(after) <= step_s(before)
    if affordable < 2 * (num_stages - 1):
        assert not asked
    elif len(costs) > num_stages:
        assert len(asked) > 1, "single boundaries are affordable"
