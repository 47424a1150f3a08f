"""Measures what layers take for micro-batches of a grid of sizes and lengths, where they lie (DynaPipe, section 3).

``L`` layers, ``A`` lengths of a sample. Layers of one class whose parameters have the same shapes are of one kind, and
measured once, by each stage that has one.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroresize.comm.collectives import group_rank
from zeroresize.comm.exchange import Meet
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.measure.memory_meter import memory_meter
from zeroresize.policy.microbatches.costs import VALUES, CostTable, LayerGrid, grid_points, powers_of_two
from zeroresize.resharding.agreement import meet_over
from zeroresize.runtime.activations import Batch, BatchOf, HandedOn, as_argument, as_tuple, find_activations
from zeroresize.runtime.counted_loss import Loss
from zeroresize.runtime.stage import RECOMPUTATIONS, set_recomputation
from zeroresize.strategy.model import SwitchableModel
from zeroresize.utils.checked import checked, integer, real
from zeroresize.utils.codec import decoded, encoded
from zeroresize.utils.hashing import digest
from zeroresize.utils.progress import Progress
from zeroresize.utils.texts import duration_text
from zeroresize.utils.torch_state import seconds_when_done
from zeroresize.utils.value_checks import one_of

logger = logging.getLogger(__name__)

#: Points that take longer are timed once only.
_LONG_S = 0.5
_REPETITIONS, _IN_A_ROW = 3, 3


@checked(most_rows=integer(1), longest=integer(2), shortest=integer(1), most_tokens=real(above=0.0))
@dataclass(frozen=True)
class ProfiledShapes:
    """Say for which micro-batches layers are measured.

    Attributes:
        names: of a micro-batch's sizes: the number of its rows first, then that of each length.
        most_rows: of a micro-batch; larger ones are extrapolated.
        longest: [A] tokens of the longest sample, 2 at least; nothing longer is run.
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
        if len(self.names) != len(self.longest) + 1:
            raise ValueError(
                f"names={list(self.names)} and longest={list(self.longest)}: a name is needed for the rows and one for "
                "each length"
            )


@checked()
def measure_model(
    model: SwitchableModel,
    batch_of: BatchOf,
    shapes: ProfiledShapes,
    *,
    loss: Loss,
    recomputations: Sequence[str] = ("none", "layers"),
) -> CostTable:
    """Measure the layers under the strategy in force, and bring the stages' numbers together; collective.

    Ranks that divide a layer measure it together. Of a kind that several ranks have the slowest counts at each point,
    so that all ranks get the same table. That may take minutes: rank 0 logs when it begins, and how long it took.

    The fastest of three repetitions counts. Where memory does not hold a point, it is never planned. Gradients are
    dropped.

    Args:
        batch_of: a micro-batch of given sizes, by the names of ``shapes``, on the device that is the default, if that
            is meta, and on the model's device else.
        loss: of the last layer's output and its micro-batch, counted with the last layer.
        recomputations: of what is computed again in backwards; "attention" needs modules with an attribute
            ``recompute``.

    Raises:
        ValueError: for another recomputation, and as :func:`~zeroresize.runtime.activations.find_activations`.
    """
    begin, is_first = time.perf_counter(), group_rank(model.process_group) == 0
    if is_first:
        logger.info(
            "measuring costs of %d kinds of layers and %d ways of recomputation; keep them with table.save(path)",
            len(set(kinds_of(model.whole_layers))),
            len(recomputations),
        )
    for recomputation in recomputations:
        one_of("recomputation", recomputation, RECOMPUTATIONS)
    activations, kinds = find_activations(model.whole_layers, batch_of, shapes.names), kinds_of(model.whole_layers)
    meet, device = meet_over(model.groups_of(model.current).tp, model.device), model.device
    handed = [None, *activations, None]
    grids: dict[str, dict[str, LayerGrid]] = {recomputation: {} for recomputation in recomputations}
    layers = {} if model.position is None else {kinds[number]: number for number in reversed(model.stage_layers)}
    total = len(layers) * len(recomputations)
    with Progress("measuring costs: kinds of layers", total, tell=logger.info, is_shown=is_first) as progress:
        for recomputation in recomputations:
            for kind, number in layers.items():
                around = handed[number], handed[number + 1]
                probe = _LayerProbe(model.stage_layers[number], around, batch_of, loss, recomputation, device, meet)
                grids[recomputation][kind] = _grid_of(probe, _axes(around, shapes), shapes)
                progress.advance()
    share = Rendezvous(model.process_group, "measure costs of layers")
    for text in share.exchange("costs", json.dumps(encoded(grids))):
        for recomputation, by_kind in json.loads(text).items():
            for kind, value in by_kind.items():
                grid = decoded(LayerGrid, value, "grid")
                grids[recomputation][kind] = _slower(grids[recomputation].get(kind, grid), grid)
    model.drop_gradients()
    if is_first:
        logger.info("measured costs in %s", duration_text(time.perf_counter() - begin))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    bytes_of = tuple(tuple((each.dtype.itemsize, *each.dims) for each in tensors) for tensors in activations)
    return CostTable(kinds, shapes.names, grids, name, bytes_of)


def kinds_of(whole_layers: Sequence[nn.Module]) -> tuple[str, ...]:
    """Return [L] the kind of each layer: its class and the shapes of its parameters.

    The first and the last layer are kinds of their own: tokens come in, and the loss is computed.
    """
    places = [" first", *([""] * (len(whole_layers) - 2)), " last"]
    return tuple(
        f"{type(layer).__name__} {digest(repr([list(each.shape) for each in layer.parameters()])).hex()[:8]}{place}"
        for layer, place in zip(whole_layers, places, strict=True)
    )


def _slower(first: LayerGrid, other: LayerGrid) -> LayerGrid:
    values = [np.maximum(getattr(first, name), getattr(other, name)) for name in VALUES]
    return LayerGrid(first.axes, first.sizes, first.lengths, *values)


def _axes(around: tuple[HandedOn | None, HandedOn | None], shapes: ProfiledShapes) -> tuple[int, ...]:
    """Which lengths the layer sees: those that what it is given or returns follows."""
    seen = {dim for handed in around if handed is not None for activation in handed for dim in activation.dims}
    axes = tuple(axis for axis, name in enumerate(shapes.names[1:]) if name in seen)
    return axes or tuple(range(len(shapes.longest)))


def _lengths(shortest: int, longest: int) -> tuple[int, ...]:
    """From one to the other, each but the last twice the one before: a model may take nothing longer."""
    return (*(length for length in powers_of_two(longest, shortest) if length < longest), longest)


def _grid_of(probe: _LayerProbe, axes: tuple[int, ...], shapes: ProfiledShapes) -> LayerGrid:
    sizes = powers_of_two(shapes.most_rows)
    longest = [shapes.longest[axis] for axis in axes]
    lengths = tuple(_lengths(min(shapes.shortest, most - 1), most) for most in longest)
    values = np.full((4, *(len(points) for points in (sizes, *lengths))), np.inf)
    flat = values.reshape(4, -1)
    for place, (rows, seen) in enumerate(zip(*grid_points(sizes, lengths), strict=True)):
        if rows * seen.sum() <= 2 * shapes.most_tokens:  # values between need points beyond
            # Other lengths do not matter to the layer: short ones take least.
            of_batch = [min(shapes.shortest, most) for most in shapes.longest]
            for axis, length in zip(axes, seen.tolist(), strict=True):
                of_batch[axis] = length
            flat[:, place] = probe.measure(dict(zip(shapes.names, [int(rows), *of_batch], strict=True)))
    return LayerGrid(axes, sizes, lengths, *values)


class _LayerProbe:
    """One layer, and what it is given; the ranks that divide it ``meet``, so that all repeat alike."""

    def __init__(
        self,
        layer: nn.Module,
        around: tuple[HandedOn | None, HandedOn | None],
        batch_of: BatchOf,
        loss: Loss,
        recomputation: str,
        device: torch.device,
        meet: Meet,
    ) -> None:
        self._layer, self._batch_of, self._device, self._meet = layer, batch_of, device, meet
        self._handed, self._loss = around[0], None if around[1] is not None else loss
        self._recomputes, self._is_warm = set_recomputation([layer], recomputation), False

    def measure(self, sizes: Mapping[str, int]) -> list[float]:
        """Return seconds forward and backward, bytes kept and bytes of workspace; infinite where memory ends."""
        try:
            batch = self._batch_of(sizes)
            if not self._is_warm:  # libraries keep what they take at first
                self._bytes(sizes, batch)
                self._is_warm = True
            kept, workspace = self._bytes(sizes, batch)
            times = [self._seconds(sizes, batch)]
            if max(seconds for seconds, _ in self._meet(sum(times[0]), 0.0)) <= _LONG_S:
                times += [self._seconds(sizes, batch) for _ in range(_REPETITIONS - 1)]
        except (torch.cuda.OutOfMemoryError, MemoryError):
            self._layer.zero_grad(set_to_none=True)
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
        begin = seconds_when_done(self._device)
        for _ in range(_IN_A_ROW):
            y = self._run(x, batch)
        forward_s = (seconds_when_done(self._device) - begin) / _IN_A_ROW
        del y
        begin = seconds_when_done(self._device)
        for _ in range(_IN_A_ROW):
            ys = [y for y in as_tuple(self._run(x, batch)) if y.requires_grad]
            torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
        both_s = (seconds_when_done(self._device) - begin) / _IN_A_ROW
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
