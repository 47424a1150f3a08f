"""How the work of a step lies in a model's layers: how much in each, and between which synchronisations."""

from __future__ import annotations

from collections.abc import Mapping

from zeroresize.layers.balanced_linear import BalancedLinear


def work_of_layers(layers: Mapping[str, BalancedLinear]) -> dict[str, float]:
    """What every layer's products take on this rank, relative to each other: the size of its weight."""
    return {name: float(layer.local_weight.numel()) for name, layer in layers.items()}


def segments_of_layers(layers: Mapping[str, BalancedLinear]) -> list[list[str]]:
    """Names of the layers between two synchronisations: ranks meet after row-parallel ones.

    Args:
        layers: by name, in the order in which the model registers them, which is taken for that of computing.
    """
    segments: list[list[str]] = []
    has_ended = True
    for name, layer in layers.items():
        if (has_ended and layer.is_column_parallel) or not segments:
            segments.append([])
        segments[-1].append(name)
        has_ended = not layer.is_column_parallel
    return segments
