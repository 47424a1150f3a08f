"""Which segments are found in a model, and why other layers stay evenly divided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segment import OwnedSegment
from zeroresize.layers.segments import all_segments


def convert_and_find(
    model: nn.Module, group: ProcessGroup, named: Sequence[zr.Segment] = ()
) -> tuple[list[OwnedSegment], dict[str, str]]:
    """Convert ``model``; return its segments in order, and for every other layer, by name, why it stays even."""
    zr.convert(model, process_group=group, segments=named)
    layers = balanced_layers(model)
    staying_even = {name: layer.stays_even for name, layer in layers.items() if layer.stays_even is not None}
    return all_segments(layers), staying_even


def train_by_halves(width, model, optimizer, num_steps, clip, after=lambda step: None):
    """Steps of two micro-batches in float64, clipped; returns losses and norms."""
    values = []
    for step in range(num_steps):
        x = torch.randn(4, 3, width, generator=torch.Generator().manual_seed(step)).double()
        for part in x.chunk(2):
            loss = (model(part) - part).square().mean() / 2
            loss.backward()
            values.append(loss.item())
        values.append(clip(list(model.parameters()), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return values
