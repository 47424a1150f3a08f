"""Copies of a ViT under Colossal-AI that train in the same processes, each balanced by a configuration of its own."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import zeroresize as zr
from scripts.bench.common import gather_from_ranks
from vit_examples.config import RunConfig
from vit_examples.host_colossalai import ColossalAIHost
from vit_examples.model import classification_loss
from zeroresize.conversion import balanced_layers
from zeroresize.injection.delay import HostDelay
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.plan.ownership import SegmentWork, home_counts
from zeroresize.policy.tensor.rules.ownership import work_conserving_bound_s

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
    return SlowLayers(layers, "gemm", HostDelay(work_clock=time.thread_time))


def shortest_step_s(balancer: zr.Balancer, chis: Sequence[float], homogeneous_s: float) -> float:
    """T*, seconds: products are shared out by speed; collective.

    What a rank takes is what those of χ = 1 took in the last interval; collectives cost nothing more.
    """
    busy_s, gemm_s = _seconds_of(balancer, chis)
    rest_s = [busy_s - gemm_s] * len(chis)
    least_s = work_conserving_bound_s(rest_s, [gemm_s * chi for chi in chis], [0.0] * len(chis))
    return homogeneous_s - busy_s + least_s


def shortest_by_heads_s(
    balancer: zr.Balancer, chis: Sequence[float], homogeneous_s: float, heads: SegmentWork, update_s: float
) -> float:
    """The same where heads stay whole, the last rank alone being slow: the best of their divisions; collective.

    Ranks meet after each attention and after each feed-forward part, and products of copies count. Weights that a rank
    takes are updated there, which takes ``update_s`` at even shares. Sums of copies' gradients cost nothing.
    """
    _, gemm_s = _seconds_of(balancer, chis)
    others, by_home = len(chis) - 1, home_counts(heads.num_units, len(chis), heads.block)
    neurons = len(chis) / math.fsum(1.0 / chi for chi in chis)

    def least_s(taken: int) -> float:
        share, over = divmod(taken, others)
        counts = [count + share + (rank < over) for rank, count in enumerate(by_home[:-1])] + [by_home[-1] - taken]
        loads = heads.loads(counts)
        attention = max(chi * load for chi, load in zip(chis, loads, strict=True))
        products, weights = (heads.work * part + (1.0 - heads.work) * neurons for part in (attention, max(loads)))
        return gemm_s * (products - 1.0) + update_s * (weights - 1.0)

    return homogeneous_s + min(map(least_s, range(by_home[-1] + 1)))


def _seconds_of(balancer: zr.Balancer, chis: Sequence[float]) -> tuple[float, float]:
    """What a rank of χ = 1 was busy, and multiplied, in the last interval; collective."""
    metrics = balancer.metrics()
    busy_s, gemm_s = (
        statistics.fmean(
            seconds for seconds, chi in zip(gather_from_ranks(metrics[name]), chis, strict=True) if chi == 1
        )
        for name in ("balance/busy_s", "balance/gemm_s")
    )
    return busy_s, gemm_s
