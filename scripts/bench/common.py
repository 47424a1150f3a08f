"""What the benchmarks share: options, ranks, turns of variants side by side, intervals, tables, the file of a result.

Ratios of things measured alternately in one run are what these machines can tell; absolute times move with their load.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import math
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.table import Table
from torch import nn

import zeroresize as zr
from zeroresize.utils.console import plain_console
from zeroresize.utils.progress import Progress

_T = TypeVar("_T")
#: What is told of a program that takes long; :func:`in_turns` counts rounds.
progress = Progress(Path(sys.argv[0]).stem, is_shown=os.environ.get("RANK", "0") == "0")


def run(main: Callable[[], Any]) -> None:
    """Run a program, telling how far it is."""
    with progress:
        main()


def counted(items: Sequence[_T]) -> Iterator[_T]:
    """Yield items of a program, counting those that are done."""
    progress.total = len(items)
    for item in items:
        yield item
        progress.advance()


def parser_of(doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of options that are of their default's type: a list takes several values, False is a flag."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        flag, shown = f"--{name.replace('_', '-')}", f"(default: {default})"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, list):
            parser.add_argument(flag, nargs="+", type=type(default[0]), default=default, help=shown)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=shown)
    return parser


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table, however wide a line may be."""
    table = Table(*headings, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    plain_console(width=300).print(table)


def save(name: str, result: Mapping[str, Any]) -> None:
    """Write a benchmark's result as JSON under runs/bench, with where and when it was taken."""
    machine = {
        "date": datetime.date.today().isoformat(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    folder = Path("runs/bench")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**machine, **result}, indent=1), encoding="utf-8")
    print(f"written to {path}")


def join_ranks(*, rank: int, world_size: int, **options: Any) -> torch.device:
    """Take a device and join the other ranks by ``dist.init_process_group``, which is given the options, too.

    A GPU for each rank, or for several where there are fewer, joined by NCCL; else CPUs, by gloo. NCCL refuses two
    ranks of one node on one GPU. Ranks that share one name different nodes, so that they talk by sockets: slowly, but
    with all that NCCL does otherwise. What they compute takes turns on the GPU.

    Returns:
        This rank's device.
    """
    options |= {"rank": rank, "world_size": world_size}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **options)
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if world_size > num_devices:
        loopback = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
        os.environ |= {**loopback, "NCCL_HOSTID": f"rank {rank}", "NCCL_IB_DISABLE": "1"}
    torch.cuda.set_device(rank % num_devices)
    torch.cuda.init()  # else a mesh would choose another device
    dist.init_process_group("nccl", **options)
    return torch.device("cuda", torch.cuda.current_device())


def pin_to_core(rank: int | None = None) -> None:
    """Keep this rank, with all threads that it has by now, to a core of its own."""
    rank = int(os.environ["LOCAL_RANK"]) if rank is None else rank
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def keep_freed_memory() -> None:
    """Let glibc give no freed memory back: else temporaries of large weights are faulted in at each optimizer's step.

    A step of AdamW on a rank with 1.4 times the weights takes 2.4 times as long then, and 1.4 times with it.
    """
    if platform.libc_ver()[0] == "glibc":
        libc, mmap_threshold, trim_threshold = ctypes.CDLL(None), -3, -1
        libc.mallopt(mmap_threshold, 2**25)
        libc.mallopt(trim_threshold, 2**31 - 1)


def results_of_ranks(
    run: Callable[[int, Any, Callable[[Any], None]], None], num_ranks: int, arguments: Any, num_results: int
) -> list[Any]:
    """Start gloo ranks of one thread each that call ``run(rank, arguments, tell)``; returns what rank 0 tells."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(run, rank, num_ranks, arguments, f"{folder}/store", results))
            for rank in range(num_ranks)
        ]
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ranks inherit it: Ctrl-C is for this process alone
        for process in ranks:
            process.start()
        signal.signal(signal.SIGINT, handler)
        try:
            collected = [results.get(timeout=1800) for _ in range(num_results)]
            for process in ranks:
                process.join()
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return collected


def _rank(run: Any, rank: int, num_ranks: int, arguments: Any, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    run(rank, arguments, results.put if rank == 0 else lambda result: None)
    dist.barrier()
    dist.destroy_process_group()


def gather_from_ranks(value: float) -> list[float]:
    """Gather the value of each rank; collective."""
    everyone: list[float] = [math.nan] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


class FeedForward(nn.Module):
    """A norm, column-parallel, GELU and row-parallel, beside the residual stream."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, group = nn.LayerNorm(hidden), dist.group.WORLD
        self.up = zr.ColumnParallelLinear(hidden, 4 * hidden, process_group=group)
        self.down = zr.RowParallelLinear(4 * hidden, hidden, process_group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def time_slowest_rank(call: Callable[[], object]) -> float:
    """Run ``call`` on all ranks from one moment on, and return the wall seconds of the slowest; collective."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def in_turns(variants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What the variants return in each round; each comes first, second and so on equally often."""
    results: dict[str, list[Any]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        start = number % len(names)
        order = names[start:] + names[:start]
        for name in order[:: -1 if number // len(names) % 2 else 1]:
            results[name].append(variants[name]())
        progress.advance()
    return results


def bootstrap_interval(ratios: Sequence[float], num_samples: int = 10_000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the median of paired ratios."""
    values = np.asarray(ratios)
    draws = np.random.default_rng(0).integers(len(values), size=(num_samples, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), [0.025, 0.975])
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
