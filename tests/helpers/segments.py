"""Which segments are found in a model, and why other layers stay evenly divided."""

from __future__ import annotations

from collections.abc import Sequence

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
