"""A straggling stage of a pipeline, with and without balancing: torchrun --nproc-per-node 4 -m scripts.bench.pipeline

Sixteen layers sleep, so the figures are those of the schedule and of balancing, not of the machine: forward by their
work, backward twice as long, and on the straggling stage χ times as long as elsewhere. Their parameters tell their work
up to a factor. Static partitions, uniform and by parameters, are compared with a pipeline that begins with the uniform
one and is balanced; its last stage but one becomes slow after 10 steps, or none does (χ = 1). Bubble ratios are
measured: the share of stages' time in which none of their layers sleeps. Overhead is the share of the balanced run
beyond the usual step, the median under the same boundaries: profiles, exchanges, moves, and noise.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from scripts.bench.common import save
from scripts.bench.sleeping import sleep_beside
from zeroresize.pipeline import Pipeline, PipelineBalancer, RebalancingRecord
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad

FORWARD_S, MICRO, STEPS_BEFORE, STATIC_STEPS = 0.001, 8, 10, 12
#: Work of layers, mean 1, and their hidden widths.
WORK = (0.6, 0.8, 1.0, 1.0, 0.8, 1.0, 1.2, 1.0, 1.0, 1.2, 1.0, 0.8, 1.4, 1.0, 1.2, 1.0)
WIDTHS = (512, 192, 256, 256, 256, 192, 256, 256, 256, 256, 256, 256, 256, 256, 192, 512)


class SleepingLayer(nn.Module):
    """Two small products, and a sleep.

    Attributes:
        skewness: χ of this rank.
        slept_s: seconds so far.
    """

    def __init__(self, work: float, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16))
        self.work, self.skewness, self.slept_s = work, 1.0, 0.0

    def sleep(self, seconds: float) -> None:
        begin = time.perf_counter()
        time.sleep(seconds * self.work * self.skewness)
        self.slept_s += time.perf_counter() - begin

    def forward(self, x: Tensor) -> Tensor:
        return sleep_beside(x + self.inner(x), self.sleep, FORWARD_S)


class Run:
    """A pipeline that is trained; ``straggler`` is the stage that may become slow."""

    def __init__(self, boundaries: tuple[int, ...]) -> None:
        group = dist.group.WORLD
        assert group is not None
        layers = [SleepingLayer(work, width) for work, width in zip(WORK, WIDTHS, strict=True)]
        self.layers = layers
        self.pipeline = Pipeline(
            layers, nn.functional.mse_loss, num_microbatches=MICRO, process_group=group, boundaries=boundaries
        )
        self.optimizer = torch.optim.AdamW(self.pipeline.parameters())
        self.straggler = self.pipeline.num_stages - 2

    def slow_down(self, skewness: float) -> None:
        for layer in self.layers:
            layer.skewness = skewness if self.pipeline.stage == self.straggler else 1.0

    def step(self, balancer: PipelineBalancer | None = None) -> tuple[float, float]:
        """Seconds of a step, and its bubble ratio, of all stages."""
        x = torch.ones(2 * MICRO, 16)
        slept_s = sum(layer.slept_s for layer in self.layers)
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        if balancer is None:
            self.pipeline.step(x, target=x)
        else:
            with balancer.step():
                self.pipeline.step(x, target=x)
        self.optimizer.step()
        dist.barrier()
        seconds = time.perf_counter() - begin
        busy_s = torch.tensor(sum(layer.slept_s for layer in self.layers) - slept_s)
        dist.all_reduce(busy_s)
        return seconds, 1.0 - float(busy_s) / (self.pipeline.num_stages * seconds)


def static(boundaries: tuple[int, ...], skewness: float) -> dict[str, Any]:
    """Median step and bubble ratio."""
    run = Run(boundaries)
    run.slow_down(skewness)
    return _medians([run.step() for _ in range(STATIC_STEPS)][2:]) | {"boundaries": boundaries}


def balanced(skewness: float, profile_every: int) -> dict[str, Any]:
    """As :func:`static`, of the last steps; overhead and moves."""
    records: list[RebalancingRecord] = []
    run = Run(Partition.uniform(len(WORK), dist.get_world_size()).boundaries)
    balancer = PipelineBalancer(
        run.pipeline,
        run.optimizer,
        profile_every=profile_every,
        max_measuring=math.inf,
        on_change=records.append,
    )
    steps, kinds = [], []
    for number in range(STEPS_BEFORE + 2 * profile_every):
        if number == STEPS_BEFORE:
            run.slow_down(skewness)
        kinds.append((run.pipeline.boundaries, number < STEPS_BEFORE))
        steps.append(run.step(balancer))
    steps, kinds = steps[1:], kinds[1:]  # the first one finds shapes
    seconds_of = [
        [seconds for (seconds, _), own in zip(steps, kinds, strict=True) if own == kind] for kind in set(kinds)
    ]
    total_s = sum(map(sum, seconds_of))
    usual_s = sum(statistics.median(seconds) * len(seconds) for seconds in seconds_of)
    medians = _medians(steps[-profile_every // 2 :])
    return medians | {
        "boundaries": run.pipeline.boundaries,
        "overhead": 1.0 - usual_s / total_s,
        "moves": [record.to_dict() for record in records],
    }


def _medians(steps: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "step_s": statistics.median(seconds for seconds, _ in steps),
        "bubble_ratio": statistics.median(bubble for _, bubble in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skewness", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--profile-every", type=int, default=50)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    num_stages = dist.get_world_size()
    uniform = Partition.uniform(len(WORK), num_stages)
    by_parameters = balanced_partition(PipelineLoad.of([float(width) for width in WIDTHS], num_stages))
    rows = []
    for skewness in options.skewness:
        runs = {
            "uniform": static(uniform.boundaries, skewness),
            "by parameters": static(by_parameters.boundaries, skewness),
            "balanced": balanced(skewness, options.profile_every),
        }
        rows += [{"skewness": skewness, "partition": name} | one for name, one in runs.items()]
    if dist.get_rank() == 0:
        table = Table("χ", "partition", "layers", "step, ms", "bubbles, %", "overhead, %", "moves")
        for row in rows:
            table.add_row(
                f"{row['skewness']:g}",
                row["partition"],
                " ".join(map(str, Partition(row["boundaries"]).counts)),
                f"{1e3 * row['step_s']:.0f}",
                f"{100 * row['bubble_ratio']:.0f}",
                f"{100 * row['overhead']:.1f}" if "overhead" in row else "",
                str(len(row["moves"])) if "moves" in row else "",
            )
        Console().print(table)
        save(f"pipeline_{num_stages}_stages", {"num_stages": num_stages, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
