"""Measures what the layers of a model take for micro-batches of a grid of sizes and lengths (DynaPipe, section 3).

``L`` layers, ``A`` lengths of a sample. Layers of one class whose parameters have the same shapes are of one kind, and
measured once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroresize.measure.memory_meter import memory_meter
from zeroresize.policy.microbatches.grid_costs import LayerGrid, grid_points, powers_of_two
from zeroresize.policy.microbatches.stage_costs import HandedBytes
from zeroresize.runtime.activations import Batch, BatchOf, HandedOn, as_argument, as_tuple, find_activations
from zeroresize.runtime.counted_loss import Loss
from zeroresize.runtime.stage import RECOMPUTATIONS
from zeroresize.utils.hashing import digest
from zeroresize.utils.value_checks import at_least, one_of

#: Points that take longer are timed once only.
_LONG_S = 0.5
_REPETITIONS, _IN_A_ROW = 3, 3


@dataclass(frozen=True)
class ProfiledShapes:
    """Say for which micro-batches layers are measured.

    Attributes:
        names: of a micro-batch's sizes: the number of its rows first, then that of each length.
        most_rows: of a micro-batch; larger ones are extrapolated.
        longest: [A] tokens of the longest sample.
        shortest: tokens from which on lengths are measured.
        most_tokens: rows × tokens of a micro-batch; larger ones are never planned.

    Raises:
        ValueError: for numbers that are not allowed, naming them.
    """

    names: tuple[str, ...]
    most_rows: int
    longest: tuple[int, ...]
    shortest: int = 32
    most_tokens: float = math.inf

    def __post_init__(self) -> None:
        at_least("most_rows", self.most_rows, 1)
        at_least("shortest", self.shortest, 1)
        for length in self.longest:
            at_least("longest", length, 1)
        if len(self.names) != len(self.longest) + 1:
            raise ValueError(
                f"names={list(self.names)} and longest={list(self.longest)}: a name is needed for the rows and one for "
                "each length"
            )


def handed_by(activations: Sequence[HandedOn]) -> tuple[HandedBytes, ...]:
    """Return [L − 1] of which sizes the bytes are that layers hand on."""
    return tuple(
        tuple((activation.dtype.itemsize, *activation.dims) for activation in handed) for handed in activations
    )


def measure_layers(
    layers: Mapping[int, nn.Module],
    whole_layers: Sequence[nn.Module],
    batch_of: BatchOf,
    shapes: ProfiledShapes,
    *,
    loss: Loss,
    recomputations: Sequence[str],
    device: torch.device,
    slowest: Callable[[float], float] = float,
) -> tuple[dict[str, dict[str, LayerGrid]], list[HandedOn]]:
    """Return the grids of some layers' kinds, by what is computed again, and what layers hand on.

    See :func:`~zeroresize.microbatch.measured_table.measure_model`.

    Args:
        layers: to measure, by their numbers in the model. Ranks that divide them measure together.
        whole_layers: [L] the undivided model's, on any device: kinds and shapes are theirs.
        slowest: returns the most of the seconds that the ranks give that divide the layers, so that all repeat alike.
    """
    for recomputation in recomputations:
        one_of("recomputation", recomputation, RECOMPUTATIONS)
    activations = find_activations(whole_layers, batch_of, shapes.names)
    handed = [None, *activations, None]
    kinds = kinds_of(whole_layers)
    grids: dict[str, dict[str, LayerGrid]] = {recomputation: {} for recomputation in recomputations}
    for recomputation in recomputations:
        for number, layer in layers.items():
            if kinds[number] not in grids[recomputation]:
                around = handed[number], handed[number + 1]
                probe = LayerProbe(layer, around, batch_of, loss, recomputation, device, slowest)
                grids[recomputation][kinds[number]] = _grid_of(probe, _axes(around, shapes), shapes)
    return grids, activations


def kinds_of(whole_layers: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return [L] the kind of each layer: its class and the shapes of its parameters.

    The first and the last layer are kinds of their own: tokens come in, and the loss is computed.
    """
    places = ["", *([""] * (len(whole_layers) - 2)), ""]
    places[0], places[-1] = " first", " last"
    return tuple(
        f"{type(layer).__name__} {digest(repr([list(one.shape) for one in layer.parameters()])).hex()[:8]}{place}"
        for layer, place in zip(whole_layers, places, strict=True)
    )


def device_name(device: torch.device) -> str:
    """Return what a device is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _axes(around: tuple[HandedOn | None, HandedOn | None], shapes: ProfiledShapes) -> tuple[int, ...]:
    """Which lengths the layer sees: those that what it is given or returns follows."""
    seen = {dim for handed in around if handed is not None for activation in handed for dim in activation.dims}
    axes = tuple(axis for axis, name in enumerate(shapes.names[1:]) if name in seen)
    return axes or tuple(range(len(shapes.longest)))


def num_points(shapes: ProfiledShapes) -> int:
    """Return for how many shapes of micro-batches a layer that sees all lengths is measured."""
    rows, seen = grid_points(*_grid_axes(range(len(shapes.longest)), shapes))
    return sum(_is_measured(size, lengths, shapes) for size, lengths in zip(rows.tolist(), seen.tolist(), strict=True))


def _grid_axes(axes: Sequence[int], shapes: ProfiledShapes) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    sizes = powers_of_two(shapes.most_rows)
    return sizes, tuple(
        powers_of_two(shapes.longest[axis], min(shapes.shortest, shapes.longest[axis])) for axis in axes
    )


def _is_measured(rows: int, lengths: Sequence[int], shapes: ProfiledShapes) -> bool:
    return rows * sum(lengths) <= 2 * shapes.most_tokens  # values between need points beyond


def _grid_of(probe: LayerProbe, axes: tuple[int, ...], shapes: ProfiledShapes) -> LayerGrid:
    sizes, lengths = _grid_axes(axes, shapes)
    values = np.full((4, *(len(points) for points in (sizes, *lengths))), np.inf)
    flat = values.reshape(4, -1)
    for place, (rows, seen) in enumerate(zip(*grid_points(sizes, lengths), strict=True)):
        # Other lengths do not matter to the layer: short ones take least.
        of_batch = [min(shapes.shortest, longest) for longest in shapes.longest]
        for axis, length in zip(axes, seen.tolist(), strict=True):
            of_batch[axis] = length
        if _is_measured(int(rows), seen.tolist(), shapes):
            flat[:, place] = probe.measure(dict(zip(shapes.names, [int(rows), *of_batch], strict=True)))
    return LayerGrid(axes, sizes, lengths, *values)


class LayerProbe:
    """One layer, and what it is given."""

    def __init__(
        self,
        layer: nn.Module,
        around: tuple[HandedOn | None, HandedOn | None],
        batch_of: BatchOf,
        loss: Loss,
        recomputation: str,
        device: torch.device,
        slowest: Callable[[float], float] = float,
    ) -> None:
        self._slowest = slowest
        self._layer, self._batch_of, self._device = layer, batch_of, device
        self._handed, self._loss = around[0], None if around[1] is not None else loss
        self._recomputes, self._is_warm = recomputation == "layers", False
        for module in layer.modules():
            if hasattr(module, "recompute"):
                module.recompute = recomputation == "attention"  # type: ignore[assignment]

    def measure(self, sizes: Mapping[str, int]) -> list[float]:
        """Return seconds forward and backward, bytes kept and bytes of workspace; infinite where memory ends."""
        try:
            batch = self._batch_of(sizes)
            if not self._is_warm:  # libraries keep what they take at first
                self._bytes(sizes, batch)
                self._is_warm = True
            kept, workspace = self._bytes(sizes, batch)
            times = [self._seconds(sizes, batch)]
            if self._slowest(sum(times[0])) <= _LONG_S:
                times += [self._seconds(sizes, batch) for _ in range(_REPETITIONS - 1)]
        except (torch.cuda.OutOfMemoryError, MemoryError):
            self._drop()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            return [math.inf] * 4
        return [*(min(each) for each in zip(*times, strict=True)), kept, workspace]

    def _given(self, sizes: Mapping[str, int], batch: Batch) -> Any:
        if self._handed is None:
            return batch.inputs
        tensors = [activation.of(sizes).empty(self._device).normal_() for activation in self._handed]
        return as_argument(tuple(tensor.requires_grad_() for tensor in tensors))

    def _run(self, x: Any, batch: Batch) -> Any:
        y = checkpoint(self._layer, x, batch, use_reentrant=False) if self._recomputes else self._layer(x, batch)
        value = y if self._loss is None else self._loss(y, batch)
        return value if self._loss is None or not isinstance(value, tuple) else value[0]  # of (sum, count)

    def _seconds(self, sizes: Mapping[str, int], batch: Batch) -> tuple[float, float]:
        """Of runs one behind another, as in training: a device that is waited for each time would seem slower."""
        x = self._given(sizes, batch)
        begin = self._now()
        for _ in range(_IN_A_ROW):
            y = self._run(x, batch)
        forward_s = (self._now() - begin) / _IN_A_ROW
        del y
        begin = self._now()
        for _ in range(_IN_A_ROW):
            ys = [y for y in as_tuple(self._run(x, batch)) if y.requires_grad]
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        both_s = (self._now() - begin) / _IN_A_ROW
        return forward_s, max(both_s - forward_s, 0.0)

    def _bytes(self, sizes: Mapping[str, int], batch: Batch) -> tuple[float, float]:
        """What is kept, and what is needed besides, with gradients of parameters that are there already.

        What a layer is given counts as kept, what it returns as the next layer's, as between two layers it is one
        tensor; so what passes through counts where it ends.
        """
        for parameter in self._layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with memory_meter(self._device) as meter:
            x = self._given(sizes, batch)
            begin = meter.now() if self._handed is None else 0
            meter.forget_most()
            ys = [y for y in as_tuple(self._run(x, batch)) if y.requires_grad]
            handed = 0 if self._loss is not None else sum(y.nbytes for y in ys)
            kept = meter.now() - begin - handed
            gradients = [torch.ones_like(y) for y in ys]
            torch.autograd.backward(ys, gradients)
            most = meter.most() - begin
        return float(max(kept, 0)), float(max(most - kept, 0))

    def _drop(self) -> None:
        for parameter in self._layer.parameters():
            parameter.grad = None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
