"""Pruning to 90 % in a running job, on fewer and fewer ranks: torchrun --nproc-per-node 4 -m scripts.bench.repacking

Sixteen layers are pruned by the schedule of DynMo's Eq. (3), each keeping the units with the largest weights, and the
optimizer's state of these. They sleep by the share of units that they keep, and twice as long in backward, so seconds
are those of the schedule and of re-packing, not of the machine; bytes are real. Every rank may hold what one of
four stages of the dense model holds. The same training is run on all ranks to the end, and then by a balancer that
releases ranks as soon as the others have the memory and, with --max-slowdown, the seconds. Losses are compared with
those of the undivided model, which is trained on rank 0. The job ends with status 0 if every rank does.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from scripts.bench.common import save
from scripts.bench.sleeping import sleep_beside
from zeroresize.pipeline import LayerProfiler, Pipeline, PipelineBalancer, RebalancingRecord, Release, Repack
from zeroresize.resharding.parameter_state import replace_data

NUM_LAYERS, SIZE, UNITS, MICRO = 16, 16, 2048, 8
FORWARD_S = 0.001


class PrunedLayer(nn.Module):
    """x + wᵀ tanh(w x) with w [units, SIZE], of which pruning takes rows.

    Args:
        sleeps: whether it takes its time.
    """

    def __init__(self, sleeps: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(UNITS, SIZE, dtype=torch.float64) / UNITS**0.5)
        self.sleeps = sleeps

    def prune(self, kept_share: float, optimizer: torch.optim.Optimizer) -> None:
        """Keep the units with the largest weights, so many of all that there were."""
        weights = self.weight.detach()
        largest = weights.norm(dim=1).topk(round(kept_share * UNITS), sorted=False).indices.sort().values
        state = optimizer.state.get(self.weight, {})
        for key, value in state.items():
            state[key] = value[largest] if value.shape == weights.shape else value
        replace_data(self.weight, weights[largest], None)

    def forward(self, x: Tensor) -> Tensor:
        if self.sleeps:
            x = sleep_beside(x, time.sleep, FORWARD_S * len(self.weight) / UNITS)
        return x + torch.tanh(x @ self.weight.t()) @ self.weight


@dataclass(frozen=True)
class Schedule:
    """DynMo's Eq. (3): cubic, from 0 to ``final`` in ``num_prunings`` steps that are ``every`` apart."""

    num_prunings: int
    every: int
    final: float

    @property
    def num_steps(self) -> int:
        return (self.num_prunings + 2) * self.every

    def kept_after(self, step: int) -> float | None:
        """The share of weights that is kept from now on; None where nothing is pruned after this step, from 1."""
        number = step // self.every
        if step % self.every or not 1 <= number <= self.num_prunings:
            return None
        return 1.0 - self.final * (1.0 - (1.0 - number / self.num_prunings) ** 3)


@dataclass
class Run:
    """What was measured in each step; the same on every rank as long as it takes part.

    Attributes:
        losses, seconds, num_ranks: of each step.
        kept: share of units in each step.
        remaining: the job's ranks that take part in the end.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_ranks: list[int] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    remaining: list[int] = field(default_factory=list)


def layers_of(sleeps: bool) -> list[PrunedLayer]:
    torch.manual_seed(0)
    return [PrunedLayer(sleeps) for _ in range(NUM_LAYERS)]


def batch(step: int) -> Tensor:
    return torch.randn(MICRO, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def pipeline_of() -> tuple[Pipeline, torch.optim.Optimizer]:
    group = dist.group.WORLD
    assert group is not None
    pipeline = Pipeline(layers_of(True), nn.functional.mse_loss, num_microbatches=MICRO, process_group=group)
    return pipeline, torch.optim.AdamW(pipeline.parameters(), lr=1e-3)


def bytes_of_a_stage() -> float:
    """What a stage of the dense model holds, with activations of as many micro-batches as there are stages."""
    pipeline, optimizer = pipeline_of()
    for step in range(2):
        optimizer.zero_grad()
        with LayerProfiler(pipeline, optimizer) as profiler:
            pipeline.step(batch(step), target=batch(step + 1))
        optimizer.step()
    held = [
        layer.weight_bytes
        + layer.gradient_bytes
        + layer.optimizer_bytes
        + min(pipeline.num_stages, MICRO) * layer.activation_bytes
        for layer in profiler.gather().layers
    ]
    return sum(held) / pipeline.num_stages


def trained(schedule: Schedule, **options: Any) -> Run:
    """The run as far as this rank takes part, balanced with these options or not at all."""
    pipeline, optimizer = pipeline_of()
    balancer = PipelineBalancer(pipeline, optimizer, **options) if options else None
    run, kept = Run(), 1.0
    for step in range(1, schedule.num_steps + 1):
        dist.barrier(pipeline.process_group)
        begin = time.perf_counter()
        optimizer.zero_grad()
        with nullcontext() if balancer is None else balancer.step():
            loss = pipeline.step(batch(step), target=batch(step + 1))
            everyones_loss = torch.zeros((), dtype=torch.float64) if loss is None else loss
            dist.all_reduce(everyones_loss, group=pipeline.process_group)  # the rank that knows it may be released
        if pipeline.is_released:
            break
        optimizer.step()
        dist.barrier(pipeline.process_group)
        run.seconds.append(time.perf_counter() - begin)
        run.num_ranks.append(pipeline.num_stages)
        run.kept.append(kept)
        run.losses.append(everyones_loss.item())
        kept_now = schedule.kept_after(step)
        if kept_now is not None:
            kept = kept_now
            for number in pipeline.present:
                layer = pipeline.layers[number]
                assert isinstance(layer, PrunedLayer)
                layer.prune(kept, optimizer)
    if not pipeline.is_released:
        run.remaining = dist.get_process_group_ranks(pipeline.process_group)
    return run


def undivided_losses(schedule: Schedule) -> list[float]:
    layers = layers_of(False)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, schedule.num_steps + 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch(step)), batch(step + 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        kept = schedule.kept_after(step)
        for layer in layers if kept is not None else ():
            assert kept is not None
            layer.prune(kept, optimizer)
    return losses


def phases(run: Run) -> list[dict[str, Any]]:
    """One for each number of ranks and share of weights, in order; a step's seconds are the median."""
    seconds_of_phase: dict[tuple[int, float], list[float]] = {}
    for number, kept, seconds in zip(run.num_ranks[1:], run.kept[1:], run.seconds[1:], strict=True):
        seconds_of_phase.setdefault((number, kept), []).append(seconds)
    rows = []
    for (number, kept), seconds in seconds_of_phase.items():
        step_s = statistics.median(seconds)
        row = {"num_ranks": number, "pruned": 1.0 - kept, "num_steps": len(seconds), "step_s": step_s}
        rows.append(row | {"steps_per_second_and_rank": 1.0 / (step_s * number)})
    return rows


def num_ended(pids: list[int]) -> int:
    """How many of the processes have ended, after some seconds at most."""
    deadline = time.monotonic() + 20.0
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return sum(map(has_ended, pids))


def has_ended(pid: int) -> bool:
    """A process that its parent has not asked about yet has ended, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prunings", type=int, default=8)
    parser.add_argument("--every", type=int, default=20, help="steps between two of them")
    parser.add_argument("--final", type=float, default=0.9, help="share of weights that is pruned in the end")
    parser.add_argument("--profile-every", type=int, default=10)
    parser.add_argument("--least-stages", type=int, default=1)
    parser.add_argument("--max-slowdown", type=float, default=float("inf"), help="of a step, against the dense model's")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    schedule = Schedule(options.prunings, options.every, options.final)
    limit = 1.05 * bytes_of_a_stage()
    pids: list[int] = [0] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    static = trained(schedule)
    records: list[RebalancingRecord] = []
    releases: list[Release] = []
    repacked = trained(
        schedule,
        profile_every=options.profile_every,
        max_measuring=math.inf,
        memory_limits=[limit] * num_ranks,
        on_change=records.append,
        repack=Repack(options.least_stages, options.max_slowdown, [releases.append]),
    )
    dist.destroy_process_group()
    if releases:
        Console().print(f"rank {rank} is released after step {releases[0].step} and ends")
    if rank > 0:
        return
    expected = undivided_losses(schedule)
    errors = {
        name: max(abs(one - other) / abs(other) for one, other in zip(run.losses, expected, strict=True))
        for name, run in (("all ranks", static), ("re-packed", repacked))
    }
    rows = [
        {"run": name} | row for name, run in (("all ranks", static), ("re-packed", repacked)) for row in phases(run)
    ]
    table = Table("run", "pruned, %", "ranks", "steps", "step, ms", "steps / (s · rank)")
    for row in rows:
        table.add_row(
            row["run"],
            f"{100 * row['pruned']:.0f}",
            str(row["num_ranks"]),
            str(row["num_steps"]),
            f"{1e3 * row['step_s']:.0f}",
            f"{row['steps_per_second_and_rank']:.2f}",
        )
    console = Console()
    console.print(table)
    mean_ranks = statistics.fmean(repacked.num_ranks)
    differences = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    console.print(
        f"ranks on average: {mean_ranks:.2f} of {num_ranks}; largest relative difference of a loss: {differences}"
    )
    released = [pids[rank] for rank in range(num_ranks) if rank not in repacked.remaining]
    ended = num_ended(released)
    console.print(f"released ranks that have ended: {ended} of {len(released)}")
    result = {
        "options": vars(options),
        "memory_limit_bytes": limit,
        "rows": rows,
        "mean_ranks": mean_ranks,
        "losses": {"undivided": expected, "all ranks": static.losses, "re-packed": repacked.losses},
        "largest_relative_difference": errors,
        "num_released": len(released),
        "num_released_and_ended": ended,
        "changes": [record.to_dict() for record in records],
    }
    save(f"repacking_{num_ranks}_stages", result)


if __name__ == "__main__":
    main()
