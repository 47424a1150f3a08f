"""Boundaries near balanced ones with which a step is shorter; pure.

The slowest stage sets the pace only while the pipeline is full. With few micro-batches filling and draining it count as
well, and so does where the slowest stage stands. Of random loads with one slow device and as many micro-batches as
stages steps become 3 to 4 % shorter on average, at most 10 %; with four times as many, 0.9 %.

``C`` candidates, ``S`` stages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.message_delays import PipelineMessages
from zeroresize.policy.pipeline.pipeline_load import Floats, Indices, PipelineLoad
from zeroresize.runtime.schedules import Schedule
from zeroresize.runtime.simulated_steps import simulated_steps, stage_sums

#: Forwards and backwards of all stages that may be simulated in each round: a tenth of a second on one core.
MOST_SIMULATED = 1.25e7
#: Each round moves a layer or a row of them by one stage; balanced boundaries are seldom further away.
_MOST_ROUNDS = 8
#: What rounding brings is nothing.
_LEAST_GAIN = 1e-9


def shortest_partition(
    load: PipelineLoad,
    forward_s: Floats,
    backward_s: Floats,
    num_microbatches: int,
    schedule: Schedule,
    messages: PipelineMessages | None = None,
) -> Partition:
    """Return the balanced division of layers, refined by simulated steps as far as :data:`MOST_SIMULATED` allows.

    Args:
        load: what is divided evenly, and what must fit.
        forward_s, backward_s: [L] seconds of a micro-batch on a device of speed 1.
        messages: between the stages; None where they take no time.

    Raises:
        ValueError: if no boundaries fit into the memory limits.
    """

    def steps_s(boundaries: Indices) -> Floats:
        forward, backward = (stage_sums(seconds, boundaries) / load.speeds for seconds in (forward_s, backward_s))
        seconds = 0.0 if messages is None else messages.seconds_between(boundaries)
        return simulated_steps(forward, backward, num_microbatches, schedule=schedule, communication_s=seconds)

    most = int(MOST_SIMULATED / (2 * num_microbatches * load.num_stages))
    return refined_partition(load, balanced_partition(load), steps_s, most)


def refined_partition(
    load: PipelineLoad, partition: Partition, steps_s: Callable[[Indices], Floats], most_candidates: int
) -> Partition:
    """Shift boundaries that follow one another by one layer, those that shorten the step most, while some do.

    Args:
        load: whose memory limits are kept.
        partition: to begin with, within the limits.
        steps_s: gives the seconds of a step, or in any other unit, of each of the boundaries [C, S + 1].
        most_candidates: of how many boundaries it may be asked in a round, of several. Where these are few, fewer are
            shifted together, or none.
    """
    shifts, now = _shifts(partition.num_stages, most_candidates), np.array(partition.boundaries)
    shortest_s = float(steps_s(now[None])[0]) if len(shifts) else 0.0
    for _ in range(_MOST_ROUNDS if len(shifts) else 0):
        shifted = now + shifts
        shifted = shifted[(np.diff(shifted) > 0).all(axis=1)]
        shifted = shifted[(np.diff(load.byte_sums[shifted]) <= load.memory_limits).all(axis=1)]
        seconds = steps_s(shifted) if len(shifted) else np.array([np.inf])
        best = int(seconds.argmin())
        if seconds[best] >= shortest_s * (1.0 - _LEAST_GAIN):
            break
        shortest_s, now = float(seconds[best]), shifted[best]
    return Partition(tuple(now.tolist()))


def _shifts(num_stages: int, most: int) -> Indices:
    """[C, S + 1] what is added to boundaries: runs of inner ones by one layer either way, the shorter ones first."""
    places, runs = np.arange(num_stages + 1), [np.zeros((0, num_stages + 1), dtype=np.int64)]
    for length in range(1, num_stages):
        begins = np.arange(1, num_stages - length + 1)
        run = ((places >= begins[:, None]) & (places < begins[:, None] + length)).astype(np.int64)
        runs += [run, -run]
    shifts = np.concatenate(runs)
    return shifts if len(shifts) <= most else shifts[: most if most >= 2 * (num_stages - 1) else 0]
