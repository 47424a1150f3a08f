"""One small vector of numbers a rank, exchanged while training goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zeroresize.collectives import Transfer
from zeroresize.cpu_group import CpuGroup


class Exchange:
    """All-gather of a vector: posted at one time, usually an update, and waited for at another, usually the next.

    It is waited for, never polled, so every rank sees the same table at the same update.

    Args:
        group: the ranks, on a CPU group of their own.
    """

    def __init__(self, group: CpuGroup) -> None:
        self._group = group
        self._work: Transfer | None = None
        self._parts: list[Tensor] = []

    def post(self, numbers: Sequence[float]) -> None:
        """Send this rank's numbers; all ranks must send equally many.

        Raises:
            RuntimeError: if the numbers posted before have not been collected.
        """
        if self._work is not None:
            raise RuntimeError("the last exchange has not been collected")
        own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._parts = [torch.empty_like(own) for _ in range(self._group.size)]
        self._work = self._group.start_all_gather(self._parts, own)

    def collect(self) -> list[list[float]] | None:
        """Every rank's numbers in the order of the group, or None if nothing was posted.

        Raises:
            RuntimeError: if not all ranks have posted within the time limit of their process group.
        """
        if self._work is None:
            return None
        work, self._work = self._work, None  # also where it fails: a state can be saved all the same
        work.wait()
        return [part.tolist() for part in self._parts]

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Every rank's numbers at once, in the order of the group; a rank may have fewer than others. Collective.

        Raises:
            RuntimeError: if not all ranks come within the time limit of their process group.
        """
        counts = [int(count) for count in self._gathered(torch.tensor([len(numbers)], device="cpu"))]
        padded = torch.zeros(max(counts), dtype=torch.float64, device="cpu")
        padded[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        return [part[:count].tolist() for part, count in zip(self._gathered(padded), counts, strict=True)]

    def require_agreement(self, agreement: Mapping[str, str]) -> None:
        """Compare values by name, with nothing under way; collective.

        Raises:
            ValueError: on every rank, if the ranks do not agree, naming what differs and where.
            RuntimeError: if not all ranks come.
        """
        self._group.require_agreement(agreement)

    def close(self) -> None:
        """Leave the group."""
        self._work = None
        self._group.close()

    def _gathered(self, own: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(own) for _ in range(self._group.size)]
        self._group.start_all_gather(parts, own).wait()
        return parts
