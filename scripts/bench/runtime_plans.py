"""Random plans of pipelines, proven and carried out: python -m scripts.bench.runtime_plans

Plans have 1 to 8 stages and 1 to 24 micro-batches whose seconds are log-normal, by GPipe, 1F1B or the adaptive schedule
with random limits of memory. All go through the check for deadlock, as do naive messages of the same orders: sent when
made, received when needed. Then some run for real, on 2 and 4 processes with gloo, micro-batches of random sizes, and
their gradients are compared with those of the undivided model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch import nn

from lm_examples.microbatches.blocks import ModelConfig, summed_loss
from lm_examples.microbatches.t5 import t5_layers
from scripts.bench.common import machine, save
from scripts.simulated.naive_messages import naive_instructions
from zeroresize.microbatch.padded import PairBatch
from zeroresize.plan.partition import Partition
from zeroresize.runtime.activations import find_activations
from zeroresize.runtime.adaptive_schedule import adaptive_orders
from zeroresize.runtime.check import DeadlockError, check
from zeroresize.runtime.communication import planned_instructions
from zeroresize.runtime.instructions import Instruction
from zeroresize.runtime.schedules import Order, orders_of
from zeroresize.runtime.stage import Stage

SCHEDULES = ("gpipe", "1f1b", "adaptive")
_COUNTED = ("plans", "of several stages", "naive ones that deadlock")
_SIZES = ("size", "source", "target")
#: Seconds after which a run counts as deadlocked.
_LIMIT_S = 60


def random_orders(schedule: str, shape: tuple[int, int], random: np.random.Generator) -> tuple[Any, list[Order]]:
    """Seconds [2, M, S] of a step, and its orders."""
    seconds = random.lognormal(0.0, 1.0, (2, *shape))
    if schedule == "adaptive":
        num_bytes = random.lognormal(0.0, 1.0, shape)
        return seconds, list(adaptive_orders(num_bytes, num_bytes.max(axis=0) * random.uniform(1.0, 5.0, shape[1])))
    return seconds, list(orders_of(schedule, shape[1], shape[0]))  # type: ignore[arg-type]


def proven(num_plans: int) -> dict[str, Counter[str]]:
    """How many plans of each schedule are free of deadlock, and how many naive ones are not."""
    random, counts = np.random.default_rng(0), {schedule: Counter[str]() for schedule in SCHEDULES}
    for number in range(num_plans):
        schedule = SCHEDULES[number % len(SCHEDULES)]
        shape = int(random.integers(1, 25)), int(random.integers(1, 9))
        (forward_s, backward_s), orders = random_orders(schedule, shape, random)
        check(planned_instructions(orders, forward_s, backward_s), shape[0])
        counts[schedule]["plans"] += 1
        if shape[1] > 1:
            counts[schedule]["of several stages"] += 1
            try:
                check(naive_instructions(orders), shape[0])
            except DeadlockError:
                counts[schedule]["naive ones that deadlock"] += 1
    return counts


def _layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(t5_layers(ModelConfig(kind="t5", num_blocks=2, hidden_size=16, num_heads=2))).double()


def _rank(rank: int, num_ranks: int, num_runs: int, path: str, errors: Any) -> None:
    torch.set_num_threads(1)
    store, limit = dist.FileStore(path, num_ranks), timedelta(seconds=_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    layers = _layers()
    boundaries = Partition.uniform(len(layers), num_ranks).boundaries
    begin, end = boundaries[rank], boundaries[rank + 1]
    activations = find_activations(layers, PairBatch.hollow, _SIZES)
    stage = Stage(list(layers[begin:end]), begin, activations, group, torch.device("cpu"))
    random = np.random.default_rng(num_ranks)
    for number in range(num_runs):
        shape = int(random.integers(1, 13)), num_ranks
        (forward_s, backward_s), orders = random_orders(SCHEDULES[number % len(SCHEDULES)], shape, random)
        stages = planned_instructions(orders, forward_s, backward_s)
        all_sizes = random.integers(1, 20, (shape[0], 3)).tolist()
        batches = [PairBatch.hollow(dict(zip(_SIZES, sizes, strict=True))) for sizes in all_sizes]
        errors[number] = max(errors[number], _error(stages[rank], stage, layers, batches, range(begin, end)))
    dist.destroy_process_group()


def _error(
    instructions: list[Instruction], stage: Stage, layers: nn.ModuleList, batches: list[PairBatch], numbers: range
) -> float:
    """Largest difference of a gradient from the undivided model's, relative to the largest gradient."""
    layers.zero_grad()
    for batch in batches:
        x: Any = batch.inputs
        for layer in layers:
            x = layer(x, batch)
        summed_loss(x, batch).backward()
    parameters = [parameter for number in numbers for parameter in layers[number].parameters()]
    wanted = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    layers.zero_grad()
    stage.train(instructions, batches, summed_loss)
    got = [parameter.grad for parameter in parameters if parameter.grad is not None]
    scale = max(float(gradient.abs().max()) for gradient in wanted)
    return max(float((first - other).abs().max()) for first, other in zip(wanted, got, strict=True)) / scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=100, help="half of them on 2 processes, half on 4")
    options = parser.parse_args()
    begin = time.perf_counter()
    counts = proven(options.plans)
    plans = Table("schedule", "plans, proven free of deadlock", *_COUNTED[1:])
    for schedule, of_schedule in counts.items():
        plans.add_row(schedule, *(str(of_schedule[key]) for key in _COUNTED))
    print(f"{options.plans} plans in {time.perf_counter() - begin:.0f} s", flush=True)
    runs = Table("processes", "runs", "deadlocks", "largest relative error of a gradient", "seconds")
    errors_of: dict[str, list[float]] = {}
    for num_ranks in (2, 4):
        errors = torch.multiprocessing.get_context("spawn").Array("d", options.runs // 2)
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "store")
            torch.multiprocessing.spawn(_rank, (num_ranks, options.runs // 2, path, errors), nprocs=num_ranks)
        errors_of[str(num_ranks)] = list(errors)
        seconds = time.perf_counter() - begin
        runs.add_row(str(num_ranks), str(len(errors)), "0", f"{max(errors):.1e}", f"{seconds:.0f}")
    Console(width=120).print(plans, runs)
    save("runtime_plans", {"machine": machine(), "plans": counts, "errors": errors_of})


if __name__ == "__main__":
    main()
