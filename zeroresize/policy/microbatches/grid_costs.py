"""What a layer takes for micro-batches, on a grid of sizes and lengths, and linearly between (DynaPipe, section 3).

``K`` micro-batches, ``A`` lengths of a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from zeroresize.policy.microbatches.micro_batch import Floats, Indices


class LongerThanMeasuredError(ValueError):
    """Tells of lengths beyond the grid.

    Attributes:
        row: which of the micro-batches that were asked for is the first.
        most: the longest length that was measured.
    """

    def __init__(self, num_tokens: int, row: int, most: int) -> None:
        super().__init__(
            f"{num_tokens} tokens are longer than what was measured: at most {most}; measure up to the longest sample"
        )
        self.row, self.most = row, most


_VALUES = ("forward_s", "backward_s", "activation_bytes", "workspace_bytes")


@dataclass(frozen=True, eq=False)
class LayerGrid:
    """Hold what one kind of layer takes, at each size with each length (or pair of lengths).

    Between points values are linear in each number. Larger sizes go on as the last two points do, shorter lengths as
    the first two, never below zero.

    Attributes:
        axes: which of a sample's lengths the layer sees: an encoder's only the first of two.
        sizes: rising; rows of a micro-batch.
        lengths: for each of these, rising; tokens.
        forward_s, backward_s: [sizes, lengths, …] of one layer; infinite where memory did not hold it.
        activation_bytes: of the same, kept from the forward to the backward.
        workspace_bytes: of the same, needed beside them while the layer runs, forward or backward.

    Raises:
        ValueError: for numbers that do not rise from 1 on, fewer than two sizes or lengths, and values of another shape
            or below zero.
    """

    axes: tuple[int, ...]
    sizes: tuple[int, ...]
    lengths: tuple[tuple[int, ...], ...]
    forward_s: Floats
    backward_s: Floats
    activation_bytes: Floats
    workspace_bytes: Floats

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.lengths) or not self.axes:
            raise ValueError(f"axes={self.axes} and {len(self.lengths)} lists of lengths: one list for each is needed")
        for name, points in (("sizes", self.sizes), *(("lengths", points) for points in self.lengths)):
            if len(points) < 2 or points[0] < 1 or any(after <= before for before, after in itertools.pairwise(points)):
                raise ValueError(f"{name}={list(points)} are not allowed: two numbers at least, rising from 1 or more")
        shape = (len(self.sizes), *map(len, self.lengths))
        for name in _VALUES:
            values = np.asarray(getattr(self, name), dtype=np.float64)
            object.__setattr__(self, name, values)
            if values.shape != shape or not (values >= 0.0).all():
                raise ValueError(f"{name} {values.shape} are not allowed: {shape} numbers that are not negative")

    def values(self, sizes_K: Indices, lengths_KA: Indices) -> Floats:
        """Return [4, K]: seconds forward and backward, bytes of activations and of workspace, of one layer.

        Raises:
            LongerThanMeasuredError: for lengths that are longer than the longest of the grid, naming both.
        """
        seen_KA = lengths_KA[:, list(self.axes)]
        limits = np.array([points[-1] for points in self.lengths])
        too_long = np.argwhere(seen_KA > limits)
        if len(too_long):
            row, column = too_long[0].tolist()
            raise LongerThanMeasuredError(int(seen_KA[row, column]), row, int(limits[column]))
        columns = [sizes_K, *seen_KA.T]
        places, shares = [], []
        for numbers, points in zip(columns, self._points, strict=True):
            place = np.clip(np.searchsorted(points, numbers, side="right") - 1, 0, len(points) - 2)
            places.append(place)
            shares.append((numbers - points[place]) / (points[place + 1] - points[place]))
        strides = np.array([int(np.prod(self._table.shape[2 + axis :])) for axis in range(len(columns))])
        base = sum(place * stride for place, stride in zip(places, strides, strict=True))
        flat = self._table.reshape(len(_VALUES), -1)
        total = np.zeros((len(_VALUES), len(sizes_K)))
        for corner in itertools.product((0, 1), repeat=len(columns)):
            weight = np.ones(len(sizes_K))
            for upper, share in zip(corner, shares, strict=True):
                weight = weight * (share if upper else 1.0 - share)
            at = flat[:, base + int(np.dot(corner, strides))]
            with np.errstate(invalid="ignore"):
                total += np.where(weight == 0.0, 0.0, weight * at)
        total[np.isnan(total)] = np.inf  # beside points that memory did not hold
        return np.maximum(total, 0.0)

    @cached_property
    def _points(self) -> list[Floats]:
        return [np.array(points, dtype=np.float64) for points in (self.sizes, *self.lengths)]

    @cached_property
    def _table(self) -> Floats:
        return np.stack([getattr(self, name) for name in _VALUES])


def powers_of_two(most: int, least: int = 1) -> tuple[int, ...]:
    """Return the powers of two from ``least`` up to the first that is not below ``most``; two of them at least."""
    points = [least]
    while points[-1] < most or len(points) < 2:
        points.append(2 * points[-1])
    return tuple(points)


def grid_points(sizes: Sequence[int], lengths: Sequence[Sequence[int]]) -> tuple[Indices, Indices]:
    """Return all points of a grid: [X] sizes and [X, axes] lengths, in the order of a grid's values."""
    mesh = np.meshgrid(np.array(sizes), *map(np.array, lengths), indexing="ij")
    columns = [axis.ravel().astype(np.int64) for axis in mesh]
    return columns[0], np.stack(columns[1:], axis=1)
