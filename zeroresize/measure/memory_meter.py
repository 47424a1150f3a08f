"""Bytes of tensors on a device, now and at most: by the allocator of a GPU, else operation by operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from zeroresize.measure.live_bytes import LiveBytes


class MemoryMeter(Protocol):
    """Tells bytes since the meter was made."""

    def now(self) -> int:
        """Return the bytes that live now."""

    def most(self) -> int:
        """Return the most since :meth:`forget_most`."""

    def forget_most(self) -> None:
        """Begin anew with what lives now."""


@contextmanager
def memory_meter(device: torch.device) -> Iterator[MemoryMeter]:
    """Measure within a block what it allocates on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        yield _OfAllocator(device)
        return
    with LiveBytes() as live:
        yield _OfOperations(live)


class _OfAllocator:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before

    def forget_most(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _OfOperations:
    def __init__(self, live: LiveBytes) -> None:
        self._live = live

    def now(self) -> int:
        return self._live.now

    def most(self) -> int:
        return self._live.most

    def forget_most(self) -> None:
        self._live.forget_most()
