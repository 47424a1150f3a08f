"""Layers that take known seconds, on a clock that only they move, and their undivided training."""

from __future__ import annotations

import types
from dataclasses import dataclass, field

import torch
from torch import nn

from zeroresize.pipeline import moving_layers, profiling
from zeroresize.resharding import transaction

MICRO = 4
FORWARD_S, BACKWARD_S = 0.003, 0.004


@dataclass
class Pace:
    """How many times as long as usual a layer takes: on this rank, and by its number. The only clock of this rank."""

    of_rank: float = 1.0
    of_layers: dict = field(default_factory=dict)
    now_s: float = 0.0

    def keep_time(self):
        """What balancing measures from now on, it reads off this clock."""
        for module in (moving_layers, profiling, transaction):
            module.time = types.SimpleNamespace(perf_counter=lambda: self.now_s)

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


def layers_of(num_layers, pace=None):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [Sleeping(number, pace) for number in range(num_layers)]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 8, 4, dtype=torch.float64, generator=generator).unbind()


def undivided_losses(num_layers, num_steps):
    model = nn.Sequential(*layers_of(num_layers))
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
