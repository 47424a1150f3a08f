"""What-if against truth: OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m scripts.bench.what_if_truth

Copies of a GPT-like model, one a mode, train in the same processes; the last rank sleeps after its products. First the
copy in mode "off" trains until ``what_if()`` tells of units that would have moved, which is noted, as is what
``zeroresize whatif`` tells from torch.profiler's traces of that copy. Then every mode trains until its plan stays, and
all take turns. Compared are steps as ratios to those of mode "off", so that drift of the machine cancels; that of mode
"off" itself is compared in milliseconds, with the steps before the question.

Four ranks on two cores, and machines that others use, want ``--clock cpu`` (see ``cpu_clock``), without traces.
"""

from __future__ import annotations

import csv
import datetime
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import zeroresize as zr
from scripts.bench import common
from scripts.bench.cpu_clock import CpuClock
from zeroresize.commands.whatif import jobs_of, savings_of
from zeroresize.conversion import balanced_layers
from zeroresize.injection.delay import HostDelay
from zeroresize.injection.slow_layers import SlowLayers

MODES = ("exact", "semi", "mig", "zero-pri")
FIELDS = ("mode", "predicted", "measured", "low", "high", "error", "traces", "traces_error")


class Attention(nn.Module):
    """A norm and causal attention of as many heads as this rank owns, beside the residual stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm, group = nn.LayerNorm(hidden), dist.group.WORLD
        self.q, self.k, self.v = (zr.ColumnParallelLinear(hidden, hidden, process_group=group) for _ in range(3))
        self.out, self.head_size = zr.RowParallelLinear(hidden, hidden, process_group=group), hidden // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    @property
    def segment(self) -> zr.Segment:
        return zr.Segment(column=[self.q, self.k, self.v], row=self.out, unit_size=self.head_size, kind="heads")


@torch.library.custom_op("sleeping::gemm", mutates_args=())
def gemm(clock: torch.Tensor, seconds: float) -> None:
    """A sleep that profilers see as a part of a product."""
    time.sleep(seconds)


class Copy:
    """A model in training, balanced in a mode."""

    def __init__(self, options: Any, mode: str) -> None:
        torch.manual_seed(0)
        attentions = [Attention(options.hidden, options.heads) for _ in range(options.depth)]
        blocks = ((attention, common.FeedForward(options.hidden)) for attention in attentions)
        self.model = nn.Sequential(*chain.from_iterable(blocks))
        zr.convert(self.model, segments=[attention.segment for attention in attentions])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.slowness = SlowLayers(list(balanced_layers(self.model).values()), "gemm", options.delay())
        self.slowness.__enter__()
        config = zr.BalanceConfig(mode=mode, update_every=options.update_every)
        self.balancer, self.now = zr.Balancer(self.model, self.optimizer, config), options.now
        torch.manual_seed(1)
        self.x = torch.randn(options.batch, options.tokens, options.hidden)

    def steps(self, number: int, each: Any = lambda: None) -> list[float]:
        """Seconds of some steps."""
        seconds = []
        dist.barrier()
        for _ in range(number):
            began = self.now()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.balancer.step()
            seconds.append(self.now() - began)
            each()
        return seconds

    def settle(self, options: Any) -> None:
        """Train until the plan has stayed for some updates."""
        before, alike = None, 0
        for update in range(options.settle):
            self.steps(options.update_every)
            ranks = [(rank.pruned, rank.lent, rank.owned) for rank in self.balancer.plan.ranks]
            alike, before = alike + 1 if ranks == before else 0, ranks
            if alike == 4 and update >= options.settle // 2:
                return


def traced(copy: Copy) -> dict[str, float]:
    """What ``zeroresize whatif`` says that modes save of a step, from traces of steps of this copy; collective."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            copy.steps(8, profiler.step)
        profiler.export_chrome_trace(f"{folders[0]}/rank{dist.get_rank()}.json")
        dist.barrier()
        saved = savings_of(jobs_of(folders)[0])
        dist.barrier()
    return saved


def main() -> None:
    parser = common.parser_of(
        __doc__,
        **{"hidden": 640, "heads": 20, "depth": 1, "batch": 4, "tokens": 72, "chi": 2.0, "clock": "wall"},
        **{"update_every": 5, "settle": 12, "rounds": 10, "steps": 3, "out": "runs/bench/what_if.csv"},
    )
    options = parser.parse_args()
    common.join_ranks(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.set_num_threads(1)
    common.pin_to_core()
    common.keep_freed_memory()
    now, sleep = time.perf_counter, partial(gemm, torch.empty(0))
    if options.clock == "cpu":
        clock = CpuClock()
        clock.put_into("zeroresize")
        now, sleep = clock.now, clock.sleep
    options.now, options.delay = now, partial(HostDelay, clock=now, sleep=sleep)
    rows = compare(options, options.chi)
    if dist.get_rank() == 0:
        common.show("Steps, of those in mode off; of that itself ms", FIELDS, [list(row.values()) for row in rows])
        write(Path(options.out), options.chi, rows)
    dist.destroy_process_group()


def write(path: Path, chi: float, rows: list[dict[str, str]]) -> None:
    """Add rows to a table, each with where, when and by what they were measured."""
    ranks, machine = dist.get_world_size(), f"{platform.machine()}, {os.cpu_count()} cores"
    command = " ".join([f"torchrun --nproc-per-node {ranks} -m scripts.bench.what_if_truth", *sys.argv[1:]])
    known = dict(ranks=ranks, chi=chi, machine=machine, date=datetime.date.today().isoformat(), command=command)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*known, *FIELDS])
        if not file.tell():
            writer.writeheader()
        writer.writerows(known | row for row in rows)


def row_of(mode: str, predicted: float, measured: float, *others: float) -> dict[str, str]:
    """A mode's step as it was told and as it was, its interval, and what traces tell, where that is known."""
    low, high, traces = others or (math.nan,) * 3
    numbers = predicted, measured, low, high, predicted / measured - 1.0, traces, traces / measured - 1.0
    texts = ("" if math.isnan(number) else f"{number:.4g}" for number in numbers)
    return dict(zip(FIELDS, (mode, *texts), strict=True))


def compare(options: Any, chi: float) -> list[dict[str, str]]:
    """Predict the steps of all modes for a slow last rank, and measure them; collective."""
    num_ranks = dist.get_world_size()
    copies = {mode: Copy(options, mode) for mode in ("off", *MODES)}
    for copy in copies.values():
        copy.slowness.chi = chi if dist.get_rank() == num_ranks - 1 else 1.0
    off, seconds = copies["off"], list[float]()
    for _ in range(options.settle):
        seconds += off.steps(options.update_every)
        would = off.balancer.what_if()
        if all(would[mode]["owned"][-1] < 1.0 for mode in ("exact", "semi")):
            break
    off_s = off.balancer.plan.predicted_step_s
    saved = traced(off) if options.clock == "wall" else dict.fromkeys(MODES, math.nan)
    for mode in MODES:
        copies[mode].settle(options)
    turns = common.in_turns({mode: partial(copy.steps, options.steps) for mode, copy in copies.items()}, options.rounds)
    steps = {mode: list(chain.from_iterable(of_mode)) for mode, of_mode in turns.items()}
    usual = {mode: statistics.median(of_mode) for mode, of_mode in steps.items()}
    rows = [row_of("off", 1e3 * off_s, 1e3 * statistics.median(seconds[-4 * options.update_every :]))]
    for mode in MODES:
        predicted, measured = would[mode]["predicted_step_s"] / off_s, usual[mode] / usual["off"]
        interval = common.interval_of_ratio(steps[mode], steps["off"])
        rows.append(row_of(mode, predicted, measured, *interval, 1.0 - saved[mode]))
    for copy in copies.values():
        copy.balancer.close()
    return rows


if __name__ == "__main__":
    main()
