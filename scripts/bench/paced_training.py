"""DDP training whose steps take known seconds, or compute, on a rank that may be slow."""

from __future__ import annotations

import argparse
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zeroresize.injection import SlowOps
from zeroresize.measure import clocks


class _Sleep(torch.autograd.Function):
    """y = x and dx = dy, after ``sleep(seconds)`` in forward and ``sleep(2 * seconds)`` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Callable[[float], None], seconds: float) -> Tensor:
        ctx.sleep, ctx.seconds = sleep, seconds
        sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleep(2 * ctx.seconds)
        return gradients[0].clone(), None, None


def sleep_beside(x: Tensor, sleep: Callable[[float], None], seconds: float) -> Tensor:
    """Return ``x``, delayed: forward calls ``sleep(seconds)`` and backward ``sleep(2 * seconds)``."""
    return _Sleep.apply(x, sleep, seconds)  # type: ignore[no-any-return, no-untyped-call]


@dataclass
class Pace:
    """What this rank's step takes: seconds of its parts, and how they are slowed now."""

    product_s: float
    host_s: float
    loader_s: float
    is_virtual: bool = False
    noise: float = 0.0  # standard deviation of the logarithm of a step's time, if that is virtual
    draw: Any = None
    now_s: float = 0.0
    factor: float = 1.0
    step_s: float = 0.0  # of the whole, without waits, when nobody is slow
    cause: str = ""
    chi: float = 1.0

    def begin_step(self) -> None:
        """Draw how long this step takes; one of a hundred is interrupted for as long as ten."""
        if self.is_virtual:
            self.factor = float(np.exp(self.draw.normal(0.0, self.noise))) * (
                10.0 if self.draw.random() < 0.01 else 1.0
            )

    def let_pass(self, seconds: float) -> None:
        if self.is_virtual:
            self.now_s += seconds * self.factor
        else:
            time.sleep(seconds)

    def sleep_product(self, seconds: float) -> None:
        self.let_pass(seconds * (self.chi if self.cause == "products" else 1.0))

    def sleep_more(self, cause: str, seconds: float) -> None:
        """Sleep for a part that is no product, and for what slows it."""
        more_s = (self.chi - 1.0) * self.step_s if self.cause == cause else 0.0
        if seconds + more_s > 0.0:
            self.let_pass(seconds + more_s)


class Product(nn.Linear):
    """A linear layer that takes as long as its pace says, if that says anything."""

    pace: Pace

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return sleep_beside(y, self.pace.sleep_product, self.pace.product_s) if self.pace.product_s else y


class Host(nn.Module):
    """What a model does besides products; the first one has what slows the host."""

    def __init__(self, pace: Pace, *, is_first: bool) -> None:
        super().__init__()
        self.pace, self.cause = pace, "host" if is_first else "nothing"

    def forward(self, x: Tensor) -> Tensor:
        self.pace.sleep_more(self.cause, self.pace.host_s)
        return nn.functional.gelu(x)


def make_model(arguments: argparse.Namespace, pace: Pace) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(arguments.layers):
        product = Product(arguments.hidden, arguments.hidden)
        product.pace = pace
        layers += [product, Host(pace, is_first=number == 0)]
    return nn.Sequential(*layers)


class Training:
    """DDP training of one rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        sleeping = arguments.work != "computing"
        is_virtual = arguments.work == "virtual"
        self.pace = Pace(*((0.0015, 0.0005, 0.003) if sleeping else (0.0, 0.0, 0.0)), is_virtual, arguments.noise)
        self.pace.draw = np.random.default_rng((arguments.seed, dist.get_rank()))
        if is_virtual:
            clocks.time = types.SimpleNamespace(perf_counter=lambda: self.pace.now_s)  # type: ignore[attr-defined]
        self.model = DistributedDataParallel(make_model(arguments, self.pace))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(4 if sleeping else arguments.tokens, arguments.hidden)
        self.ops = SlowOps(scope="gemm") if not sleeping else None
        if self.ops is not None:
            self.ops.__enter__()

    def step(self) -> None:
        self.pace.begin_step()
        self.pace.sleep_more("loader", self.pace.loader_s)
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def slow(self, cause: str, chi: float) -> None:
        self.pace.cause, self.pace.chi = cause, chi
        if self.ops is not None:
            self.ops.chi = chi if cause == "products" else 1.0
