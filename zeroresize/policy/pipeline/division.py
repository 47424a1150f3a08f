"""Which division of layers over stages is best: the fastest slowest stage, exactly, then the shortest simulated step.

``C`` cases, ``L`` layers, ``S`` stages, ``M`` micro-batches. A step waits for the slowest stage, so a good division has
a small slowest stage: dynamic programming over stages finds it (DynMo, sections 3.3 and 3.4), by time or by parameters,
whichever the costs of the load are. With few micro-batches filling and draining count as well: of random loads with one
slow device and as many micro-batches as stages, refined steps are 3 to 4 % shorter on average, with four times as many
0.9 %.

What messages between neighbours take makes a stage slow like layers do, but stays where it is when layers move.
DynPipe's supplement, D.2, adds what activations travel to the time of the stage that sends them. In 1F1B gradients come
back as often, and a stage that turns from a forward to a backward, or back, waits until what it has sent has arrived.
Once the pipeline is full, the pace of a stage is therefore what it computes and what it sends to both sides
(``docs/results/pipelines.md``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.partition import Partition, require_enough_layers
from zeroresize.policy import ROUNDING
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.runtime.schedules import Schedule
from zeroresize.runtime.simulated_steps import simulated_steps, stage_sums

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]
Numbers = Sequence[float] | Floats

#: Forwards and backwards of all stages that may be simulated in each round: a tenth of a second on one core.
MOST_SIMULATED = 1.25e7


class NothingFitsError(ValueError):
    """Tells that no division of layers fits into the stages' memory limits."""


@dataclass(frozen=True, eq=False)
class PipelineLoad:
    """Hold what layers cost, [L] in any unit, and what stages can take; :meth:`of` checks them. All are float64.

    A stage takes the sum of its layers' costs / its speed, and ``waits`` [S] for its messages, in the unit of the
    costs. It holds ``layer_bytes`` [L] of each up to its ``memory_limits`` [S], infinite where there is none.
    """

    costs: Floats
    speeds: Floats
    layer_bytes: Floats
    memory_limits: Floats
    waits: Floats

    @classmethod
    def of(
        cls,
        costs: Numbers,
        num_stages: int,
        *,
        speeds: Numbers | None = None,
        layer_bytes: Numbers | None = None,
        memory_limits: Numbers | None = None,
        delays: Numbers | None = None,
    ) -> PipelineLoad:
        """Return a checked load; speeds are equal, memory is unlimited and nothing is waited for where not given.

        Args:
            delays: [S − 1] what the messages between two neighbours take in all, both directions together, as far as
                computing does not hide it: each of the two waits for those that it sends, so for half of that.

        Raises:
            ValueError: if there are fewer layers than stages, if a number is not finite or has the wrong sign, if there
                are not as many as layers or stages, or if only one of bytes and limits is given.
        """
        if (layer_bytes is None) != (memory_limits is None):
            raise ValueError("layer_bytes and memory_limits are given together or not at all")
        num_layers = len(costs)
        require_enough_layers(num_layers, num_stages)
        speeds = np.ones(num_stages) if speeds is None else speeds
        layer_bytes = np.zeros(num_layers) if layer_bytes is None else layer_bytes
        memory_limits = np.full(num_stages, np.inf) if memory_limits is None else memory_limits
        waits = _checked("delays", np.zeros(num_stages - 1) if delays is None else delays, num_stages - 1)
        return cls(
            _checked("costs", costs, num_layers),
            _checked("speeds", speeds, num_stages, above_zero=True),
            _checked("layer_bytes", layer_bytes, num_layers),
            _checked("memory_limits", memory_limits, num_stages, above_zero=True, may_be_infinite=True),
            (np.append(waits, 0.0) + np.insert(waits, 0, 0.0)) / 2,
        )

    @property
    def num_layers(self) -> int:  # L
        return len(self.costs)

    @property
    def num_stages(self) -> int:  # S
        return len(self.speeds)

    @cached_property
    def cost_sums(self) -> Floats:
        """[L + 1] costs of the first layers, of none of them to all."""
        return np.concatenate([[0.0], np.cumsum(self.costs)])

    @cached_property
    def byte_sums(self) -> Floats:
        """[L + 1] bytes of the first layers, of none of them to all."""
        return np.concatenate([[0.0], np.cumsum(self.layer_bytes)])

    def stage_times(self, partition: Partition) -> Floats:
        """Return [S] how long every stage takes, its waits included, in the unit of the costs."""
        return np.diff(self.cost_sums[list(partition.boundaries)]) / self.speeds + self.waits

    def slowest(self, partition: Partition) -> float:
        """Return how long the slowest stage takes."""
        return float(self.stage_times(partition).max())

    def fits(self, partition: Partition) -> bool:
        """Whether every stage holds no more than its limit."""
        return bool(np.all(np.diff(self.byte_sums[list(partition.boundaries)]) <= self.memory_limits))

    def times_of(self, stage: int) -> Floats:
        """Return [L + 1, L + 1] how long a stage takes with the layers from one number up to another; or infinite."""
        cost, size = (sums[None, :] - sums[:, None] for sums in (self.cost_sums, self.byte_sums))
        number = np.arange(self.num_layers + 1)
        fits = (number[:, None] < number[None, :]) & (size <= self.memory_limits[stage])
        return np.where(fits, cost / self.speeds[stage] + self.waits[stage], np.inf)


def _checked(
    name: str, values: Numbers, length: int, *, above_zero: bool = False, may_be_infinite: bool = False
) -> Floats:
    array = np.array(values, dtype=np.float64)
    if array.shape != (length,):
        raise ValueError(f"{name} are {array.shape}, not one number for each of {length}")
    is_sound = (array > 0.0 if above_zero else array >= 0.0) & (np.isfinite(array) | may_be_infinite)
    if not is_sound.all():
        bad = int(np.flatnonzero(~is_sound)[0])
        wanted = ("" if may_be_infinite else "finite and ") + ("above zero" if above_zero else "not negative")
        raise ValueError(f"{name}[{bad}]={array[bad]} is not allowed: wanted are numbers that are {wanted}")
    return array


def balanced_partition(load: PipelineLoad) -> Partition:
    """Return the partition with the fastest slowest stage within the limits, exactly, in S · L² operations."""
    num_layers = load.num_layers
    slowest_s = np.where(np.arange(num_layers + 1) == 0, 0.0, np.inf)  # of the first layers on the stages so far
    begins = []
    for stage in range(load.num_stages):
        candidates = np.maximum(slowest_s[:, None], load.times_of(stage))
        begins.append(num_layers - candidates[::-1].argmin(axis=0))  # of equals the last: first stages have more
        slowest_s = candidates.min(axis=0)
    if not math.isfinite(slowest_s[num_layers]):
        sizes, limits = load.layer_bytes, load.memory_limits
        raise NothingFitsError(
            f"no partition of {num_layers} layers over {load.num_stages} stages fits into the memory limits: the "
            f"layers need {sizes.sum():.0f} bytes in all, the largest {sizes.max():.0f}, and the limits are "
            f"{limits.sum():.0f} in all, the largest {limits.max():.0f}"
        )
    boundaries = [num_layers]
    for begin in reversed(begins):
        boundaries.append(int(begin[boundaries[-1]]))
    return Partition(tuple(boundaries[::-1]))


def shortest_partition(
    load: PipelineLoad,
    forward_s: Floats,
    backward_s: Floats,
    num_microbatches: int,
    schedule: Schedule,
    messages: PipelineMessages | None = None,
) -> Partition:
    """Return the balanced division, refined by simulated steps as far as :data:`MOST_SIMULATED` allows.

    Layers take ``forward_s`` and ``backward_s`` [L] seconds of a micro-batch on a device of speed 1; errors as there.
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

    ``steps_s`` gives the seconds of a step of each of the boundaries [C, S + 1], of at most ``most_candidates`` in one
    of several rounds. Where these are few, fewer are shifted together, or none.
    """
    shifts, now = _shifts(partition.num_stages, most_candidates), np.array(partition.boundaries)
    shortest_s = float(steps_s(now[None])[0]) if len(shifts) else 0.0
    for _ in range(load.num_layers if len(shifts) else 0):
        shifted = now + shifts
        shifted = shifted[(np.diff(shifted) > 0).all(axis=1)]
        shifted = shifted[(np.diff(load.byte_sums[shifted]) <= load.memory_limits).all(axis=1)]
        seconds = steps_s(shifted) if len(shifted) else np.array([np.inf])
        best = int(seconds.argmin())
        if seconds[best] >= shortest_s * (1.0 - ROUNDING):
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


@dataclass(frozen=True)
class PipelineMessages:
    """Describe the messages of a pipeline, whatever its boundaries are.

    A message between two neighbours takes what ``links`` [S − 1] say, in each direction, by its bytes: ``num_bytes``
    [L + 1] of one micro-batch before each layer and behind the last one, the mean of the activation and its gradient.
    """

    links: tuple[MoveCost, ...]
    num_bytes: tuple[float, ...]

    def seconds(self, partition: Partition) -> tuple[float, ...]:
        """Return [S − 1] seconds of a message between two neighbours, in each direction, with these boundaries."""
        (seconds,) = self.seconds_between(np.array([partition.boundaries]))
        return tuple(seconds.tolist())

    def seconds_between(self, boundaries: Indices) -> Floats:
        """Return [C, S − 1] what :meth:`seconds` does, for many boundaries [C, S + 1]."""
        per_byte_s = np.array([link.seconds_per_byte for link in self.links])
        fixed_s = np.array([link.fixed_s for link in self.links])
        return np.array(self.num_bytes)[boundaries[:, 1:-1]] * per_byte_s + fixed_s


def step_delays(communication_s: Sequence[float], num_microbatches: int, schedule: Schedule) -> tuple[float, ...]:
    """Return [S − 1] seconds of a step in which stages wait for the messages over each boundary, of given seconds.

    Both directions and all micro-batches together: the ``delays`` of :meth:`PipelineLoad.of`. In 1F1B nothing is
    computed while a message travels, beside those that fill and drain the pipeline. In GPipe stages compute the next
    micro-batch meanwhile, and where they do not keep up with the link, no other division of layers does either.
    """
    num_waited_for = 2 * num_microbatches if schedule == "1f1b" else 0
    return tuple(num_waited_for * seconds for seconds in communication_s)
