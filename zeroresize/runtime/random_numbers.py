"""Random numbers of a forward that depend on what is computed, not on which rank computes it or what it drew before.

Ranks of a tensor-parallel group hold copies of what is not divided, and must drop the same elements of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import torch

from zeroresize.utils.hashing import mixed


def seed_of(*numbers: int) -> int:
    """Return 64 bits of a hash of these numbers, in this order."""
    return reduce(mixed, numbers, 0)


@contextmanager
def drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's generators of the CPU and of ``device`` from a seed of 64 bits; afterwards they are as before."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)
        if on_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
