"""Copies of a ViT under Colossal-AI that train in the same processes, each balanced by a configuration of its own."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

import zeroresize as zr
from scripts.bench.common import gather_from_ranks
from vit_examples.config import RunConfig
from vit_examples.host_colossalai import ColossalAIHost
from vit_examples.model import classification_loss
from zeroresize.conversion import balanced_layers
from zeroresize.injection.delay import CpuDelay
from zeroresize.injection.slow_layers import SlowLayers

#: What this rank does of its products, of each step.
SHARES = ("pruned", "lent", "owned")


class Copy:
    """A model in training under one configuration, always on the same batch.

    Attributes:
        shares: [steps][3] of this rank, as SHARES, in the steps of the last windows.
        predicted_s: of the plan then in force.
    """

    def __init__(self, config: RunConfig) -> None:
        self.host, size, labels = ColossalAIHost(config), config.model.image_size, config.model.num_labels
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn((config.training.batch_size, 3, size, size), generator=generator)
        self.labels = torch.randint(labels, (config.training.batch_size,), generator=generator)
        self.num_labels, self.shares, self.predicted_s = labels, list[list[float]](), 0.0
        model, group = self.host.model, self.host.tp_group
        zr.convert(model, process_group=group)
        self.balancer = zr.Balancer(model, self.host.optimizer, process_group=group, config=config.balance)
        self.slowness = _slowness_of(model)

    def step(self) -> None:
        logits = self.host.forward(self.images.to(self.host.device))
        labels = self.labels.to(self.host.device)
        self.host.backward(classification_loss(logits, labels, self.num_labels))
        self.host.step()
        self.balancer.step()

    def window(self, num_steps: int) -> list[float]:
        """Seconds of some steps that all ranks begin together, after a step that is not counted."""
        self.step()
        seconds = []
        for _ in range(num_steps):
            self.predicted_s = self.balancer.plan.predicted_step_s
            dist.barrier()
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
            metrics = self.balancer.metrics()
            self.shares.append([metrics[f"balance/{name}_share"] for name in SHARES])
        return seconds

    def pinned(self, rank: int, ratio: float, num_steps: int) -> list[float]:
        """The same with a rank's ratio held; what was noted of the balancer's own plan stays."""
        shares, predicted_s = self.shares, self.predicted_s
        self.shares = []
        self.balancer.pin(rank, ratio)
        seconds = self.window(num_steps)
        self.balancer.release()
        self.shares, self.predicted_s = shares, predicted_s
        return seconds

    def updates(self, number: int) -> list[float]:
        """What the plan after each update spares the last rank."""
        spared = []
        for _ in range(number):
            for _ in range(self.balancer.config.update_every):
                self.step()
            plan = self.balancer.plan.ranks[-1]
            spared.append(1.0 - plan.owned * (1.0 - plan.spared))
        return spared

    def group_shares(self) -> dict[str, float]:
        """Shares of the group's products that are dropped, lent, and computed away from home; collective."""
        pruned, lent, owned = map(statistics.median, zip(*self.shares, strict=True))
        here = {"dropped": pruned * owned, "lent": lent * owned, "moved": max(owned - 1.0, 0.0)}
        return {name: statistics.fmean(gather_from_ranks(share)) for name, share in here.items()}


def _slowness_of(model: nn.Module) -> SlowLayers:
    """How slow a converted model's multiplications are made, once it is entered: sleeps after each of them.

    They are slowed by their CPU time, as ranks may share a core and would be held up the longer for having lost it.
    """
    layers = list(balanced_layers(model).values())
    return SlowLayers(layers, "gemm", CpuDelay(work_clock=time.thread_time))
