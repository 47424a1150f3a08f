"""The partition with the fastest slowest stage, over all stages and over fewer, against trying all of them."""

import itertools
import math
import time

import numpy as np
import pytest
from helpers.pipelines import all_partitions, carried_out, fastest_possible, fits_into, loads, slowest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import StageChoices, balanced_partition, repacked
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
def test_a_thousand_layers_over_64_stages_take_seconds_at_most():
    generator = np.random.default_rng(0)
    load = PipelineLoad.of(generator.lognormal(0.0, 1.0, 1000), 64, speeds=generator.uniform(0.5, 2.0, 64))
    began = time.process_time()
    partition = balanced_partition(load)
    assert time.process_time() - began < 6.0
    assert load.slowest(partition) >= load.costs.sum() / load.speeds.sum()


def choices_of(load, num_stages, keep=None):
    """All choices of so many stages, with the slowest stage of the best division over them; infinite for none."""
    for stages in itertools.combinations(range(load.num_stages), num_stages):
        if keep is None or keep in stages:
            best = fastest_possible(load.on_stages(stages))
            yield math.inf if best is None else best


@settings(deadline=None, max_examples=150)
@given(load=loads(max_layers=7, max_stages=5), data=st.data())
def test_of_all_choices_of_fewer_stages_the_fastest_is_found(load, data):
    start = data.draw(st.sampled_from(list(all_partitions(load.num_layers, load.num_stages))))
    keep = data.draw(st.none() | st.integers(0, load.num_stages - 1))
    num_stages = data.draw(st.integers(1, load.num_stages))
    best = min(choices_of(load, num_stages, keep))
    assert (num_stages in StageChoices(load, keep, num_stages).possible) == (best < math.inf)
    if best == math.inf:
        with pytest.raises(ValueError, match=r"stages( with stage \d among them)? can(not)? hold"):
            repacked(load, start, num_stages, keep=keep)
        return
    repacking = repacked(load, start, num_stages, keep=keep)
    assert keep is None or keep in repacking.stages
    assert len(repacking.stages) == repacking.partition.num_stages == num_stages
    on_stages = load.on_stages(repacking.stages)
    assert fits_into(on_stages, repacking.partition)
    assert slowest_of(on_stages, repacking.partition) == best
    *_, after = carried_out(start, repacking.transfers)
    assert [after[stage] for stage in repacking.stages] == [
        list(repacking.partition.layers_of(stage)) for stage in range(num_stages)
    ]


def test_of_equal_choices_the_first_stages_stay_and_an_error_says_how_few_are_possible():
    load = PipelineLoad.of([1.0] * 12, 4, layer_bytes=[2] * 12, memory_limits=[9] * 4)
    start = Partition.uniform(12, 4)
    assert repacked(load, start, 3, keep=0).stages == (0, 1, 2)
    assert repacked(load, start, 3, keep=3).stages == (0, 1, 3)
    with pytest.raises(ValueError, match=r"no 2 of 4 stages can hold 24 bytes .* up to 2 each.* at least 3 are needed"):
        repacked(load, start, 2)
    small = PipelineLoad.of([1.0] * 4, 2, layer_bytes=[9] * 4, memory_limits=[9, 9])
    with pytest.raises(ValueError, match="not even all 2 stages"):
        repacked(small, Partition.uniform(4, 2), 1)
    for number in (0, 5):
        with pytest.raises(ValueError, match="wanted are 1 to 4"):
            repacked(load, start, number)
    with pytest.raises(ValueError, match="is not one of"):
        repacked(load, Partition.uniform(12, 3), 1)
