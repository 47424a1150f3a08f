"""What layers hand to each other for inputs of any shape, found by running hollow copies of them on the meta device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence

import torch
from torch import nn

from zeroresize.pipeline.boundary_shapes import Boundary, boundary_of

#: Of so many different inputs what was found is kept.
_MOST_KEPT = 4096


class LayerShapes:
    """Finds the boundaries of a model for micro-batches of changing shapes; nothing is computed, nobody is asked.

    Args:
        layers: [L], whole, on any device; they stay as they are.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._hollow = _on_meta(layers)
        self._known: dict[Boundary, list[Boundary]] = {}

    def boundaries(self, inputs: Boundary) -> list[Boundary]:
        """Return [L + 1] the boundaries before each layer and behind the last one.

        Raises:
            ValueError: naming the layer that does not run on the meta device.
        """
        if inputs not in self._known:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            self._known[inputs] = self._boundaries(inputs)
        return self._known[inputs]

    def refresh(self) -> None:
        """Forget what was found, as layers were frozen or thawed."""
        self._known.clear()
        for layer, hollow in zip(self._layers, self._hollow, strict=True):
            for parameter, other in zip(layer.parameters(), hollow.parameters(), strict=True):
                other.requires_grad_(parameter.requires_grad)

    def _boundaries(self, inputs: Boundary) -> list[Boundary]:
        boundaries = [inputs]
        with torch.enable_grad():
            xs = tuple(each.example("meta") for each in inputs)
            for number, layer in enumerate(self._hollow):
                try:
                    outputs = layer(*xs)
                except Exception as error:
                    shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in xs)
                    raise ValueError(
                        f"layers.{number} ({type(layer).__name__}) does not run on the meta device, by which shapes of "
                        f"messages are found. It was called with ({shapes}) and raised {type(error).__name__}: "
                        f"{error}. torch's own schedules take such layers"
                    ) from error
                xs = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
                boundaries.append(boundary_of(xs))
        return boundaries


def _on_meta(layers: Sequence[nn.Module]) -> nn.ModuleList:
    memo: dict[int, object] = {}
    for tensor in itertools.chain.from_iterable((*layer.parameters(), *layer.buffers()) for layer in layers):
        if id(tensor) not in memo:
            hollow = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(hollow, tensor.requires_grad) if is_parameter else hollow
    return nn.ModuleList(copy.deepcopy(list(layers), memo))
