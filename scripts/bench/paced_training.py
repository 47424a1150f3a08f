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
from torch.distributed.distributed_c10d import AllreduceOptions
from torch.nn.parallel import DistributedDataParallel

from zeroresize import watching
from zeroresize.injection import SlowOps
from zeroresize.measure import clocks, model_steps, waits

#: Seconds by which a clock that only a step's parts move goes on when it is read: listening to a step takes a
#: millisecond, about what it takes in a model of twelve layers by the real clock, so a watch listens to one of 32.
_READING_S = 5e-5


class _Pass(torch.autograd.Function):
    """y = x and dx = dy, after ``pass_s(seconds)`` in forward and ``pass_s(2 * seconds)`` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pass_s: Callable[[float], None], seconds: float) -> Tensor:
        ctx.pass_s, ctx.seconds = pass_s, seconds
        pass_s(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.pass_s(2 * ctx.seconds)
        return gradients[0].clone(), None, None


@dataclass
class Pace:
    """What this rank's step takes by a clock that only its parts move, and how they are slowed now.

    Attributes:
        product_s, host_s, loader_s, link_s: seconds of its parts; 0 where they compute.
        noise: standard deviation of the logarithm of a step's time.
        step_s: of the whole, without waits, when nobody is slow.
    """

    product_s: float
    host_s: float
    loader_s: float
    link_s: float
    noise: float
    draw: np.random.Generator
    now_s: float = 0.0
    factor: float = 1.0
    step_s: float = 0.0
    cause: str = ""
    chi: float = 1.0

    def read_clock(self) -> float:
        self.now_s += _READING_S
        return self.now_s

    def begin_step(self) -> None:
        """Draw how long this step takes; one of a hundred is interrupted for as long as ten."""
        self.factor = float(np.exp(self.draw.normal(0.0, self.noise))) * (10.0 if self.draw.random() < 0.01 else 1.0)

    def pass_product(self, seconds: float) -> None:
        self.now_s += seconds * (self.chi if self.cause == "products" else self.rows) * self.factor

    @property
    def rows(self) -> float:
        """How many times as long this rank's rows are."""
        return self.chi if self.cause == "rows" else 1.0

    def pass_other(self, cause: str, seconds: float) -> None:
        """Let a part pass that is no product, and what slows it; where parts compute, what slows it is slept."""
        more_s = (self.chi - 1.0) * self.step_s if self.cause == cause else 0.0
        if self.product_s:
            self.now_s += (seconds + more_s) * self.factor
        else:
            time.sleep(more_s)


class Product(nn.Linear):
    """A linear layer that takes as long as its pace says, if that says anything."""

    pace: Pace

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return _Pass.apply(y, self.pace.pass_product, self.pace.product_s) if self.pace.product_s else y


class Host(nn.Module):
    """What a model does besides products; the first one has what slows the host."""

    def __init__(self, pace: Pace, *, is_first: bool) -> None:
        super().__init__()
        self.pace, self.cause = pace, "host" if is_first else "nothing"

    def forward(self, x: Tensor) -> Tensor:
        self.pace.pass_other(self.cause, self.pace.rows * self.pace.host_s)
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
        is_virtual = arguments.work == "virtual"
        draw = np.random.default_rng((arguments.seed, dist.get_rank()))
        parts_s = (0.0015, 0.0005, 0.003, 0.001) if is_virtual else (0.0,) * 4
        self.pace = Pace(*parts_s, arguments.noise, draw)
        if is_virtual:
            read = self.pace.read_clock
            for module in (clocks, model_steps, waits, watching):
                module.time = types.SimpleNamespace(perf_counter=read, thread_time=read)  # type: ignore[attr-defined]
        self.model = DistributedDataParallel(make_model(arguments, self.pace))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(4 if is_virtual else arguments.tokens, arguments.hidden)
        firsts = range(0, dist.get_world_size(), 2)
        self.pair = [dist.new_group([first, first + 1]) for first in firsts][dist.get_rank() // 2]
        self._let_links_take_time()
        self.ops = None if is_virtual else SlowOps(scope="gemm")
        if self.ops is not None:
            self.ops.__enter__()

    def step(self) -> None:
        self.pace.begin_step()
        self.pace.pass_other("loader", self.pace.loader_s)
        x = self.x if self.pace.product_s else self.x.repeat(round(self.pace.rows), 1)
        self.model(x).square().mean().backward()
        dist.all_reduce(torch.zeros(1), group=self.pair)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def slow(self, cause: str, chi: float) -> None:
        self.pace.cause, self.pace.chi = cause, chi
        if self.ops is not None:
            self.ops.chi = chi if cause == "products" else 1.0

    def _let_links_take_time(self) -> None:
        """Let an all-reduce of a pair end for both when both have come, and their links are through."""
        reduce = dist.ProcessGroup.allreduce

        def allreduce(group: Any, *given: Any) -> Any:
            if group.group_name == self.pair.group_name:
                self.pace.pass_other("link", self.pace.link_s)
                now_s, options = torch.tensor(self.pace.now_s, dtype=torch.float64), AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                reduce(group, [now_s], options).wait()
                self.pace.now_s = now_s.item()
            return reduce(group, *given)

        dist.ProcessGroup.allreduce = allreduce  # type: ignore[method-assign]
