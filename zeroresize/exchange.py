"""One small vector of numbers a rank, exchanged without anybody waiting for it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.collectives import destroy_group, exchange_group, group_size, start_all_gather


class Exchange:
    """All-gather of a vector on a CPU group of its own: posted at one update, waited for at the next.

    It is waited for, never polled, so every rank sees the same table at the same update. Making it is collective over
    ``process_group``.
    """

    def __init__(self, process_group: ProcessGroup) -> None:
        self._group = exchange_group(process_group)
        self._num_ranks = group_size(process_group)
        self._work: dist.Work | None = None
        self._parts: list[Tensor] = []
        # A process that ends with a gloo group alive can abort in its teardown; this also runs at exit.
        self.close = weakref.finalize(self, destroy_group, self._group)

    def post(self, numbers: Sequence[float]) -> None:
        """Send this rank's numbers; all ranks must send equally many.

        Raises:
            RuntimeError: if the numbers posted before have not been collected.
        """
        if self._work is not None:
            raise RuntimeError("the last exchange has not been collected")
        own = torch.tensor(numbers, dtype=torch.float64)
        self._parts = [torch.empty_like(own) for _ in range(self._num_ranks)]
        self._work = start_all_gather(self._parts, own, self._group)

    def collect(self) -> list[list[float]] | None:
        """Every rank's numbers in the order of the group, or None if nothing was posted."""
        if self._work is None:
            return None
        self._work.wait()
        self._work = None
        return [part.tolist() for part in self._parts]
