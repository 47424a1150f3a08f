"""A host shards the model and steps it; the training loop sees this interface only."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vit_examples.config import RunConfig

LEAVE_TOGETHER_S = 30.0
_TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Host(ABC):
    """A sharded model with its optimizer; all ranks form one tensor-parallel group.

    Making a host is collective and needs what torchrun sets in the environment.

    Attributes:
        name: as in ``--host``.
        model: what ``forward`` runs; ``zeroresize.convert`` changes its layers in place.
        optimizer: AdamW over the parameters of this rank, perhaps wrapped by the host.
        tp_group: the tensor-parallel process group.
        device: where the model's parameters are.
    """

    name: ClassVar[str]
    model: nn.Module
    optimizer: Any
    tp_group: ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def num_ranks(self) -> int:
        return dist.get_world_size()

    @abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, padded classes] of images [B, 3, H, W], whole on every rank."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` to those of earlier micro-batches."""

    @abstractmethod
    def step(self) -> None:
        """Clip where asked, step the optimizer, and drop the gradients."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write model and optimizer, sharded, into ``folder``; collective."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote under the same layout; collective."""

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def close(self) -> None:
        """Leave the process groups once all ranks want to: gloo may abort a rank whose peers left early.

        A rank that never comes is not waited for longer than ``LEAVE_TOGETHER_S`` seconds.
        """
        if dist.get_backend() == "gloo":
            with suppress(RuntimeError):  # unlike barrier(), it leaves nothing pending that the group's end waits for
                dist.monitored_barrier(timeout=timedelta(seconds=LEAVE_TOGETHER_S))
        dist.destroy_process_group()


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


def require_torchrun() -> None:
    """Raises ValueError, saying how to start, where torchrun's environment is missing."""
    missing = [name for name in _TORCHRUN_VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: training runs on several ranks, start it with "
            "`torchrun --nproc-per-node 2 -m vit_examples.train --config demo` (or add --dry-run to check only)"
        )


def require_same_on_all_ranks(what: str, value: str) -> None:
    """Raises ValueError on every rank if they do not have the same; collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    if len(set(values)) > 1:
        detail = "; ".join(f"rank {rank}: {own}" for rank, own in enumerate(values))
        raise ValueError(f"the ranks do not agree on {what}: {detail}")


def limit_collectives(process_group: ProcessGroup, timeout_s: float) -> None:
    """Let collectives of a group that was made without a timeout fail after ``timeout_s`` seconds.

    A rank that dies ends the job at once, through torchrun; the timeout is for one that hangs.
    """
    set_timeout = getattr(dist.distributed_c10d, "_set_pg_timeout", None)  # no public name in torch 2.2 to 2.13
    if set_timeout is not None:
        set_timeout(timedelta(seconds=timeout_s), process_group)
