"""A host shards the model and steps it; the training loop sees this interface only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vit_examples.config import RunConfig
from vit_examples.harness.program import leave_together


class Host(ABC):
    """A sharded model with its optimizer; all ranks form one tensor-parallel group.

    Making a host is collective; the ranks have joined before, by :meth:`join`.

    Attributes:
        model: what ``forward`` runs; ``zeroresize.convert`` changes its layers in place.
        optimizer: AdamW over the parameters of this rank, perhaps wrapped by the host.
        tp_group: the tensor-parallel process group.
        device: where the model's parameters are.
    """

    model: nn.Module
    optimizer: Any
    tp_group: ProcessGroup
    device: torch.device

    @staticmethod
    @abstractmethod
    def join(config: RunConfig) -> None:
        """Join the other ranks, by what torchrun sets in the environment; collective."""

    @abstractmethod
    def __init__(self, config: RunConfig) -> None: ...

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

    def loss_scale(self) -> dict[str, float]:
        """The numbers of a dynamic loss scale, by name; empty where there is none."""
        return {}

    def set_loss_scale(self, scale: Mapping[str, float]) -> None:  # noqa: B027 - most hosts have none
        """Go on from :meth:`loss_scale`."""

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next step."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def close(self) -> None:
        """Leave the process groups once all ranks want to."""
        leave_together()


def host_class(config: RunConfig) -> type[Host]:
    """Return the class of the host that ``config`` names."""
    if config.training.precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("training.precision='fp16' needs a GPU: choose fp32 or bf16 on a CPU")
    if config.host == "colossalai":
        from vit_examples.host_colossalai import ColossalAIHost

        return ColossalAIHost
    from vit_examples.host_torch import TorchHost

    return TorchHost
