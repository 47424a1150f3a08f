"""How much of a step's work lies in each layer and in each segment, and which segments there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from zeroresize.comm.collectives import group_rank
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import OwnedSegment
from zeroresize.plan.ownership import Indices, SegmentWork


def work_of_layers(layers: Mapping[str, BalancedLinear]) -> dict[str, float]:
    """Return the work of every layer's products on a rank at even shares, in relative units: the size of its weight."""
    return {name: float(math.prod(layer.even_shape)) for name, layer in layers.items()}


def present_work_of_layers(layers: Mapping[str, BalancedLinear]) -> dict[str, float]:
    """Return the same of what this rank owns now, also where ``fully_shard`` leaves it only a part of that."""
    shapes = (
        layer.even_shape if layer.segment is None else shard_shape(layer, group_rank(layer.process_group))
        for layer in layers.values()
    )
    return {name: float(math.prod(shape)) for name, shape in zip(layers, shapes, strict=True)}


def shape_with(layer: BalancedLinear, num_units: int) -> tuple[int, int]:
    """Return [N, K] of a layer of a segment on a rank that owns so many of its units."""
    num_outputs, num_columns = layer.even_shape
    num_even = _num_even(layer)
    if layer.is_column_parallel:
        return num_outputs * num_units // num_even, num_columns
    return num_outputs, num_columns * num_units // num_even


def shard_shape(layer: BalancedLinear, rank: int) -> tuple[int, int]:
    """Return [N, K] of the weight of ``layer`` on ``rank`` of its group, without asking that rank."""
    if layer.segment is None:
        num_outputs, num_columns = layer.even_shape
        return num_outputs, num_columns
    return shape_with(layer, layer.segment.owned.counts[rank])


def homes_of_columns(layer: BalancedLinear, units: Sequence[int] | Indices) -> Indices:
    """[K]: of each column of a row-parallel layer, whose rank owns these units (ascending), where it is at even shares.

    That is the rank that holds it then × the columns of the layer there + its place there.
    """
    assert layer.segment is not None
    num_at_home, num_even = layer.even_shape[1], _num_even(layer)
    rows = num_at_home // num_even
    ranks, places = np.divmod(np.asarray(units, dtype=np.int64), num_even)
    begins_U = ranks * num_at_home + places * rows
    return (begins_U[:, None] + np.arange(rows)).reshape(-1)


def homes_of_layers(
    layers: Mapping[str, BalancedLinear], units_of: Callable[[BalancedLinear], Sequence[int] | Indices]
) -> dict[str, Indices]:
    """Return :func:`homes_of_columns` of every layer whose columns may change hands, by name."""
    return {
        name: homes_of_columns(layer, units_of(layer))
        for name, layer in layers.items()
        if layer.segment is not None and not layer.is_column_parallel
    }


def _num_even(layer: BalancedLinear) -> int:
    """How many units of the layer's segment every rank has at even shares."""
    assert layer.segment is not None
    return len(layer.segment.owned.owners) // layer.segment.owned.num_ranks


def segments_of_layers(layers: Mapping[str, BalancedLinear]) -> list[list[str]]:
    """Name the layers between two synchronisations: ranks meet after row-parallel ones."""
    segments: list[list[str]] = []
    has_ended = True
    for name, layer in layers.items():
        if (has_ended and layer.is_column_parallel) or not segments:
            segments.append([])
        segments[-1].append(name)
        has_ended = not layer.is_column_parallel
    return segments


def owned_segments(layers: Mapping[str, BalancedLinear]) -> list[OwnedSegment]:
    """Return the segments whose units may change hands, in the order of the model."""
    return [segment for segment in all_segments(layers) if segment.stays_even is None]


def all_segments(layers: Mapping[str, BalancedLinear]) -> list[OwnedSegment]:
    """Return all known segments, in the order of the model, whether the present mode lets their units move or not."""
    return list(dict.fromkeys(layer.segment for layer in layers.values() if layer.segment is not None))


def segment_works(layers: Mapping[str, BalancedLinear]) -> tuple[SegmentWork, ...]:
    """Return what decisions must know of :func:`owned_segments`, in the same order."""
    work = work_of_layers(layers)
    total = sum(work.values())
    return tuple(
        SegmentWork(
            num_units=len(segment.owned.owners),
            quantum=segment.quantum,
            work=sum(work[name] for name, layer in layers.items() if layer.segment is segment) / total,
            min_units=segment.min_units,
        )
        for segment in owned_segments(layers)
    )
