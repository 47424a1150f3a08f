"""What the benchmarks share: seconds of all ranks, intervals, a word on the machine, and the file of a result.

Ratios of things measured alternately in one run are what these machines can tell; absolute times move with their load.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import zeroresize as zr
from zeroresize.convert import balanced_layers
from zeroresize.injection.delay import Delays, HostDelay
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.policy.tensor.rules.bounds import work_conserving_bound_s


class TimedSteps(ABC):
    """Steps of training whose wall seconds are taken while all ranks make them together."""

    @abstractmethod
    def step(self) -> float:
        """Make a training step and return the loss."""

    def timed_step(self) -> float:
        """Return the wall seconds of a step that all ranks begin together."""
        dist.barrier()
        begin = time.perf_counter()
        self.step()
        return time.perf_counter() - begin

    def window(self, num_steps: int) -> list[float]:
        """Return the wall seconds of some steps after one that is not counted."""
        self.step()
        return [self.timed_step() for _ in range(num_steps)]


def pin_to_core() -> None:
    """Keep this rank, with all threads that it has by now, to a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})


def slowness_of(model: nn.Module) -> SlowLayers:
    """How slow a converted model's multiplications are made, once it is entered: sleeps after each of them.

    They are slowed by their CPU time, as ranks may share a core and would be held up the longer for having lost it.
    """
    layers = list(balanced_layers(model).values())
    return SlowLayers(layers, "gemm", Delays(HostDelay(work_clock=time.thread_time)))


def gather_from_ranks(value: float) -> list[float]:
    """Gather the value of each rank; collective."""
    everyone: list[float] = [math.nan] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def shortest_step_s(
    balancer: zr.Balancer, chis: Sequence[float], homogeneous_s: float, moving_rest: float = 0.0
) -> float:
    """T*, seconds: products are shared out by speed, and ``moving_rest`` of what else a rank is busy with moves along.

    Collective. What a rank takes is what those of χ = 1 took in the last interval; collectives cost nothing more.
    """
    metrics = balancer.metrics()
    busy_s, gemm_s = (
        statistics.fmean(
            seconds for seconds, chi in zip(gather_from_ranks(metrics[name]), chis, strict=True) if chi == 1
        )
        for name in ("balance/busy_s", "balance/gemm_s")
    )
    num_ranks = len(chis)
    least_s = work_conserving_bound_s(
        [busy_s - gemm_s] * num_ranks, [gemm_s * chi for chi in chis], [moving_rest] * num_ranks
    )
    return homogeneous_s - busy_s + least_s


def time_slowest_rank(call: Callable[[], object]) -> float:
    """Run ``call`` on all ranks from one moment on, and return the wall seconds of the slowest; collective."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def bootstrap_interval(
    ratios: Sequence[float],
    statistic: Callable[..., Any] = np.median,
    *,
    num_samples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median, or of another ``statistic``, of paired ratios."""
    values = np.asarray(ratios)
    draws = np.random.default_rng(0).integers(len(values), size=(num_samples, len(values)))
    low, high = np.quantile(statistic(values[draws], axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def interval_of_ratio(ones: Sequence[float], others: Sequence[float], num_samples: int = 10_000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of median(ones) / median(others), two samples that are not paired."""
    generator = np.random.default_rng(0)
    above, below = (
        np.median(generator.choice(values, (num_samples, len(values))), axis=1) for values in (ones, others)
    )
    low, high = np.quantile(above / below, [0.025, 0.975])
    return float(low), float(high)


def describe_ratio(name: str, ratios: Sequence[float]) -> str:
    low, high = bootstrap_interval(ratios)
    return (
        f"{name}: median ratio {statistics.median(ratios):.4f}, 95 % interval [{low:.4f}, {high:.4f}], n={len(ratios)}"
    )


def machine() -> dict[str, str]:
    """Where and when a figure was taken."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def save(name: str, result: dict[str, Any]) -> None:
    """Write a benchmark's result as JSON, for the tables of docs/benchmarks.md."""
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**machine(), **result}, indent=1), encoding="utf-8")
    print(f"written to {path}")
