"""What is known of the tensors of a micro-batch between two layers: shapes, types, and whether gradients come back."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorShape:
    """Describes a contiguous tensor of one micro-batch between two layers.

    Attributes:
        shape: of the tensor.
        requires_grad: whether a gradient comes back.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
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
    """Return the bytes of a micro-batch's message at a boundary, the mean of both directions.

    All tensors travel forward, the gradients of those that have one back.
    """
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
