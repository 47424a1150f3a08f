"""How long and how full a partition makes the stages of a pipeline.

``L`` layers, ``S`` stages. A step waits for the slowest stage, so a good partition has a small slowest stage. What a
stage waits for its messages makes it slow like layers do, but stays where it is when layers move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.partition import Partition, require_enough_layers

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


class NothingFitsError(ValueError):
    """Tells that no division of layers fits into the stages' memory limits."""


@dataclass(frozen=True, eq=False)
class PipelineLoad:
    """Hold what layers cost and what stages can take; :meth:`of` checks them.

    Attributes:
        costs: [L], float64, in any unit: seconds balance by time, numbers of parameters by parameters.
        speeds: [S], float64: of the stages' devices; a stage takes the sum of its layers' costs / its speed.
        layer_bytes: [L], float64: what a layer holds on any stage (weights, gradients, optimizer, activations).
        memory_limits: [S], float64, bytes; infinite where there is none.
        waits: [S], float64, in the unit of the costs: for how long a stage computes nothing while its messages travel.
    """

    costs: Floats
    speeds: Floats
    layer_bytes: Floats
    memory_limits: Floats
    waits: Floats

    @classmethod
    def of(
        cls,
        costs: Sequence[float] | Floats,
        num_stages: int,
        *,
        speeds: Sequence[float] | Floats | None = None,
        layer_bytes: Sequence[float] | Floats | None = None,
        memory_limits: Sequence[float] | Floats | None = None,
        delays: Sequence[float] | Floats | None = None,
    ) -> PipelineLoad:
        """Return a checked load; speeds are equal, memory is unlimited and nothing is waited for where not given.

        Args:
            delays: [S − 1] what the messages between two neighbours take in all, both directions together, as far as
                computing does not hide it: each of the two waits for those that it sends, so for half of that
                (:mod:`~zeroresize.policy.pipeline.message_delays`).

        Raises:
            ValueError: if there are fewer layers than stages, if a number is not finite or has the wrong sign, if there
                are not as many as layers or stages, or if only one of bytes and limits is given.
        """
        if (layer_bytes is None) != (memory_limits is None):
            raise ValueError("layer_bytes and memory_limits are given together or not at all")
        require_enough_layers(len(costs), num_stages)
        return cls(
            _checked("costs", costs, len(costs)),
            _checked("speeds", np.ones(num_stages) if speeds is None else speeds, num_stages, above_zero=True),
            _checked("layer_bytes", np.zeros(len(costs)) if layer_bytes is None else layer_bytes, len(costs)),
            _checked(
                "memory_limits",
                np.full(num_stages, np.inf) if memory_limits is None else memory_limits,
                num_stages,
                above_zero=True,
                may_be_infinite=True,
            ),
            _waits(_checked("delays", np.zeros(num_stages - 1) if delays is None else delays, num_stages - 1)),
        )

    @property
    def num_layers(self) -> int:
        """Return L, the number of layers."""
        return len(self.costs)

    @property
    def num_stages(self) -> int:
        """Return S, the number of stages."""
        return len(self.speeds)

    @cached_property
    def cost_sums(self) -> Floats:
        """Return [L + 1] costs of the first layers, of none of them to all."""
        return np.concatenate([[0.0], np.cumsum(self.costs)])

    @cached_property
    def byte_sums(self) -> Floats:
        """Return [L + 1] bytes of the first layers, of none of them to all."""
        return np.concatenate([[0.0], np.cumsum(self.layer_bytes)])

    def on_stages(self, stages: Sequence[int]) -> PipelineLoad:
        """Return the load of the same layers on some of the stages only, which wait for messages as before."""
        chosen = list(stages)
        return PipelineLoad(
            self.costs, self.speeds[chosen], self.layer_bytes, self.memory_limits[chosen], self.waits[chosen]
        )

    def stage_times(self, partition: Partition) -> Floats:
        """Return [S] how long every stage takes, its waits included, in the unit of the costs."""
        return np.diff(self.cost_sums[list(partition.boundaries)]) / self.speeds + self.waits

    def slowest(self, partition: Partition) -> float:
        """Return how long the slowest stage takes."""
        return float(self.stage_times(partition).max())

    def stage_bytes(self, partition: Partition) -> Floats:
        """Return [S] what every stage holds."""
        return np.diff(self.byte_sums[list(partition.boundaries)])

    def fits(self, partition: Partition) -> bool:
        """Whether every stage holds no more than its limit."""
        return bool(np.all(self.stage_bytes(partition) <= self.memory_limits))

    def check_partition(self, partition: Partition) -> None:
        """Raise a ValueError unless ``partition`` is one of these layers over these stages."""
        if (partition.num_layers, partition.num_stages) != (self.num_layers, self.num_stages):
            raise ValueError(
                f"a partition of {partition.num_layers} layers over {partition.num_stages} stages is not one of "
                f"{self.num_layers} layers over {self.num_stages}"
            )


def _waits(delays: Floats) -> Floats:
    """[S] what stages wait for the messages that they send: half of all at the boundaries on their two sides."""
    return (np.append(delays, 0.0) + np.insert(delays, 0, 0.0)) / 2


def _checked(
    name: str,
    values: Sequence[float] | Floats,
    length: int,
    *,
    above_zero: bool = False,
    may_be_infinite: bool = False,
) -> Floats:
    array = np.array(values, dtype=np.float64)
    if array.shape != (length,):
        raise ValueError(f"{name} are {array.shape}, not one number for each of {length}")
    is_sound = (array > 0.0 if above_zero else array >= 0.0) & (np.isfinite(array) | may_be_infinite)
    if not is_sound.all():
        bad = int(np.flatnonzero(~is_sound)[0])
        wanted = "above zero" if above_zero else "not negative"
        finite = "" if may_be_infinite else "finite and "
        raise ValueError(f"{name}[{bad}]={array[bad]} is not allowed: wanted are numbers that are {finite}{wanted}")
    return array
