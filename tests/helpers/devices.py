"""Ranks on GPUs: processes that are spawned, joined by NCCL, several on one GPU where there are fewer than ranks."""

from __future__ import annotations

from typing import Any

import torch

from scripts.bench.devices import join_ranks


def join_by_nccl(*, rank: int, world_size: int, **options: Any) -> None:
    """Take a device and join the other ranks."""
    join_ranks(rank, world_size, **options)


def device_here() -> torch.device:
    """The device of this rank: a CPU where there is no GPU, as when a check is tried by hand."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
