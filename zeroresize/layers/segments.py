"""How much of a step's work lies in each layer and in each segment, and which segments there are."""

from __future__ import annotations

import math
from collections.abc import Mapping

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import OwnedSegment
from zeroresize.plan.ownership import SegmentWork


def work_of_layers(layers: Mapping[str, BalancedLinear]) -> dict[str, float]:
    """Return the work of every layer's products on a rank at even shares, in relative units: the size of its weight."""
    return {name: float(math.prod(layer.even_shape)) for name, layer in layers.items()}


def segments_of_layers(layers: Mapping[str, BalancedLinear]) -> list[list[str]]:
    """Name the layers between two synchronisations: ranks meet after row-parallel ones.

    Args:
        layers: by name, in the order in which the model registers them; they are taken to compute in this order.
    """
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
