"""How much of a step's work lies in each layer and in each segment, and which segments there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import nn

from zeroresize.comm.collectives import group_rank
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segment import OwnedSegment
from zeroresize.plan.ownership import Indices, SegmentWork


def work_of_layers(layers: Mapping[str, BalancedLinear]) -> dict[str, float]:
    """Return the work of every layer's products on a rank at even shares, in relative units: the size of its weight."""
    return {name: math.prod(layer.even_shape) * layer.even_part for name, layer in layers.items()}


def present_work_of_layers(layers: Mapping[str, BalancedLinear]) -> dict[str, float]:
    """Return the same of what this rank owns now, also where ``fully_shard`` leaves it only a part of that."""
    shapes = (
        layer.home_shape if layer.segment is None else shard_shape(layer, group_rank(layer.process_group))
        for layer in layers.values()
    )
    return {name: float(math.prod(shape)) for name, shape in zip(layers, shapes, strict=True)}


def shape_with(layer: BalancedLinear, units: Sequence[int] | Indices) -> tuple[int, int]:
    """Return [N, K] of a layer of a segment on a rank that owns these units, and of whose wholes each is held."""
    num_outputs, num_columns = layer.even_shape
    features = len(_wholes_of(layer, units)) * _features_of_whole(layer)
    return (features, num_columns) if layer.is_column_parallel else (num_outputs, features)


def shard_shape(layer: BalancedLinear, rank: int) -> tuple[int, int]:
    """Return [N, K] of the weight of ``layer`` on ``rank`` of its group, without asking that rank."""
    if layer.segment is None:
        num_outputs, num_columns = layer.home_shape_on(rank)
        return num_outputs, num_columns
    segment = layer.segment
    where = next((tensor for tensor in segment.tensors if tensor.owner is layer and tensor.block > 1), None)
    if where is None:
        return shape_with(layer, segment.owned.units_of(rank))
    held = len(where.held(segment.owned, rank)) * sum(where.rows)
    return (held, layer.even_shape[1]) if layer.is_column_parallel else (layer.even_shape[0], held)


def homes_of_columns(layer: BalancedLinear, units: Sequence[int] | Indices) -> Indices:
    """[K]: of each column of a row-parallel layer, whose rank owns these units (ascending), its number in all."""
    rows = _features_of_whole(layer)
    return (_wholes_of(layer, units)[:, None] * rows + np.arange(rows)).reshape(-1)


def homes_of_layers(
    layers: Mapping[str, BalancedLinear], units_of: Callable[[BalancedLinear], Sequence[int] | Indices]
) -> dict[str, Indices]:
    """Return :func:`homes_of_columns` of every layer whose columns may change hands, by name."""
    return {
        name: homes_of_columns(layer, units_of(layer))
        for name, layer in layers.items()
        if layer.segment is not None and not layer.is_column_parallel
    }


def _wholes_of(layer: BalancedLinear, units: Sequence[int] | Indices) -> Indices:
    """The units of the layer's segment, or of slices the wholes that they belong to, ascending."""
    assert layer.segment is not None
    return np.unique(np.asarray(units, dtype=np.int64) // layer.segment.owned.slices)


def _features_of_whole(layer: BalancedLinear) -> int:
    """How many of the features that are divided belong to one of these, in all parts."""
    assert layer.segment is not None
    return layer.whole_size * layer.segment.owned.slices // len(layer.segment.owned.owners)


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


def moving_weights(layers: Mapping[str, BalancedLinear], model: nn.Module) -> float:
    """Return the share of the elements that this rank trains which are of units that may change hands."""
    sizes = {id(each): local_of(each).numel() for each in model.parameters() if each.requires_grad}
    moving = {id(where.parameter) for segment in owned_segments(layers) for where in segment.tensors}
    return sum(sizes.get(each, 0) for each in moving) / max(sum(sizes.values()), 1)


def segment_works(layers: Mapping[str, BalancedLinear]) -> tuple[SegmentWork, ...]:
    """Return what decisions must know of :func:`owned_segments`, in the same order.

    Behind them come layers that are in none of them, and that hosts have not divided evenly.
    """
    segments, by_name = owned_segments(layers), work_of_layers(layers)
    total, work = math.fsum(by_name.values()), {id(layers[name]): of_layer for name, of_layer in by_name.items()}
    works: list[SegmentWork] = []
    for segment in segments:
        of_segment = math.fsum(work[id(layer)] for layer in segment.modules)
        works.append(
            SegmentWork(
                num_units=len(segment.owned.owners),
                quantum=segment.quantum,
                work=of_segment / total,
                min_units=-(-segment.min_units // segment.quantum) * segment.quantum,
                block=segment.owned.block,
                shared=math.fsum(work[id(layer)] for layer in segment.shared) / of_segment,
                slices=segment.owned.slices,
                copies=segment.copy_costs,
            )
        )
    for layer in layers.values():
        if layer.division and layer.segment not in segments:
            block = layer.block if layer.begins else 1
            number = layer.num_units_at_home * block
            part = work[id(layer)] / total
            works.append(SegmentWork(number, 1, part, block=block, shared=float(block > 1), stays=True))
    return tuple(works)
