"""Layers that take known seconds, on a clock that only they move, and their undivided training."""

from __future__ import annotations

import math
import time
import types
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroresize.measure import clocks
from zeroresize.pipeline import Pipeline, PipelineBalancer, measuring, moving_layers
from zeroresize.resharding import transaction

MICRO = 4
FORWARD_S, BACKWARD_S = 0.003, 0.004


def clock_of(perf_counter, **others):
    """What stands in for the module ``time``, with the processor's time as it is."""
    return types.SimpleNamespace(perf_counter=perf_counter, thread_time=time.thread_time, **others)


@dataclass
class Pace:
    """How many times as long as usual a layer takes: on this rank, and by its number. The only clock of this rank."""

    of_rank: float = 1.0
    of_layers: dict = field(default_factory=dict)
    now_s: float = 0.0

    def keep_time(self):
        """What balancing measures from now on, it reads off this clock."""
        for module in (moving_layers, measuring, transaction, clocks):
            module.time = clock_of(lambda: self.now_s)

    def sleep(self, number, seconds):
        self.now_s += seconds * self.of_rank * self.of_layers.get(number, 1.0)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        layer.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.layer.sleep(BACKWARD_S)
        return dy.clone(), None


class Sleeping(nn.Module):
    def __init__(self, number, pace):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.number, self.pace = number, pace

    def sleep(self, seconds):
        if self.pace is not None:
            self.pace.sleep(self.number, seconds)

    def forward(self, x):
        return _Sleep.apply(torch.tanh(self.linear(x)), self)


def layers_of(num_layers, pace=None, tied=()):
    """Those of the numbers ``tied`` have one weight."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [Sleeping(number, pace) for number in range(num_layers)]
    for number in tied:
        layers[number].linear.weight = layers[tied[0]].linear.weight
    return layers


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 8, 4, dtype=torch.float64, generator=generator).unbind()


def undivided_losses(num_layers, num_steps, tied=()):
    model = nn.Sequential(*layers_of(num_layers, tied=tied))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        x, target = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Training:
    """A pipeline of sleeping layers, its balancer, and what both did; it ends where this rank is released."""

    def __init__(self, group, num_layers=8, boundaries=None, schedule="gpipe", tied=(), **options):
        self.pace, self.records, self.profiles, self.losses, self.step = Pace(), [], [], [], 0
        self.pace.keep_time()
        self.pipeline = Pipeline(
            layers_of(num_layers, self.pace, tied),
            nn.functional.mse_loss,
            num_microbatches=MICRO,
            process_group=group,
            boundaries=boundaries,
            schedule=schedule,
        )
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters(), lr=0.01)
        options = {"profile_every": 4, "max_measuring": math.inf, "on_change": self.records.append} | options
        self.balancer = PipelineBalancer(self.pipeline, self.optimizer, on_profile=self.profiles.append, **options)

    def batch(self):
        """Of this step, on this rank."""
        return batch(self.step)

    def reduce(self):
        """Gradients with the replicas' ones."""

    def train(self, num_steps):
        """The boundaries after so many steps."""
        for _ in range(num_steps):
            if self.pipeline.is_released:
                break
            x, target = self.batch()
            self.optimizer.zero_grad()
            with self.balancer.step():
                loss = self.pipeline.step(x, target=target)
            self.reduce()
            self.optimizer.step()
            self.losses += [] if loss is None else [loss.item()]
            self.step += 1
        return self.pipeline.boundaries
