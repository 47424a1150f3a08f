"""A process whose memory runs out."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_LARGEST, _SMALLEST = 2**28, 2**20


@contextmanager
def memory_of_at_most(num_more_bytes: int) -> Iterator[None]:
    """Beside what it has now this process gets so many bytes.

    What earlier work has left free in its heap is taken first, down to pieces of 1 MB, so that it cannot serve.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        _limit(0, limits)
        kept = _all_that_is_free()
        _limit(num_more_bytes, limits)
        yield
        del kept
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _limit(num_more_bytes: int, limits: tuple[int, int]) -> None:
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmSize:"))
    resource.setrlimit(resource.RLIMIT_AS, (int(line.split()[1]) * 1024 + num_more_bytes, limits[1]))


def _all_that_is_free() -> list[torch.Tensor]:
    kept, size = [], _LARGEST
    while size >= _SMALLEST:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            size //= 2
    return kept
