"""``torch.autocast`` around steps whose weights change within."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def without_autocast(device: torch.device) -> torch.autocast:
    """Turn autocast off for a backward, which computes in the types of its forward."""
    return torch.autocast(device.type, enabled=False)


@contextmanager
def weights_cast_anew() -> Iterator[None]:
    """Make autocast forget what it has cast, before and after: an optimizer or a switch changes the weights."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
