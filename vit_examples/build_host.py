"""Which host a run has, and what all its ranks must have before it starts."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from vit_examples.config import RunConfig
from vit_examples.host import Host

_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def build_host(config: RunConfig) -> Host:
    """The host that ``config`` names, joined with the other ranks.

    Raises:
        ValueError: if torchrun did not start this process, or the ranks cannot share the model.
    """
    require_torchrun()
    config.validate_group_size(int(os.environ["WORLD_SIZE"]))
    if config.training.precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("training.precision='fp16' needs a GPU: choose fp32 or bf16 on a CPU")
    if config.host == "colossalai":
        from vit_examples.host_colossalai import ColossalAIHost

        return ColossalAIHost(config)
    from vit_examples.host_torch import TorchHost

    return TorchHost(config)


def require_torchrun(program: str = "vit_examples.train --config demo") -> None:
    """Raises ValueError, saying how to start ``program``, where torchrun's environment is missing."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: training runs on several ranks, start it with "
            f"`torchrun --nproc-per-node 2 -m {program}` (or add --dry-run to check only)"
        )


def require_same_on_all_ranks(what: str, value: str) -> None:
    """Raises ValueError on every rank if they do not have the same; collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        detail = "; ".join(f"rank {rank}: {own}" for rank, own in enumerate(values))
        raise ValueError(f"the ranks do not agree on {what}: {detail}")
