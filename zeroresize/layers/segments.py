"""How much of a step's work lies in each layer, and between which synchronisations of the ranks."""

from __future__ import annotations

from collections.abc import Mapping

from zeroresize.layers.balanced_linear import BalancedLinear


def work_of_layers(layers: Mapping[str, BalancedLinear]) -> dict[str, float]:
    """Work of every layer's products on this rank, in relative units: the size of its weight."""
    return {name: float(layer.local_weight.numel()) for name, layer in layers.items()}


def segments_of_layers(layers: Mapping[str, BalancedLinear]) -> list[list[str]]:
    """Names of the layers between two synchronisations: ranks meet after row-parallel ones.

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
