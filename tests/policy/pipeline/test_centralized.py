"""The partition with the fastest slowest stage, against trying all of them and against dynamic programming."""

import math
import time

import numpy as np
import pytest
from helpers.dynamic_programming import dynamic_programming_partition
from helpers.pipelines import all_partitions, fastest_possible, fits_into, loads, slowest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import StageFiller, balanced_partition
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad


@settings(deadline=None, max_examples=150)
@given(load=loads())
def test_no_partition_that_fits_has_a_faster_slowest_stage(load):
    best = fastest_possible(load)
    if best is None:
        with pytest.raises(ValueError, match=r"no partition .* fits into the memory limits"):
            balanced_partition(load)
        return
    partition = balanced_partition(load)
    assert (partition.num_layers, partition.num_stages) == (load.num_layers, load.num_stages)
    assert fits_into(load, partition)
    assert slowest_of(load, partition) == best


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(2, 60), st.floats(0.05, 1.0), st.booleans(), st.booleans())
def test_probing_finds_what_dynamic_programming_finds(seed, num_layers, density, is_uneven, is_limited):
    generator = np.random.default_rng(seed)
    num_stages = max(1, round(density * num_layers))
    memory = {}
    if is_limited:
        sizes = generator.integers(1, 100, num_layers)
        roomy = 2.0 * sizes.sum() / num_stages + 50
        memory = {"layer_bytes": sizes, "memory_limits": generator.uniform(0.3, 1.7, num_stages) * roomy}
    speeds = generator.choice([0.1, 0.7, 1.0, 1.3], num_stages) if is_uneven else None
    load = PipelineLoad.of(generator.lognormal(0.0, 1.0, num_layers), num_stages, speeds=speeds, **memory)
    try:
        best = load.slowest(dynamic_programming_partition(load))
    except ValueError:
        with pytest.raises(ValueError, match="fits into the memory limits"):
            balanced_partition(load)
        return
    partition = balanced_partition(load)
    assert load.fits(partition)
    assert load.slowest(partition) == pytest.approx(best, rel=1e-12)


@settings(deadline=None, max_examples=150)
@given(load=loads(), data=st.data())
def test_no_partition_has_a_faster_slowest_stage_where_stages_wait_for_messages(load, data):
    """Every stage waits for half of what the messages on its two sides take."""
    num_stages = load.num_stages
    delays = data.draw(st.lists(st.integers(0, 30), min_size=num_stages - 1, max_size=num_stages - 1))
    waits = [sum(delays[max(stage - 1, 0) : stage + 1]) / 2 for stage in range(num_stages)]
    waiting = PipelineLoad.of(
        load.costs,
        num_stages,
        speeds=load.speeds,
        layer_bytes=load.layer_bytes,
        memory_limits=load.memory_limits,
        delays=delays,
    )

    def slowest(partition):
        return max(
            load.costs[partition.boundaries[stage] : partition.boundaries[stage + 1]].sum() / load.speeds[stage] + wait
            for stage, wait in enumerate(waits)
        )

    fitting = [one for one in all_partitions(load.num_layers, num_stages) if fits_into(load, one)]
    if not fitting:
        with pytest.raises(ValueError, match=r"no partition .* fits into the memory limits"):
            balanced_partition(waiting)
        return
    partition = balanced_partition(waiting)
    assert fits_into(load, partition)
    assert slowest(partition) == waiting.slowest(partition) == min(slowest(one) for one in fitting)


def test_a_level_that_cannot_be_kept_leads_to_the_next_one_that_might():
    """Both stages wait for 10 s, so neither has its layer of 3 s in less than 13 s."""
    filler = StageFiller(PipelineLoad.of([3.0, 3.0], 2, delays=[20.0]))
    assert filler.partition_within(12.0) == (None, 13.0)


def test_a_stage_leaves_a_small_layer_to_a_slow_one():
    """Taking both first layers, as many as it can, the first stage would leave the large one to the slow second."""
    load = PipelineLoad.of([1, 1, 10, 1], 3, speeds=[10, 0.1, 10])
    assert balanced_partition(load) == Partition((0, 1, 2, 4))


def test_a_stage_leaves_a_small_layer_to_one_with_little_memory():
    load = PipelineLoad.of([1, 1, 1, 1], 3, layer_bytes=[1, 1, 10, 1], memory_limits=[100, 1, 100])
    assert balanced_partition(load) == Partition((0, 1, 2, 4))


def test_layers_that_cost_nothing_are_divided_too():
    assert balanced_partition(PipelineLoad.of([0, 0, 0], 2)).num_stages == 2
    assert balanced_partition(PipelineLoad.of([0, 5, 0, 0], 4)) == Partition((0, 1, 2, 3, 4))


def test_what_does_not_fit_says_what_is_needed_and_allowed():
    """60 bytes are fewer than 61, but no stage holds two layers of 20."""
    load = PipelineLoad.of([1, 1, 1], 2, layer_bytes=[20, 20, 20], memory_limits=[39, 22])
    with pytest.raises(ValueError) as error:
        balanced_partition(load)
    message = str(error.value)
    assert "3 layers over 2 stages" in message
    assert "60 bytes in all, the largest 20" in message
    assert "61 in all, the largest 39" in message
    assert "stage 0 needs 40 bytes and may hold 39" in message


def test_a_single_unlimited_stage_does_not_hide_which_one_is_too_small():
    load = PipelineLoad.of([1, 1], 2, layer_bytes=[20, 20], memory_limits=[math.inf, 10])
    with pytest.raises(ValueError, match="stage 1 needs 20 bytes and may hold 10"):
        balanced_partition(load)


@pytest.mark.slow
@pytest.mark.parametrize("is_uneven", [False, True])
def test_ten_thousand_layers_over_a_thousand_stages_take_seconds_at_most(is_uneven):
    generator = np.random.default_rng(0)
    speeds = generator.uniform(0.5, 2.0, 1024) if is_uneven else None
    load = PipelineLoad.of(generator.lognormal(0.0, 1.0, 10_000), 1024, speeds=speeds)
    began = time.process_time()
    partition = balanced_partition(load)
    assert time.process_time() - began < 4.0
    assert load.slowest(partition) >= load.costs.sum() / load.speeds.sum()
