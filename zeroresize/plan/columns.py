"""Some columns of a matrix: neighbours are a view, others are gathered and scattered."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: What a kernel gains by: each is a whole number of the widest loads.
_BLOCKS = (64, 32, 16)


@dataclass(frozen=True, eq=False)
class Columns:
    """Hold the indices of some columns of a matrix; :meth:`at` makes one.

    Attributes:
        indices: [m], int64, on the matrices' device.
        neighbours: the same as a slice, where they are neighbours in ascending order.
        block: the largest of 64, 32 and 16 of which they are whole blocks, each begun at a multiple of it; else 1.
    """

    indices: Tensor
    neighbours: slice | None
    block: int = 1

    @classmethod
    def at(cls, indices: Tensor, device: torch.device | str | None = None) -> Columns:
        """Return the columns of matrices on ``device`` (by default where ``indices`` are).

        What lies on a GPU already is waited for; indices on the CPU are sent there without waiting.
        """
        on_cpu = indices.cpu()
        placed = indices if device is None else indices.to(device, non_blocking=True)
        return cls(placed, _as_slice(on_cpu), next((size for size in _BLOCKS if _is_in_blocks(on_cpu, size)), 1))

    @cached_property
    def blocks(self) -> Tensor:
        """Return which blocks of :attr:`block` columns they are, [m / block], int64."""
        return self.indices[:: self.block] // self.block

    def of(self, matrix: Tensor) -> Tensor:
        """Return these columns [rows, m], in their order; to be read only."""
        if self.neighbours is not None:
            return matrix[:, self.neighbours]
        if self.block == 1 or not matrix.is_cpu:
            return matrix.index_select(1, self.indices)
        num_blocks = matrix.shape[1] // self.block
        blocks = matrix[:, : num_blocks * self.block].unflatten(1, (num_blocks, self.block))
        return blocks.index_select(1, self.blocks).flatten(1)  # on the CPU half the time of column by column, or less

    def copy_of(self, matrix: Tensor) -> Tensor:
        """Return these columns [rows, m], contiguous, in memory of their own."""
        return self.of(matrix).clone(memory_format=torch.contiguous_format)

    def put(self, matrix: Tensor, values: Tensor) -> None:
        """Overwrite these columns of ``matrix`` with ``values`` [rows, m]."""
        if self.neighbours is not None:
            matrix[:, self.neighbours] = values
        else:
            matrix.index_copy_(1, self.indices, values)

    def add(self, matrix: Tensor, values: Tensor) -> None:
        """Add ``values`` [rows, m] to these columns of ``matrix``."""
        if self.neighbours is not None:
            matrix[:, self.neighbours] += values
        else:
            matrix.index_add_(1, self.indices, values)


def _as_slice(indices: Tensor) -> slice | None:
    if not indices.numel() or not torch.equal(indices, torch.arange(indices.numel(), device="cpu") + indices[0]):
        return None
    return slice(int(indices[0]), int(indices[-1]) + 1)


def _is_in_blocks(indices: Tensor, size: int) -> bool:
    if not indices.numel() or indices.numel() % size:
        return False
    blocks, within = indices.reshape(-1, size), torch.arange(size, device="cpu")
    return not (blocks[:, 0] % size).any() and torch.equal(blocks, blocks[:, :1] + within)
