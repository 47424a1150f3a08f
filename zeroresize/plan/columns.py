"""Some columns of a matrix: neighbours are a view, others are gathered and scattered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Columns:
    """Hold the indices of some columns of a matrix; :meth:`at` makes one.

    Attributes:
        indices: [m], int64, on the matrices' device.
        neighbours: the same as a slice, where they are neighbours in ascending order.
    """

    indices: Tensor
    neighbours: slice | None

    @classmethod
    def at(cls, indices: Tensor, device: torch.device | str | None = None) -> Columns:
        """Return the columns of matrices on ``device`` (by default where ``indices`` are).

        What lies on a GPU already is waited for; indices on the CPU are sent there without waiting.
        """
        neighbours = _as_slice(indices.cpu())
        return cls(indices if device is None else indices.to(device, non_blocking=True), neighbours)

    def of(self, matrix: Tensor) -> Tensor:
        """Return these columns [rows, m], in their order; to be read only."""
        return matrix[:, self.neighbours] if self.neighbours is not None else matrix.index_select(1, self.indices)

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
