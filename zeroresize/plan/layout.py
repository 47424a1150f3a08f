"""Which part of every tensor each rank holds: plain numbers, for planning what must travel between two layouts.

A tensor is divided by **units** of one dimension, such as attention heads; a rank holds some **runs** of neighbouring
units. What is not divided is one unit. An :class:`~zeroresize.plan.ownership.OwnershipMap`, of a segment's units, and a
:class:`~zeroresize.plan.partition.Partition`, of layers, are layouts, too: every unit, or layer, has one owner.

``P`` tensors, ``R`` ranks, ``T`` tensor-parallel ranks of a group, ``U`` units of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from zeroresize.plan.ownership import Indices, SegmentWork, unit_counts


@dataclass(frozen=True)
class UnitDivision:
    """Describe how a tensor is divided.

    Dimension ``dim`` is ``num_parts`` equal parts, each of ``num_units`` units of ``rows``.
    """

    dim: int  # the dimension that holds units
    num_units: int  # U
    rows: int  # neighbours that one unit has in a part
    num_parts: int = 1  # how many parts of the dimension hold all units each, such as q, k and v in one weight


@dataclass(frozen=True)
class TensorSpec:
    """Describe a tensor of the undivided model.

    Raises:
        ValueError: if the units of the division are not those of the shape.
    """

    name: str  # in the model, such as ``layers.3.attention.query.weight``
    layer: int  # number of the layer that it belongs to
    shape: tuple[int, ...]  # undivided
    itemsize: int  # bytes of an element
    division: UnitDivision | None = None  # None where every rank of a tensor-parallel group holds the whole

    def __post_init__(self) -> None:
        division = self.division
        if division is None:
            return
        size = division.num_parts * division.num_units * division.rows
        if not 0 <= division.dim < len(self.shape) or self.shape[division.dim] != size:
            raise ValueError(
                f"{self.name}: {division.num_parts} parts of {division.num_units} units of {division.rows} rows "
                f"are not dimension {division.dim} of the shape {self.shape}"
            )

    @property
    def num_units(self) -> int:
        """Return U, which is 1 where the tensor is not divided."""
        return 1 if self.division is None else self.division.num_units

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the undivided tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of one unit."""
        return self.num_bytes // self.num_units

    def local_shape(self, num_units: int) -> tuple[int, ...]:
        """Return the shape of ``num_units`` units of the tensor."""
        if self.division is None:
            return self.shape if num_units else (0,) * len(self.shape)
        dim, size = self.division.dim, self.division.num_parts * num_units * self.division.rows
        return (*self.shape[:dim], size, *self.shape[dim + 1 :])


@dataclass(frozen=True, eq=False)
class Layout:
    """Describe which units of every tensor each rank holds, as runs from ``begins`` up to ``ends``.

    Attributes:
        begins, ends: [K, R], int64: in each row every rank has a run of one tensor; none where both are equal.
        replicas: [R], int64: which copy of the model the rank is a part of, from 0; -1 for a rank without a part. Ranks
            of one replica hold every unit together, and what more than one of them holds is the same on all of them.
        rows: [P + 1]: tensor p has the rows from entry p up to entry p + 1; None where each has one.
    """

    begins: Indices
    ends: Indices
    replicas: Indices
    rows: Indices | None = None

    @classmethod
    def of_owners(cls, owners: Indices, num_ranks: int) -> Layout:
        """Return the layout of one tensor whose units have one owner each, ``owners`` [U]."""
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        ranks, ends = owners[first], np.append(first[1:], len(owners))
        order = np.argsort(ranks, kind="stable")
        counts = np.bincount(ranks, minlength=num_ranks)
        rows = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.zeros((2, max(counts.max(initial=0), 1), num_ranks), dtype=np.int64)
        table[0, rows, ranks[order]], table[1, rows, ranks[order]] = first[order], ends[order]
        return cls(table[0], table[1], np.zeros(num_ranks, dtype=np.int64), np.array([0, table.shape[1]]))

    @classmethod
    def of_holders(cls, units_by_rank: Sequence[Indices]) -> Layout:
        """Return the layout of one tensor of which each rank holds some units, ascending; several may hold one."""
        runs = [np.split(units, np.flatnonzero(np.diff(units) != 1) + 1) for units in units_by_rank]
        most, num_ranks = max(map(len, runs)), len(runs)
        table = np.zeros((2, most, num_ranks), dtype=np.int64)
        for rank, of_rank in enumerate(runs):
            for row, run in enumerate(of_rank):
                if len(run):
                    table[:, row, rank] = run[0], run[-1] + 1
        return cls(table[0], table[1], np.zeros(num_ranks, dtype=np.int64), np.array([0, most]))

    @property
    def num_tensors(self) -> int:
        """Return P, the number of tensors."""
        return len(self.begins) if self.rows is None else len(self.rows) - 1

    @property
    def num_ranks(self) -> int:
        """Return R, the number of ranks."""
        return self.begins.shape[1]

    @cached_property
    def num_replicas(self) -> int:
        """Return how many replicas of the model there are."""
        return int(self.replicas.max(initial=-1)) + 1

    def rows_of(self, tensor: int) -> tuple[Indices, Indices]:
        """Return the begins and ends of a tensor's runs, both [rows, R]."""
        begin, end = (tensor, tensor + 1) if self.rows is None else self.rows[tensor : tensor + 2]
        return self.begins[begin:end], self.ends[begin:end]

    def units_of(self, tensor: int, rank: int) -> range:
        """Return the units that a rank holds of a tensor, of which each rank has one run."""
        return range(int(self.begins[tensor, rank]), int(self.ends[tensor, rank]))

    def rank_bytes(self, tensors: Sequence[TensorSpec]) -> Indices:
        """Return [R] bytes that each rank holds of these tensors, of which each rank has one run."""
        unit_bytes = np.array([spec.unit_bytes for spec in tensors], dtype=np.int64)
        return unit_bytes @ (self.ends - self.begins)


def unit_bounds(num_units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return [T + 1] bounds between the ranks' units, by their shares of the work.

    Rank t holds the units from entry t up to entry t + 1.

    The largest of ``count / share`` is least (D'Hondt): the rank that takes longest takes as short as possible. Equal
    shares of a number that divides are exactly equal.

    Args:
        shares: [T], not negative, not all zero.
    """
    weights = np.asarray(shares, dtype=np.float64)
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0.0).any() or not weights.any():
        raise ValueError(f"shares={shares} are not allowed: wanted are finite numbers, none negative, not all zero")
    return (0, *np.cumsum(unit_counts(tuple(weights.tolist()), SegmentWork(num_units, quantum=1, work=0.0))).tolist())


class Piece(NamedTuple):
    """Describes entries that are neighbours along one dimension, both in the whole tensor and on a rank.

    Attributes:
        begin: where they begin in the whole tensor.
        local_begin: where they begin on the rank.
        length: how many they are.
    """

    begin: int
    local_begin: int
    length: int


def unit_pieces(units: Indices, num_units: int, rows: Sequence[int], *, each: bool = False) -> list[Piece]:
    """Return the pieces of a rank that owns some units: runs of neighbours in every part, such as q, k and v.

    Args:
        units: that the rank owns, ascending.
        num_units: of all ranks together, in every part.
        rows: neighbours that one unit has, in each part.
        each: whether every unit is a piece, so that copies on several ranks are the same pieces.
    """
    runs = np.split(units, np.flatnonzero((np.diff(units) != 1) | each) + 1) if len(units) else []
    pieces: list[Piece] = []
    begin = local_begin = 0
    for of_part in rows:
        for run in runs:
            first, length = begin + int(run[0]) * of_part, len(run) * of_part
            if pieces and not each and pieces[-1].begin + pieces[-1].length == first:  # where a part ends
                pieces[-1] = pieces[-1]._replace(length=pieces[-1].length + length)
            elif length:
                pieces.append(Piece(first, local_begin, length))
            local_begin += length
        begin += num_units * of_part
    return pieces
