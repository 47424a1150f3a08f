"""The best division of layers over all stages and over fewer, against trying all of them; what messages take."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from helpers.pipelines import all_partitions, carried_out, fastest_possible, fits_into, loads, on_stages, slowest_of
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.division import (
    NothingFitsError,
    PipelineLoad,
    PipelineMessages,
    balanced_partition,
    refined_partition,
    step_delays,
)
from zeroresize.policy.pipeline.repacking_decision import repacked
from zeroresize.runtime.simulated_steps import simulated_step, simulated_steps


@settings(deadline=None, max_examples=150)
@given(load=loads(), data=st.data())
def test_no_partition_that_fits_has_a_faster_slowest_stage(load, data):
    """Every stage waits for half of what the messages on its two sides take."""
    num_stages = load.num_stages
    delays = data.draw(st.lists(st.integers(0, 30), min_size=num_stages - 1, max_size=num_stages - 1))
    waits = [sum(delays[max(stage - 1, 0) : stage + 1]) / 2 for stage in range(num_stages)]
    waiting = dataclasses.replace(load, waits=PipelineLoad.of(load.costs, num_stages, delays=delays).waits)
    assert waiting.waits.tolist() == waits

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


def test_what_does_not_fit_says_what_is_needed_and_allowed():
    """60 bytes are fewer than 61, but no stage holds two layers of 20."""
    load = PipelineLoad.of([1, 1, 1], 2, layer_bytes=[20, 20, 20], memory_limits=[39, 22])
    with pytest.raises(
        NothingFitsError, match=r"3 layers over 2 stages.*60 bytes in all, the largest 20.*61 in all, the largest 39"
    ):
        balanced_partition(load)


def choices_of(load, num_stages, keep=None):
    """All choices of so many stages, with the slowest stage of the best division over them; infinite for none."""
    for stages in itertools.combinations(range(load.num_stages), num_stages):
        if keep is None or keep in stages:
            best = fastest_possible(on_stages(load, stages))
            yield math.inf if best is None else best


@settings(deadline=None, max_examples=100)
@given(load=loads(max_layers=7, max_stages=5), data=st.data())
def test_of_all_choices_of_fewer_stages_the_fastest_is_found(load, data):
    start = data.draw(st.sampled_from(list(all_partitions(load.num_layers, load.num_stages))))
    keep = data.draw(st.none() | st.integers(0, load.num_stages - 1))
    num_stages = data.draw(st.integers(1, load.num_stages))
    best = min(choices_of(load, num_stages, keep))
    if best == math.inf:
        with pytest.raises(NothingFitsError, match=rf"no {num_stages} of {load.num_stages} stages"):
            repacked(load, start, num_stages, keep=keep)
        return
    repacking = repacked(load, start, num_stages, keep=keep)
    assert keep is None or keep in repacking.stages
    assert len(repacking.stages) == repacking.partition.num_stages == num_stages
    left = on_stages(load, repacking.stages)
    assert fits_into(left, repacking.partition)
    assert slowest_of(left, repacking.partition) == best
    *_, after = carried_out(start, repacking.transfers)
    assert [after[stage] for stage in repacking.stages] == [
        list(repacking.partition.layers_of(stage)) for stage in range(num_stages)
    ]


NUM_LAYERS, NUM_STAGES = 9, 3


def test_a_message_takes_what_its_link_takes_for_the_bytes_at_the_boundary():
    messages = PipelineMessages((MoveCost(1.0, 0.5), MoveCost(2.0, 0.0)), (9.0, 1.0, 2.0, 3.0, 9.0))
    assert messages.seconds(Partition((0, 1, 3, 4))) == (1.5, 6.0)
    assert messages.seconds(Partition((0, 2, 3, 4))) == (2.5, 6.0)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_division_that_knows_delays_has_the_shortest_of_all_steps(schedule):
    """With many micro-batches, where filling and draining hardly matter; in GPipe it is the one that ignores them."""
    generator, num_microbatches = np.random.default_rng(1), 40
    ignored = []
    for _ in range(8):
        costs = generator.lognormal(0.0, 0.5, NUM_LAYERS)
        wires = generator.uniform(0.0, 1.5, NUM_STAGES - 1).tolist()

        def step_s(partition, costs=costs, wires=wires):
            times = PipelineLoad.of(costs, NUM_STAGES).stage_times(partition)
            forward_s, backward_s = (times / 3).tolist(), (times * 2 / 3).tolist()
            simulated = simulated_step(
                forward_s, backward_s, num_microbatches, schedule=schedule, communication_s=wires
            )
            return simulated.step_s

        shortest_s = min(map(step_s, all_partitions(NUM_LAYERS, NUM_STAGES)))
        delays = step_delays(wires, num_microbatches, schedule)
        knowing = balanced_partition(PipelineLoad.of(num_microbatches * costs, NUM_STAGES, delays=delays))
        assert step_s(knowing) <= 1.01 * shortest_s
        ignored.append(step_s(balanced_partition(PipelineLoad.of(costs, NUM_STAGES))) / shortest_s)
    if schedule == "1f1b":
        assert max(ignored) > 1.05  # so it makes a difference


def step_of(load, num_microbatches, schedule="1f1b"):
    def steps_s(boundaries):
        times = np.diff(load.cost_sums[boundaries]) / load.speeds / num_microbatches
        return simulated_steps(times, 2 * times, num_microbatches, schedule=schedule)

    return steps_s, lambda partition: float(steps_s(np.array([partition.boundaries]))[0])


def test_memory_limits_are_kept():
    costs = [1.0, 1.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0, 4.0]
    free = PipelineLoad.of(costs, 3)
    steps_s, step_s = step_of(free, 4)
    assert step_s(Partition((0, 6, 8, 9))) < step_s(Partition((0, 6, 7, 9)))
    assert refined_partition(free, Partition((0, 6, 7, 9)), steps_s, 1000) == Partition((0, 6, 8, 9))
    tight = PipelineLoad.of(costs, 3, layer_bytes=[1.0] * 9, memory_limits=[9.0, 1.0, 9.0])
    assert refined_partition(tight, Partition((0, 6, 7, 9)), steps_s, 1000) == Partition((0, 6, 7, 9))


@settings(max_examples=60)
@given(
    costs=st.lists(st.floats(0.1, 10.0), min_size=4, max_size=12),
    num_stages=st.integers(2, 4),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    affordable=st.integers(0, 60) | st.just(1000),
)
def test_no_shift_that_is_affordable_shortens_the_step_and_it_is_never_longer_than_before(
    costs, num_stages, schedule, affordable
):
    load, asked = PipelineLoad.of(costs, num_stages), []
    steps_s, step_s = step_of(load, 4, schedule)

    def counted(boundaries):
        asked.append(len(boundaries))
        return steps_s(boundaries)

    before = balanced_partition(load)
    after = refined_partition(load, before, counted, affordable)
    assert max(asked, default=0) <= affordable and len(asked) <= 1 + len(costs)
    assert bool(asked) == (affordable >= 2 * (num_stages - 1))
    assert step_s(after) <= step_s(before)
    if affordable == 1000:
        for (first, last), shift in itertools.product(itertools.combinations(range(1, num_stages + 1), 2), (-1, 1)):
            shifted = np.array(after.boundaries)
            shifted[first:last] += shift
            if np.all(np.diff(shifted) > 0):
                assert step_s(Partition(tuple(shifted.tolist()))) >= step_s(after) * (1 - 1e-6)
