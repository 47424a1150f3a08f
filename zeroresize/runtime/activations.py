"""What layers hand to each other: the tensors of a micro-batch between two layers, and how they follow its sizes."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorShape:
    """Describes a contiguous tensor of one micro-batch between two layers, and whether a gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """Make such a tensor, not initialized."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}{' with gradient' if self.requires_grad else ''}"


#: All tensors between two layers, before the first or behind the last one.
Boundary = tuple[TensorShape, ...]


def boundary_of(tensors: Sequence[Tensor]) -> Boundary:
    """Return what is known of these tensors, in their order."""
    return tuple(TensorShape(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors)


def message_bytes(boundary: Boundary) -> float:
    """Return the bytes of a micro-batch's message at a boundary, the mean of both directions."""
    return sum(tensor.num_bytes * (1 + tensor.requires_grad) for tensor in boundary) / 2


def to_text(boundaries: Sequence[Boundary]) -> str:
    """Return boundaries as a text for :func:`from_text`."""
    return json.dumps([[(one.shape, str(one.dtype)[6:], one.requires_grad) for one in each] for each in boundaries])


def from_text(text: str) -> list[Boundary]:
    """Return the boundaries of a text that :func:`to_text` has made."""
    return [
        tuple(TensorShape(tuple(shape), getattr(torch, dtype), requires_grad) for shape, dtype, requires_grad in each)
        for each in json.loads(text)
    ]


class Batch(Protocol):
    """A micro-batch, with which every layer is called: ``layer(x, batch)``.

    The first layer gets :attr:`inputs` for x, each other one what the layer before has returned.
    """

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the sizes that shapes of activations follow, by name, such as its tokens."""

    @property
    def inputs(self) -> Any:
        """Return x for the first layer."""


#: What a layer returns and the next one gets.
Tensors = Tensor | tuple[Tensor, ...]
#: Makes a micro-batch of given sizes.
BatchOf = Callable[[Mapping[str, int]], Batch]


@dataclass(frozen=True)
class Activation:
    """Describes a tensor between two layers, whose dimensions are numbers, and names of the sizes of a micro-batch."""

    dims: tuple[int | str, ...]
    dtype: torch.dtype

    def of(self, sizes: Mapping[str, int]) -> TensorShape:
        """Return what it is for a micro-batch of these sizes."""
        return TensorShape(tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.dims), self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.dims))}]"


#: All that a layer hands to the next one.
HandedOn = tuple[Activation, ...]

#: What is learned by runs of different sizes; no two are equal, so that a dimension tells which size it follows.
_SIZES = (5, 7, 11, 13, 17, 19, 23, 29)


def as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """Return what a layer returned as a tuple."""
    return tensors if isinstance(tensors, tuple) else (tensors,)


def as_argument(tensors: tuple[Tensor, ...]) -> Tensors:
    """Return what a layer is given: a single tensor by itself."""
    return tensors[0] if len(tensors) == 1 else tensors


def find_activations(layers: Sequence[nn.Module], batch_of: BatchOf, sizes: Sequence[str]) -> list[HandedOn]:
    """Return [L − 1] what layer l hands to layer l + 1; nothing is computed.

    Layers are run on the meta device, once with a micro-batch of small sizes, and once more for each size that is then
    another.

    Args:
        layers: [L], whole, on any device; they stay as they are.
        batch_of: is called with tensors on the meta device as default.
        sizes: their names.

    Raises:
        ValueError: naming the layer that does not run on the meta device, or returns anything but floating-point
            tensors whose dimensions are fixed or one of the sizes.
    """
    first = dict(zip(sizes, _SIZES, strict=False))
    runs = [first, *({**first, name: _SIZES[len(sizes)]} for name in sizes)]
    with torch.device("meta"):
        batches = [batch_of(each) for each in runs]
    xs = [batch.inputs for batch in batches]
    activations: list[HandedOn] = []
    with torch.no_grad():
        for number, layer in enumerate(layers[:-1]):
            name, hollow = f"layer {number} ({type(layer).__name__})", copied_on_meta(layer, torch.device("meta"))
            xs = [_called(name, hollow, x, batch) for x, batch in zip(xs, batches, strict=True)]
            activations.append(_followed(name, list(map(as_tuple, xs)), runs, sizes))
    return activations


def _called(name: str, layer: nn.Module, x: Any, batch: Batch) -> Tensors:
    """Its output."""
    try:
        output = layer(x, batch)
    except Exception as error:
        raise ValueError(
            f"{name} does not run on the meta device, by which the shapes of activations are found. It was called with "
            f"x = {_kind_of(x)} and {type(batch).__name__} of {_named(batch.sizes)}, as every layer of a pipeline is, "
            f"and raised {type(error).__name__}: {error}. A layer that takes other arguments, such as a decoder layer "
            "of transformers, needs a module around it that makes them from these two"
        ) from error
    tensors = output if isinstance(output, tuple) and output else (output,)
    if not all(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in tensors):
        raise ValueError(
            f"{name} returns {_kind_of(output)} for {_named(batch.sizes)}: layers before the last one must return a "
            "floating-point tensor, or a tuple of them"
        )
    return output


def _followed(
    name: str, outputs: Sequence[tuple[Tensor, ...]], runs: Sequence[Mapping[str, int]], sizes: Sequence[str]
) -> HandedOn:
    """What a layer returns as it follows sizes, of the first run and of those that differ in one size each."""
    first = outputs[0]
    dims: list[list[int | str]] = [list(tensor.shape) for tensor in first]
    for size, run, output in zip(sizes, runs[1:], outputs[1:], strict=True):
        is_alike = [(one.dtype, one.dim()) for one in output] == [(one.dtype, one.dim()) for one in first]
        for place, (tensor, other) in enumerate(zip(first, output, strict=False)):
            for number, (dim, there) in enumerate(zip(tensor.shape, other.shape, strict=False)):
                if (dim, there) == (runs[0][size], run[size]):
                    dims[place][number] = size
                elif dim != there:
                    is_alike = False
        if not is_alike:
            raise ValueError(
                f"{name} returns {_kind_of(as_argument(first))} for {_named(runs[0])} and "
                f"{_kind_of(as_argument(output))} for {_named(run)}: layers before the last one must return as many "
                "tensors of the same types each time, whose dimensions are fixed or one of these sizes"
            )
    return tuple(Activation(tuple(of_tensor), tensor.dtype) for of_tensor, tensor in zip(dims, first, strict=True))


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _kind_of(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind_of, value))})"
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def copied_on_meta(layer: nn.Module, buffers_on: torch.device) -> nn.Module:
    """Return a copy with parameters on meta, and buffers on a device: the same where they are there already."""
    memo: dict[int, object] = {
        id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
        for tensor in layer.parameters()
    }
    memo |= {id(buffer): buffer.to(buffers_on) for buffer in layer.buffers()}
    return copy.deepcopy(layer, memo)
