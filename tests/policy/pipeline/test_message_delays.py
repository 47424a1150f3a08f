"""Messages between stages: what they take, what stages wait for them, and which division makes steps shortest then."""

import itertools
import math

import numpy as np
import pytest

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.message_delays import PipelineMessages, RunningLinks, step_delays
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad
from zeroresize.runtime.simulated_steps import simulated_step

NUM_LAYERS, NUM_STAGES = 9, 3
ALL_PARTITIONS = [
    Partition((0, *inner, NUM_LAYERS)) for inner in itertools.combinations(range(1, NUM_LAYERS), NUM_STAGES - 1)
]


def test_a_message_takes_what_its_link_takes_for_the_bytes_at_the_boundary():
    messages = PipelineMessages((MoveCost(1.0, 0.5), MoveCost(2.0, 0.0)), (9.0, 1.0, 2.0, 3.0, 9.0))
    assert messages.seconds(Partition((0, 1, 3, 4))) == (1.5, 6.0)
    assert messages.seconds(Partition((0, 2, 3, 4))) == (2.5, 6.0)


@pytest.mark.parametrize("boundaries", [(0, 4), (0, 1, 2, 3, 4), (0, 1, 2, 3)])
def test_messages_of_another_pipeline_are_an_error(boundaries):
    messages = PipelineMessages((MoveCost(), MoveCost()), (1.0,) * 5)
    with pytest.raises(ValueError, match="other boundaries than messages of 4 layers over 3"):
        messages.seconds(Partition(boundaries))


@pytest.mark.parametrize("size", [-1.0, math.nan, math.inf])
def test_bytes_that_no_message_has_are_an_error(size):
    with pytest.raises(ValueError, match="bytes of messages"):
        PipelineMessages((), (0.0, size))


@pytest.mark.parametrize(
    ("delays", "message"), [([1.0], "delays are"), ([1.0, -1.0], r"delays\[1\]=-1"), ([math.nan, 0.0], r"delays\[0\]")]
)
def test_delays_that_do_not_belong_to_the_stages_are_an_error(delays, message):
    with pytest.raises(ValueError, match=message):
        PipelineLoad.of([1.0] * 4, 3, delays=delays)


def test_a_stage_that_stays_waits_as_before():
    load = PipelineLoad.of([1.0] * 4, 3, delays=[2.0, 6.0])
    assert load.waits.tolist() == [1.0, 4.0, 3.0]
    assert load.on_stages((0, 2)).waits.tolist() == [1.0, 3.0]


def test_a_full_1f1b_pipeline_runs_at_the_pace_of_the_stage_that_computes_and_waits_longest():
    """Per micro-batch more, a step is longer by that stage's time of one, however computing and messages are divided.

    Of so many micro-batches, as of two stages of nearly the same pace the slower one takes long to hold up the others.
    """
    generator = np.random.default_rng(0)
    for _ in range(20):
        seconds, wires = generator.lognormal(0.0, 0.5, (2, 4)), generator.uniform(0.0, 1.0, 3)
        first, last = 200, 220
        steps_s = [
            simulated_step(*seconds.tolist(), number, communication_s=wires.tolist()).step_s for number in (first, last)
        ]
        times = PipelineLoad.of(
            (last - first) * seconds.sum(axis=0), 4, delays=step_delays(wires.tolist(), last - first, "1f1b")
        ).stage_times(Partition.uniform(4, 4))
        assert steps_s[1] - steps_s[0] == pytest.approx(times.max(), rel=1e-9)


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

        shortest_s = min(map(step_s, ALL_PARTITIONS))
        delays = step_delays(wires, num_microbatches, schedule)
        knowing = balanced_partition(PipelineLoad.of(num_microbatches * costs, NUM_STAGES, delays=delays))
        assert step_s(knowing) <= 1.01 * shortest_s
        ignored.append(step_s(balanced_partition(PipelineLoad.of(costs, NUM_STAGES))) / shortest_s)
    if schedule == "1f1b":
        assert max(ignored) > 1.05  # so it makes a difference


def test_links_that_vary_are_as_the_middle_one_of_the_last_five_and_slow_ones_are_known_after_three():
    running = RunningLinks()
    for seconds in (1.0, 1.0, 9.0, 1.0, 1.0):
        links = running.after((MoveCost(seconds / 1e6, seconds), MoveCost(2e-6, 4.0)))
    assert links == (MoveCost(1e-6, 1.0), MoveCost(2e-6, 4.0))
    for _ in range(3):
        links = running.after((MoveCost(4e-6, 4.0), MoveCost(2e-6, 4.0)))
    assert links == (MoveCost(4e-6, 4.0), MoveCost(2e-6, 4.0))
    assert RunningLinks().after(()) == ()
