"""Which consecutive layers each stage of a pipeline has, and how long and how full that makes the stages.

``L`` layers, ``S`` stages. A step waits for the slowest stage, so a good partition has a small slowest stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Transfer:
    """A layer that changes stages."""

    layer: int
    source: int
    destination: int


@dataclass(frozen=True)
class Partition:
    """Consecutive layers for every stage, at least one for each, as ``torch.distributed.pipelining`` wants it.

    Attributes:
        boundaries: [S + 1]: stage s has the layers ``boundaries[s]`` to ``boundaries[s + 1] - 1``.

    Raises:
        ValueError: unless the boundaries begin with 0 and rise.
    """

    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        rises = all(begin < end for begin, end in itertools.pairwise(self.boundaries))
        if len(self.boundaries) < 2 or self.boundaries[0] != 0 or not rises:
            raise ValueError(
                f"boundaries={self.boundaries} are not allowed: they begin with 0 and rise, as every stage has layers"
            )

    @classmethod
    def uniform(cls, num_layers: int, num_stages: int) -> Partition:
        """Equally many layers for every stage; where they do not divide, the first stages have one more.

        Raises:
            ValueError: if there are fewer layers than stages.
        """
        _check_enough(num_layers, num_stages)
        each, more = divmod(num_layers, num_stages)
        return cls(tuple(stage * each + min(stage, more) for stage in range(num_stages + 1)))

    @classmethod
    def of(cls, boundaries: Sequence[int], num_layers: int, num_stages: int) -> Partition:
        """The partition with these boundaries.

        Raises:
            ValueError: if they do not divide ``num_layers`` layers over ``num_stages`` stages, at least one for each.
        """
        _check_enough(num_layers, num_stages)
        checked = tuple(int(one) for one in boundaries)
        is_whole = len(checked) == num_stages + 1 and checked[0] == 0 and checked[-1] == num_layers
        if not is_whole or any(begin >= end for begin, end in itertools.pairwise(checked)):
            raise ValueError(
                f"boundaries {list(checked)} do not divide {num_layers} layers over {num_stages} stages: they must be "
                f"{num_stages + 1} rising whole numbers from 0 to {num_layers}, so that every stage has at least one "
                "layer"
            )
        return cls(checked)

    @property
    def num_layers(self) -> int:
        return self.boundaries[-1]

    @property
    def num_stages(self) -> int:
        return len(self.boundaries) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(np.diff(self.boundaries).tolist())

    @property
    def stages(self) -> list[int]:
        """[L] the stage of each layer."""
        return np.repeat(np.arange(self.num_stages), self.counts).tolist()

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        return range(self.boundaries[stage], self.boundaries[stage + 1])

    def stage_of(self, layer: int) -> int:
        """The stage that has a layer.

        Raises:
            IndexError: if there is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"there is no layer {layer} among {self.num_layers}")
        return int(np.searchsorted(self.boundaries, layer, side="right")) - 1

    def transfers_to(self, after: Partition, stages: Sequence[int] | None = None) -> tuple[Transfer, ...]:
        """The layers that have another stage in ``after``, ascending: each travels once, straight to where it goes.

        Args:
            after: of the same layers.
            stages: which of this partition's stages those of ``after`` are; the same ones where not given.

        Raises:
            ValueError: if the partitions are of different layers, or ``stages`` do not name those of ``after``.
        """
        named = np.arange(after.num_stages) if stages is None else np.asarray(stages)
        if after.num_layers != self.num_layers or len(named) != after.num_stages:
            raise ValueError(
                f"{self.num_layers} layers on {self.num_stages} stages cannot become {after.num_layers} on {len(named)}"
            )
        sources = np.repeat(np.arange(self.num_stages), self.counts)
        destinations = np.repeat(named, after.counts)
        moved = np.flatnonzero(sources != destinations)
        return tuple(map(Transfer, moved.tolist(), sources[moved].tolist(), destinations[moved].tolist()))


@dataclass(frozen=True, eq=False)
class PipelineLoad:
    """What layers cost and what stages can take; :meth:`of` checks them.

    Attributes:
        costs: [L], float64, in any unit: seconds balance by time, numbers of parameters by parameters.
        speeds: [S], float64: of the stages' devices; a stage takes the sum of its layers' costs / its speed.
        layer_bytes: [L], float64: what a layer holds on any stage (weights, gradients, optimizer, activations).
        memory_limits: [S], float64, bytes; infinite where there is none.
    """

    costs: Floats
    speeds: Floats
    layer_bytes: Floats
    memory_limits: Floats

    @classmethod
    def of(
        cls,
        costs: Sequence[float] | Floats,
        num_stages: int,
        *,
        speeds: Sequence[float] | Floats | None = None,
        layer_bytes: Sequence[float] | Floats | None = None,
        memory_limits: Sequence[float] | Floats | None = None,
    ) -> PipelineLoad:
        """As :class:`PipelineLoad`; speeds are equal and memory is unlimited where they are not given.

        Raises:
            ValueError: if there are fewer layers than stages, if a number is not finite or has the wrong sign, if there
                are not as many as layers or stages, or if only one of bytes and limits is given.
        """
        if (layer_bytes is None) != (memory_limits is None):
            raise ValueError("layer_bytes and memory_limits are given together or not at all")
        _check_enough(len(costs), num_stages)
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
        )

    @property
    def num_layers(self) -> int:
        return len(self.costs)

    @property
    def num_stages(self) -> int:
        return len(self.speeds)

    @cached_property
    def cost_sums(self) -> Floats:
        """[L + 1]: of the first layers, none of them to all."""
        return np.concatenate([[0.0], np.cumsum(self.costs)])

    @cached_property
    def byte_sums(self) -> Floats:
        """[L + 1]: of the first layers, none of them to all."""
        return np.concatenate([[0.0], np.cumsum(self.layer_bytes)])

    def on_stages(self, stages: Sequence[int]) -> PipelineLoad:
        """The same layers on some of the stages only."""
        return PipelineLoad(self.costs, self.speeds[list(stages)], self.layer_bytes, self.memory_limits[list(stages)])

    def stage_times(self, partition: Partition) -> Floats:
        """[S] how long every stage takes, in the unit of the costs."""
        return self.times_between(partition.boundaries)

    def times_between(self, boundaries: Sequence[int] | Indices) -> Floats:
        """[S] as :meth:`stage_times`, given the [S + 1] boundaries of a partition."""
        return np.diff(self.cost_sums[np.asarray(boundaries)]) / self.speeds

    def slowest(self, partition: Partition) -> float:
        """How long the slowest stage takes."""
        return float(self.stage_times(partition).max())

    def stage_bytes(self, partition: Partition) -> Floats:
        """[S] what every stage holds."""
        return np.diff(self.byte_sums[list(partition.boundaries)])

    def fits(self, partition: Partition) -> bool:
        """Whether every stage holds no more than its limit."""
        return bool(np.all(self.stage_bytes(partition) <= self.memory_limits))

    def check_partition(self, partition: Partition) -> None:
        """Raises ValueError unless ``partition`` is one of these layers over these stages."""
        if (partition.num_layers, partition.num_stages) != (self.num_layers, self.num_stages):
            raise ValueError(
                f"a partition of {partition.num_layers} layers over {partition.num_stages} stages is not one of "
                f"{self.num_layers} layers over {self.num_stages}"
            )


def _check_enough(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be divided over {num_stages} stages: each has at least one")


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
