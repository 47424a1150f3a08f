"""Which part of every tensor each rank holds: plain numbers, for planning what must travel between two layouts.

A tensor is divided by **units** of one dimension, such as attention heads, of which every rank holds neighbours. What
is not divided is one unit, which every rank of a tensor-parallel group holds.

``P`` tensors, ``R`` ranks, ``T`` tensor-parallel ranks of a group, ``U`` units of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zeroresize.plan.ownership import Indices, SegmentWork, unit_counts


@dataclass(frozen=True)
class UnitDivision:
    """Describe how a tensor is divided.

    Dimension ``dim`` is ``num_parts`` equal parts, each of ``num_units`` units of ``rows``.

    Attributes:
        dim: the dimension that holds units.
        num_units: U.
        rows: neighbours that one unit has in a part.
        num_parts: how many parts of the dimension hold all units each, such as q, k and v in one weight.
    """

    dim: int
    num_units: int
    rows: int
    num_parts: int = 1


@dataclass(frozen=True)
class TensorSpec:
    """Describe a tensor of the undivided model.

    Attributes:
        name: in the model, such as ``layers.3.attention.query.weight``.
        layer: number of the layer that it belongs to.
        shape: undivided.
        itemsize: bytes of an element.
        division: None where every rank of a tensor-parallel group holds the whole.

    Raises:
        ValueError: if the units of the division are not those of the shape.
    """

    name: str
    layer: int
    shape: tuple[int, ...]
    itemsize: int
    division: UnitDivision | None = None

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
        division = self.division
        return (
            *self.shape[: division.dim],
            division.num_parts * num_units * division.rows,
            *self.shape[division.dim + 1 :],
        )


@dataclass(frozen=True, eq=False)
class Layout:
    """Describe which units of every tensor each rank holds, from ``begins`` up to ``ends``; none where both are equal.

    Attributes:
        begins, ends: [P, R], int64.
        replicas: [R], int64: which copy of the model the rank is a part of, from 0; -1 for a rank without a part. Ranks
            of one replica hold every unit together, and what more than one of them holds is the same on all of them.
    """

    begins: Indices
    ends: Indices
    replicas: Indices

    @property
    def num_tensors(self) -> int:
        """Return P, the number of tensors."""
        return self.begins.shape[0]

    @property
    def num_ranks(self) -> int:
        """Return R, the number of ranks."""
        return self.begins.shape[1]

    @cached_property
    def num_replicas(self) -> int:
        """Return how many replicas of the model there are."""
        return int(self.replicas.max(initial=-1)) + 1

    def units_of(self, tensor: int, rank: int) -> range:
        """Return the units that a rank holds of a tensor."""
        return range(int(self.begins[tensor, rank]), int(self.ends[tensor, rank]))

    def rank_bytes(self, tensors: Sequence[TensorSpec]) -> Indices:
        """Return [R] bytes that each rank holds of these tensors, which are those of the layout."""
        unit_bytes = np.array([one.unit_bytes for one in tensors], dtype=np.int64)
        return unit_bytes @ (self.ends - self.begins)


def unit_bounds(num_units: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return [T + 1] bounds between the ranks' units, by their shares of the work.

    Rank t holds the units from entry t up to entry t + 1.

    The largest of ``count / share`` is least (D'Hondt): the rank that takes longest takes as short as possible. Equal
    shares of a number that divides are exactly equal.

    Args:
        shares: [T], not negative, not all zero.

    Raises:
        ValueError: for shares of another kind.
    """
    weights = np.asarray(shares, dtype=np.float64)
    if weights.ndim != 1 or not np.isfinite(weights).all() or (weights < 0.0).any() or not weights.any():
        raise ValueError(f"shares={shares} are not allowed: wanted are finite numbers, none negative, not all zero")
    return (0, *np.cumsum(unit_counts(tuple(weights.tolist()), SegmentWork(num_units, quantum=1, work=0.0))).tolist())
