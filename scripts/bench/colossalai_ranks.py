"""A ViT under Colossal-AI on the ranks that torchrun started, with and without balancing."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroresize as zr
from scripts.bench.common import TimedSteps, pin_to_core
from vit_examples.config import ModelConfig
from vit_examples.model import build_vit, classification_loss
from zeroresize.integrations.colossalai import prepare_accelerator

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin


@dataclass
class Trainer(TimedSteps):
    """A ViT under Colossal-AI with its optimizer and one fixed batch.

    Attributes:
        after_step: called after every optimizer step, such as ``balancer.step``.
    """

    booster: Booster
    model: nn.Module
    optimizer: Any
    images: Tensor
    labels: Tensor
    num_labels: int
    after_step: Callable[[], None] = lambda: None

    def step(self) -> float:
        """One training step; returns the loss."""
        loss = classification_loss(self.model(self.images).logits, self.labels, self.num_labels)
        self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()
        return loss.item()


class ColossalAIRanks:
    """The ranks that torchrun started, as one tensor-parallel group under Colossal-AI.

    Args:
        pin: keep each rank to a core of its own.
    """

    def __init__(self, *, pin: bool = True) -> None:
        prepare_accelerator()
        dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
        torch.set_num_threads(1)
        if pin:
            pin_to_core()
        self.plugin = HybridParallelPlugin(tp_size=dist.get_world_size(), pp_size=1, precision="fp32")
        self.group = self.plugin.tp_group
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def trainer(self, model: ModelConfig, *, batch_size: int, seed: int = 0, lr: float = 1e-4) -> Trainer:
        """A boosted model; equal arguments give equal weights and batches."""
        vit = build_vit(model, num_ranks=self.num_ranks, seed=seed)
        optimizer = torch.optim.AdamW(vit.parameters(), lr=lr)
        booster = Booster(plugin=self.plugin)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            boosted, boosted_optimizer, *_ = booster.boost(vit, optimizer)
        generator = torch.Generator().manual_seed(seed)
        size = (batch_size, model.num_channels, model.image_size, model.image_size)
        images = torch.randn(size, generator=generator)
        labels = torch.randint(model.num_labels, (batch_size,), generator=generator)
        return Trainer(booster, boosted, boosted_optimizer, images, labels, model.num_labels)

    def balance(self, trainer: Trainer, config: zr.BalanceConfig) -> zr.Balancer:
        """Convert a trainer's model; from now on its steps are balanced."""
        zr.convert(trainer.model, process_group=self.group)
        balancer = zr.Balancer(trainer.model, trainer.optimizer, process_group=self.group, config=config)
        trainer.after_step = balancer.step
        return balancer
