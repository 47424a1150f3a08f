"""Some columns of a matrix: neighbours are a view, others are gathered and scattered."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from zeroresize.plan import range_of


@dataclass(eq=False)
class Columns:
    """Indices [m], int64, on the matrices' device."""

    indices: Tensor
    _range: slice | None = field(init=False)

    def __post_init__(self) -> None:
        self._range = range_of(self.indices.cpu())

    def of(self, matrix: Tensor) -> Tensor:
        """These columns [rows, m], in their order; to be read only."""
        return matrix[:, self._range] if self._range is not None else matrix.index_select(1, self.indices)

    def copy_to(self, packed: Tensor, matrix: Tensor) -> None:
        """Fill ``packed`` [rows, m], contiguous, with these columns of ``matrix``."""
        packed.copy_(self.of(matrix))

    def put(self, matrix: Tensor, values: Tensor) -> None:
        """Overwrite these columns of ``matrix`` with ``values`` [rows, m]."""
        if self._range is not None:
            matrix[:, self._range] = values
        else:
            matrix.index_copy_(1, self.indices, values)

    def add(self, matrix: Tensor, values: Tensor) -> None:
        """Add ``values`` [rows, m] to these columns of ``matrix``."""
        if self._range is not None:
            matrix[:, self._range] += values
        else:
            matrix.index_add_(1, self.indices, values)
