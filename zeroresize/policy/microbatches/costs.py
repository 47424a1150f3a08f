"""What micro-batches take: layers on a grid of sizes and lengths, linearly between (DynaPipe, section 3); and stages.

``K`` micro-batches, ``A`` lengths of a sample, ``L`` layers, ``S`` stages.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.microbatches.plan import Floats, Indices
from zeroresize.utils.checked import checked
from zeroresize.utils.codec import decoded, encoded
from zeroresize.utils.files import write_whole
from zeroresize.utils.hashing import digest

#: Of a tensor that a layer hands on: bytes of an element, then its dimensions: numbers, and names of sizes.
HandedBytes = tuple[tuple[int | str, ...], ...]
#: What of a layer is on a grid.
VALUES = ("forward_s", "backward_s", "activation_bytes", "workspace_bytes")


class LongerThanMeasuredError(ValueError):
    """Tells of lengths beyond the grid: the first micro-batch with such, and the longest that was measured."""

    def __init__(self, num_tokens: int, row: int, most: int) -> None:
        super().__init__(
            f"{num_tokens} tokens are longer than what was measured: at most {most}; measure up to the longest sample"
        )
        self.row, self.most = row, most


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
        for name in VALUES:
            values = np.asarray(getattr(self, name), dtype=np.float64)
            object.__setattr__(self, name, values)
            if values.shape != shape or not (values >= 0.0).all():
                raise ValueError(f"{name} {values.shape} are not allowed: {shape} numbers that are not negative")

    def values(self, sizes_K: Indices, lengths_KA: Indices) -> Floats:
        """Return [4, K]: seconds forward and backward, bytes of activations and of workspace, of one layer."""
        seen_KA = lengths_KA[:, list(self.axes)]
        limits = np.array([points[-1] for points in self.lengths])
        too_long = np.argwhere(seen_KA > limits)
        if len(too_long):
            row, column = too_long[0].tolist()
            raise LongerThanMeasuredError(int(seen_KA[row, column]), row, int(limits[column]))
        points, table = self._points
        strides = [int(np.prod(table.shape[2 + axis :])) for axis in range(len(points))]
        base, shares = np.zeros(len(sizes_K), dtype=np.int64), []
        for numbers, along, stride in zip([sizes_K, *seen_KA.T], points, strides, strict=True):
            place = np.clip(np.searchsorted(along, numbers, side="right") - 1, 0, len(along) - 2)
            shares.append((numbers - along[place]) / (along[place + 1] - along[place]))
            base += place * stride
        flat, total = table.reshape(len(VALUES), -1), np.zeros((len(VALUES), len(sizes_K)))
        for corner in itertools.product((0, 1), repeat=len(points)):
            weight = np.ones(len(sizes_K))
            for upper, share in zip(corner, shares, strict=True):
                weight = weight * (share if upper else 1.0 - share)
            with np.errstate(invalid="ignore"):
                total += np.where(weight == 0.0, 0.0, weight * flat[:, base + int(np.dot(corner, strides))])
        total[np.isnan(total)] = np.inf  # beside points that memory did not hold
        return np.maximum(total, 0.0)

    @cached_property
    def _points(self) -> tuple[list[Floats], Floats]:
        """Sizes and lengths, and [4, sizes, lengths, …] all values."""
        points = [np.array(along, dtype=np.float64) for along in (self.sizes, *self.lengths)]
        return points, np.stack([getattr(self, name) for name in VALUES])


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


class Prices(NamedTuple):
    """Holds [K, S] of micro-batches on stages: seconds, bytes kept, and bytes needed besides while each runs."""

    forward_s: Floats
    backward_s: Floats
    activation_bytes: Floats
    workspace_bytes: Floats

    @property
    def seconds(self) -> Floats:
        """Return [K, S] of forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Tell what each stage takes.

    Attributes:
        kinds: [L] of each layer; layers of one kind cost the same.
        costs: of each kind.
        boundaries: [S + 1] stage s has the layers from entry s up to entry s + 1.
        names: of a micro-batch's sizes, the number of rows first.
        handed: [L − 1] of which sizes the bytes are that layers hand on; empty where nobody knows. A stage but the last
            keeps what it hands on, as the next layer, which counts it, is elsewhere.
    """

    kinds: tuple[str, ...]
    costs: Mapping[str, LayerGrid]
    boundaries: tuple[int, ...]
    names: tuple[str, ...] = ()
    handed: tuple[HandedBytes, ...] = ()

    def __post_init__(self) -> None:
        Partition.of(self.boundaries, len(self.kinds), self.num_stages)

    @property
    def num_stages(self) -> int:
        """Return S."""
        return len(self.boundaries) - 1

    def prices(self, sizes_K: Indices, lengths_KA: Indices) -> Prices:
        """Return what each micro-batch takes on each stage; lengths [K, A] that were never measured raise an error.

        A layer's workspace is needed while those behind it have not begun, in the forward, or keep nothing any more, in
        the backward. So that of a stage is the most that any of its layers needs beyond what they all keep together.
        """
        if self.names and lengths_KA.shape[1] != len(self.names) - 1:
            raise ValueError(f"lengths have {lengths_KA.shape[1]} columns: costs are of {list(self.names)}")
        of_kind = {kind: self.costs[kind].values(sizes_K, lengths_KA) for kind in dict.fromkeys(self.kinds)}
        total = np.zeros((len(VALUES) - 1, len(sizes_K), self.num_stages))
        peak_KS = np.zeros((len(sizes_K), self.num_stages))
        for stage, (begin, end) in enumerate(itertools.pairwise(self.boundaries)):
            for kind, run in itertools.groupby(self.kinds[begin:end]):
                total[:, :, stage] += len(list(run)) * of_kind[kind][:-1]
                peak_KS[:, stage] = np.maximum(peak_KS[:, stage], total[-1, :, stage] + of_kind[kind][-1])
        forward_s, backward_s, kept = total
        with np.errstate(invalid="ignore"):
            workspace = np.where(np.isfinite(kept), np.maximum(peak_KS - kept, 0.0), np.inf)
        if self.handed:
            sizes_of = dict(zip(self.names, (sizes_K, *lengths_KA.T), strict=True))
            for stage, end in enumerate(self.boundaries[1:-1]):
                for dims in self.handed[end - 1]:
                    factors = (sizes_of[dim] if isinstance(dim, str) else dim for dim in dims)
                    kept[:, stage] += math.prod(factors, start=1.0)
        return Prices(forward_s, backward_s, kept, workspace)


@checked()
@dataclass(frozen=True)
class CostTable:
    """Hold what the layers of a model take, for each way of recomputation; it can be kept as a file.

    Attributes:
        kinds: [L] of each layer.
        names: of a micro-batch's sizes, the number of rows first.
        grids: by what is computed again in backwards, of each kind.
        device: on which they were measured.
        handed: [L − 1] of which sizes the bytes are that layers hand on, see :class:`StageCosts`; empty where nobody
            knows.

    Raises:
        ValueError: for a kind that was not measured.
    """

    kinds: tuple[str, ...]
    names: tuple[str, ...]
    grids: Mapping[str, Mapping[str, LayerGrid]]
    device: str
    handed: tuple[HandedBytes, ...] = ()

    def __post_init__(self) -> None:
        for recomputation, by_kind in self.grids.items():
            missing = sorted(set(self.kinds) - set(by_kind))
            if missing:
                raise ValueError(f"layers of the kinds {missing} have no costs where {recomputation} is computed again")
        if not self.grids:
            raise ValueError("no way of recomputation was measured: at least one is needed")

    def costs(self, boundaries: Sequence[int]) -> dict[str, StageCosts]:
        """Return what the stages with these boundaries [S + 1] take, by what is computed again."""
        return {
            recomputation: StageCosts(self.kinds, by_kind, tuple(boundaries), self.names, self.handed)
            for recomputation, by_kind in self.grids.items()
        }

    @property
    def longest(self) -> tuple[int, ...]:
        """Return [A] the longest samples that were measured."""
        grids = [grid for by_kind in self.grids.values() for grid in by_kind.values()]
        limits = [(axis, points[-1]) for grid in grids for axis, points in zip(grid.axes, grid.lengths, strict=True)]
        return tuple(
            max((limit for seen, limit in limits if seen == axis), default=0) for axis in range(len(self.names) - 1)
        )

    def require_model(self, kinds: Sequence[str], names: Sequence[str]) -> None:
        """Raise ValueError unless the table is of layers of these kinds, in micro-batches with these sizes."""
        if tuple(names) != self.names:
            raise ValueError(f"the costs are of micro-batches with {list(self.names)}: the model has {list(names)}")
        if len(kinds) != len(self.kinds):
            raise ValueError(f"the costs are of a model of {len(self.kinds)} layers: this one has {len(kinds)}")
        for number, (measured, wanted) in enumerate(zip(self.kinds, kinds, strict=True)):
            if measured != wanted:
                raise ValueError(f"the costs are of another model: layer {number} was {measured}, and is {wanted}")

    @property
    def fingerprint(self) -> str:
        """Return a digest of all numbers."""
        return digest(json.dumps(encoded(self), sort_keys=True)).hex()

    def save(self, path: str | Path) -> None:
        """Write the table as JSON; where that cannot be, the file is as it was."""
        write_whole(path, json.dumps(encoded(self)))

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: as the class does, and for what is no table, naming the file.
        """
        try:
            return decoded(cls, json.loads(Path(path).read_text(encoding="utf-8")), "costs")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
