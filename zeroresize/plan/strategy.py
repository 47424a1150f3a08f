"""How a model is spread over ranks: data, tensor and pipeline parallelism, and what each rank gets of it.

``R`` ranks of the job, ``L`` layers, ``P`` tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from zeroresize.plan.layout import Layout, TensorSpec, unit_bounds
from zeroresize.plan.partition import Partition
from zeroresize.utils.value_checks import at_least, is_number, known_keys

_DEGREES = ("dp", "tp", "pp")
_KEYS = (*_DEGREES, "ranks", "shares", "boundaries")


class Position(NamedTuple):
    """Describe what a rank is in a strategy.

    Attributes:
        replica: which copy of the model, of ``dp``.
        stage: of its pipeline, of ``pp``.
        shard: of the stage's layers, of ``tp``.
    """

    replica: int
    stage: int
    shard: int


@dataclass(frozen=True)
class Strategy:
    """Describe (DP, TP, PP) on a set of ranks (HotSPa), with uneven shares of the tensor-parallel ranks where wanted.

    Neighbours in ``ranks`` are of one tensor-parallel group, then come the replicas, then the stages: as Megatron-LM
    orders them, so tensor parallelism stays inside a node where it fits.

    Attributes:
        dp: copies of the model, which share the sequences.
        tp: ranks that divide each layer.
        pp: stages.
        ranks: [dp × tp × pp] of the job; empty for the first ones. Ranks that are not named are left out.
        shares: [tp] of the work of a tensor-parallel group's ranks, in any unit, the same in all groups; empty where
            they are equal.
        boundaries: [pp + 1]: stage s has the layers from entry s up to entry s + 1; empty for equally many on each.

    Raises:
        ValueError: for degrees below 1, ranks that are not as many as the product of the degrees, negative or named
            twice, shares or boundaries that are not as many as needed or not allowed.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ranks: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()
    boundaries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for key in _DEGREES:
            at_least(f"strategy {key}", getattr(self, key), 1)
        for key in ("ranks", "shares", "boundaries"):
            value = getattr(self, key)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(f"strategy {key}={value!r}: a list of numbers is needed")
            object.__setattr__(self, key, tuple(value))
        size = self.dp * self.tp * self.pp
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(size)))
        for rank in self.ranks:
            at_least("strategy ranks", rank, 0)
        if len(self.ranks) != size or len(set(self.ranks)) != size:
            raise ValueError(
                f"strategy {self.degrees}: ranks={list(self.ranks)} are not {size} different ranks, one for each part "
                f"({self.dp} × {self.tp} × {self.pp})"
            )
        self._check_shares()
        if self.boundaries and len(self.boundaries) != self.pp + 1:
            raise ValueError(
                f"strategy {self.degrees}: boundaries={list(self.boundaries)} must have pp + 1 = {self.pp + 1} entries"
            )
        if self.boundaries:
            Partition(self.boundaries)

    def _check_shares(self) -> None:
        if not self.shares:
            return
        is_sound = len(self.shares) == self.tp and all(is_number(one) and one >= 0.0 for one in self.shares)
        if not is_sound or not any(self.shares):
            raise ValueError(
                f"strategy {self.degrees}: shares={list(self.shares)} are not allowed: wanted are tp = {self.tp} "
                "numbers, none negative and not all zero, such as [2, 1]"
            )
        if len(set(self.shares)) == 1:
            object.__setattr__(self, "shares", ())
        else:
            scale = self.tp / math.fsum(self.shares)
            object.__setattr__(self, "shares", tuple(float(one) * scale for one in self.shares))

    @classmethod
    def of(cls, value: Any) -> Strategy:
        """Return a strategy, made from one, from ``[dp, tp, pp]``, or from a mapping of the attributes' names.

        A mapping is what YAML gives.

        Raises:
            ValueError: for anything else, and as the class does.
        """
        if isinstance(value, Strategy):
            return value
        if isinstance(value, Mapping):
            return cls(**known_keys("strategy key", value, _KEYS))
        if isinstance(value, list | tuple) and len(value) == 3:
            return cls(*value)
        raise ValueError(f"strategy {value!r}: [dp, tp, pp] is needed, or a mapping of {list(_KEYS)}")

    @property
    def degrees(self) -> tuple[int, int, int]:
        """Return (dp, tp, pp)."""
        return self.dp, self.tp, self.pp

    @property
    def num_ranks(self) -> int:
        """Return how many ranks take part."""
        return len(self.ranks)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values that :meth:`of` reads back; what is as by default is left out."""
        entries: dict[str, Any] = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        if self.ranks != tuple(range(self.num_ranks)):
            entries["ranks"] = list(self.ranks)
        if self.shares:
            entries["shares"] = list(self.shares)
        if self.boundaries:
            entries["boundaries"] = list(self.boundaries)
        return entries

    def __str__(self) -> str:
        more = [f"{key} {list(value)}" for key, value in self.as_dict().items() if key not in _DEGREES]
        return f"({', '.join(map(str, [*self.degrees, *more]))})"

    @cached_property
    def _positions(self) -> dict[int, Position]:
        return {
            rank: Position(number // self.tp % self.dp, number // (self.tp * self.dp), number % self.tp)
            for number, rank in enumerate(self.ranks)
        }

    def position_of(self, rank: int) -> Position | None:
        """Return what a rank of the job is; None where it is left out."""
        return self._positions.get(rank)

    def rank_at(self, position: Position) -> int:
        """Return the rank of the job at a position."""
        replica, stage, shard = position
        return self.ranks[(stage * self.dp + replica) * self.tp + shard]

    def tp_groups(self) -> list[tuple[int, ...]]:
        """Return the ranks that divide the same layers of a replica, group by group, in the order of their shards."""
        return [self.ranks[begin : begin + self.tp] for begin in range(0, self.num_ranks, self.tp)]

    def dp_groups(self) -> list[tuple[int, ...]]:
        """Return the ranks that hold the same part of the model, in the order of the replicas."""
        return [
            tuple(self.rank_at(Position(replica, stage, shard)) for replica in range(self.dp))
            for stage in range(self.pp)
            for shard in range(self.tp)
        ]

    def pipelines(self) -> list[tuple[int, ...]]:
        """Return the ranks that hand on activations to each other, first stage first.

        There is one row for each replica and shard.
        """
        return [
            tuple(self.rank_at(Position(replica, stage, shard)) for stage in range(self.pp))
            for replica in range(self.dp)
            for shard in range(self.tp)
        ]

    def partition(self, num_layers: int) -> Partition:
        """Return which layers each stage has.

        Raises:
            ValueError: if there are fewer layers than stages, or the boundaries are of another number of layers.
        """
        try:
            if self.boundaries:
                return Partition.of(self.boundaries, num_layers, self.pp)
            return Partition.uniform(num_layers, self.pp)
        except ValueError as error:
            raise ValueError(f"strategy {self}: {error}") from error

    def units(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return [tp + 1] bounds: shard t holds the units of a tensor from entry t up to entry t + 1.

        Raises:
            ValueError: if equal shares are wanted and the units do not divide by the shards.
        """
        if tensor.num_units % self.tp and not self.shares:
            raise ValueError(
                f"strategy {self}: the {tensor.num_units} units of {tensor.name} do not divide by tp={self.tp}: choose "
                "another degree, or give shares"
            )
        return unit_bounds(tensor.num_units, self.shares or (1.0,) * self.tp)

    def layout(self, tensors: Sequence[TensorSpec], num_ranks: int, num_layers: int) -> Layout:
        """Return what every rank of the job holds of a model's tensors.

        Gradients and optimizer state lie as their parameters do.

        Raises:
            ValueError: for ranks that the job does not have, and as :meth:`partition` and :meth:`units` do.
        """
        if max(self.ranks) >= num_ranks:
            raise ValueError(f"strategy {self} needs rank {max(self.ranks)}: there are {num_ranks} ranks")
        stage_of_layer = np.array(self.partition(num_layers).stages)
        replicas, stages, shards = (np.full(num_ranks, -1) for _ in range(3))
        for rank, position in self._positions.items():
            replicas[rank], stages[rank], shards[rank] = position
        bounds: dict[Any, tuple[int, ...]] = {}
        cuts_PT = np.zeros((len(tensors), self.tp + 1), dtype=np.int64)
        for number, tensor in enumerate(tensors):
            if tensor.division is None:
                continue
            if tensor.num_units not in bounds:
                bounds[tensor.num_units] = self.units(tensor)
            cuts_PT[number] = bounds[tensor.num_units]
        is_whole = np.array([tensor.division is None for tensor in tensors])
        begins, ends = cuts_PT[:, :-1][:, shards], cuts_PT[:, 1:][:, shards]
        begins[is_whole], ends[is_whole] = 0, 1
        stage_of_tensor = stage_of_layer[[tensor.layer for tensor in tensors]]
        is_absent = stage_of_tensor[:, None] != stages[None, :]
        begins[is_absent] = ends[is_absent] = 0
        return Layout(begins, ends, replicas)
