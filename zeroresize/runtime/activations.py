"""What layers hand to each other for micro-batches of any size, found by running them on the meta device."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroresize.runtime.boundaries import TensorShape

#: What is found by runs of different sizes; no two are equal, so that a dimension tells which size it follows.
_SIZES = (5, 7, 11, 13, 17, 19, 23, 29)


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
    """Describes a tensor between two layers.

    Attributes:
        dims: of its shape: numbers, and names of the sizes of a micro-batch.
    """

    dims: tuple[int | str, ...]
    dtype: torch.dtype

    def of(self, sizes: Mapping[str, int]) -> TensorShape:
        """Return what it is for a micro-batch of these sizes."""
        return TensorShape(tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.dims), self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.dims))}]"


#: All that a layer hands to the next one.
HandedOn = tuple[Activation, ...]


def as_tuple(tensors: Tensors) -> tuple[Tensor, ...]:
    """Return what a layer returned as a tuple."""
    return tensors if isinstance(tensors, tuple) else (tensors,)


def as_argument(tensors: tuple[Tensor, ...]) -> Tensors:
    """Return what a layer is given: a single tensor by itself."""
    return tensors[0] if len(tensors) == 1 else tensors


def find_activations(layers: Sequence[nn.Module], batch_of: BatchOf, sizes: Sequence[str]) -> list[HandedOn]:
    """Return [L − 1] what layer l hands to layer l + 1; nothing is computed.

    Layers are run once with a micro-batch of small sizes, and once more for each size that is then another.

    Args:
        layers: [L], whole, on any device; they stay as they are.
        batch_of: is called with tensors on the meta device as default.
        sizes: their names.

    Raises:
        ValueError: naming the layer that does not run on the meta device, or returns anything but floating-point
            tensors whose dimensions are fixed or one of the sizes.
    """
    first = dict(zip(sizes, _SIZES, strict=False))
    others = [{**first, name: _SIZES[len(sizes)]} for name in sizes]
    with torch.device("meta"):
        batches = [batch_of(each) for each in (first, *others)]
    xs = [batch.inputs for batch in batches]
    activations: list[HandedOn] = []
    with torch.no_grad():
        for number, layer in enumerate(layers[:-1]):
            name, hollow = f"layer {number} ({type(layer).__name__})", _on_meta(layer)
            xs = [_called(name, hollow, x, batch) for x, batch in zip(xs, batches, strict=True)]
            activations.append(_followed(name, [as_tuple(x) for x in xs], [first, *others]))
    return activations


def _called(name: str, layer: nn.Module, x: Any, batch: Batch) -> Tensors:
    """Its output.

    Raises:
        ValueError: if there is none.
    """
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


def _followed(name: str, outputs: Sequence[tuple[Tensor, ...]], sizes: Sequence[Mapping[str, int]]) -> HandedOn:
    """What layers return as they follow sizes, of the first run and those that differ in one size each."""
    first, *others = outputs
    activations = []
    for place, tensor in enumerate(first):
        dims: list[int | str] = list(tensor.shape)
        for (size, of_run), output in zip(_changed(sizes), others, strict=True):
            other = output[place] if len(output) == len(first) else None
            shape = None if other is None or other.dtype != tensor.dtype or other.dim() != tensor.dim() else other.shape
            for number, dim in enumerate(tensor.shape):
                if shape is not None and shape[number] == dim:
                    continue
                if shape is None or dim != sizes[0][size] or shape[number] != of_run[size]:
                    raise ValueError(
                        f"{name} returns {_kind_of(as_argument(first))} for {_named(sizes[0])} and "
                        f"{_kind_of(as_argument(output))} for {_named(of_run)}: layers before the last one must return "
                        "as many tensors of the same types each time, whose dimensions are fixed or one of these sizes"
                    )
                dims[number] = size
        activations.append(Activation(tuple(dims), tensor.dtype))
    return tuple(activations)


def _changed(sizes: Sequence[Mapping[str, int]]) -> list[tuple[str, Mapping[str, int]]]:
    """The size that each run but the first differs in, and all of its sizes."""
    first, *others = sizes
    return [(next(name for name in first if other[name] != first[name]), other) for other in others]


def _named(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def _kind_of(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_kind_of, value))})"
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _on_meta(layer: nn.Module) -> nn.Module:
    memo: dict[int, object] = {}
    for tensor in itertools.chain(layer.parameters(), layer.buffers()):
        hollow = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(hollow, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else hollow
    return copy.deepcopy(layer, memo)
