"""How a model is spread over ranks, what each rank gets of it, and which strategy trains sequences of which length.

``R`` ranks of the job, ``L`` layers, ``P`` tensors.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from zeroresize.plan.layout import Indices, Layout, TensorSpec, unit_bounds
from zeroresize.plan.partition import Partition
from zeroresize.utils.value_checks import at_least, is_number, keep_plain, known_keys

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
        keep_plain(self)
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
        if self.shares:
            is_sound = len(self.shares) == self.tp and all(is_number(share) and share >= 0.0 for share in self.shares)
            if not is_sound or not any(self.shares):
                raise ValueError(
                    f"strategy {self.degrees}: shares={list(self.shares)} are not allowed: wanted are tp = {self.tp} "
                    "numbers, none negative and not all zero, such as [2, 1]"
                )
            scale = self.tp / math.fsum(self.shares)
            shares = tuple(float(share) * scale for share in self.shares) if len(set(self.shares)) > 1 else ()
            object.__setattr__(self, "shares", shares)
        if self.boundaries:
            if len(self.boundaries) != self.pp + 1:
                raise ValueError(
                    f"strategy {self.degrees}: boundaries={list(self.boundaries)} must have pp + 1 = {self.pp + 1} "
                    "entries"
                )
            Partition(self.boundaries)

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
    def _grid(self) -> Indices:
        """[pp, dp, tp] the ranks."""
        return np.array(self.ranks).reshape(self.pp, self.dp, self.tp)

    @cached_property
    def _positions(self) -> dict[int, Position]:
        places = np.ndindex(self.pp, self.dp, self.tp)
        return {self.ranks[number]: Position(place[1], place[0], place[2]) for number, place in enumerate(places)}

    def position_of(self, rank: int) -> Position | None:
        """Return what a rank of the job is; None where it is left out."""
        return self._positions.get(rank)

    def rank_at(self, position: Position) -> int:
        """Return the rank of the job at a position."""
        return int(self._grid[position.stage, position.replica, position.shard])

    def tp_groups(self) -> list[tuple[int, ...]]:
        """Return the ranks that divide the same layers of a replica, group by group, in the order of their shards."""
        return _rows(self._grid)

    def dp_groups(self) -> list[tuple[int, ...]]:
        """Return the ranks that hold the same part of the model, in the order of the replicas."""
        return _rows(self._grid.transpose(0, 2, 1))

    def pipelines(self) -> list[tuple[int, ...]]:
        """Return the ranks that hand on activations to each other, first stage first, by replica and shard."""
        return _rows(self._grid.transpose(1, 2, 0))

    def partition(self, num_layers: int) -> Partition:
        """Return which layers each stage has."""
        try:
            if self.boundaries:
                return Partition.of(self.boundaries, num_layers, self.pp)
            return Partition.uniform(num_layers, self.pp)
        except ValueError as error:
            raise ValueError(f"strategy {self}: {error}") from error

    def units(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return [tp + 1] bounds: shard t holds the units of a tensor from entry t up to entry t + 1."""
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
        stages, replicas, shards = table = np.full((3, num_ranks), -1)
        table[:, self._grid] = np.indices(self._grid.shape)
        bounds: dict[int, tuple[int, ...]] = {}
        cuts_PT = np.zeros((len(tensors), self.tp + 1), dtype=np.int64)
        for number, tensor in enumerate(tensors):
            if tensor.division is not None:
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


def _rows(ranks: Indices) -> list[tuple[int, ...]]:
    """The groups that the last axis makes."""
    return [tuple(row) for row in ranks.reshape(-1, ranks.shape[-1]).tolist()]


@dataclass(frozen=True)
class LengthRange:
    """Describe sequences longer than the range before allows, up to ``up_to`` tokens, and who trains them.

    Attributes:
        max_tokens: that a micro-batch of one replica may have, as far as memory allows; None for what holds for all
            ranges.

    Raises:
        ValueError: if ``up_to`` is no whole number of at least 1, for a strategy of another kind than
            :meth:`Strategy.of` reads, and for ``max_tokens`` below ``up_to``.
    """

    up_to: int
    strategy: Strategy
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        keep_plain(self)
        at_least("length range up_to", self.up_to, 1)
        object.__setattr__(self, "strategy", Strategy.of(self.strategy))
        if self.max_tokens is not None:
            at_least(f"max_tokens of the length range up to {self.up_to}", self.max_tokens, self.up_to)

    @classmethod
    def of(cls, value: Any) -> LengthRange:
        """Return a range, made from a range or from a mapping of the attributes' names, as YAML gives them.

        Raises:
            ValueError: for anything else, and as the class does.
        """
        if isinstance(value, LengthRange):
            return value
        entries = known_keys("length range key", value, ("up_to", "strategy", "max_tokens"))
        missing = [key for key in ("up_to", "strategy") if key not in entries]
        if missing:
            raise ValueError(f"length range {dict(entries)!r}: {missing} are missing")
        return cls(**entries)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values that :meth:`of` reads back."""
        more = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {"up_to": self.up_to, "strategy": self.strategy.as_dict(), **more}

    def __str__(self) -> str:
        return f"up to {self.up_to}: {self.strategy}"


def as_ranges(values: Iterable[Any]) -> tuple[LengthRange, ...]:
    """Return ranges whose ``up_to`` rises, made of what :meth:`LengthRange.of` reads.

    Raises:
        ValueError: if there is none, or one does not begin behind the one before it.
    """
    ranges = tuple(LengthRange.of(value) for value in values)
    if not ranges:
        raise ValueError("no length range is given: at least one is needed")
    for before, after in itertools.pairwise(ranges):
        if after.up_to <= before.up_to:
            raise ValueError(
                f"length range {after} follows {before}: each range needs a larger up_to than the one before"
            )
    return ranges


def lengths_by_range(ranges: Sequence[LengthRange], lengths: Iterable[int]) -> list[list[int]]:
    """Return the lengths in each range, [number of ranges] lists, in the order given."""
    groups: list[list[int]] = [[] for _ in ranges]
    for length in lengths:
        groups[range_of(ranges, length)].append(length)
    return groups


def range_of(ranges: Sequence[LengthRange], length: int) -> int:
    """Return the number of the range that a sequence of ``length`` tokens is in."""
    number = bisect.bisect_left([each.up_to for each in ranges], length)
    if number == len(ranges):
        raise ValueError(f"a sequence of {length} tokens is longer than the last length range: {ranges[-1]}")
    return number
