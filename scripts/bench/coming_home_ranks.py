"""Whether units come home on two real ranks: OMP_NUM_THREADS=1 python -m scripts.bench.coming_home_ranks

A small model of plain layers, one rank slowed by sleeps after its products (``--by sleeps``) or by processes that are
busy on its core (``--by processes``), from some steps before an update until some steps after its units have moved.
For every offset: in how many steps all units were home, and steps from then on as a ratio to those before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import nn

import zeroresize as zr
from vit_examples.contention import Contention
from zeroresize.injection import StragglerInjector

_WARM_UP, _MOST_WAITED, _WATCHED = 60, 100, 60


class Block(nn.Module):
    """Column-parallel, GELU, row-parallel, and what is between two of them."""

    def __init__(self, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = zr.ColumnParallelLinear.from_linear(nn.Linear(hidden, 4 * hidden), process_group=group)
        self.down = zr.RowParallelLinear.from_linear(nn.Linear(4 * hidden, hidden), process_group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def measure_offset(rank: int, arguments: argparse.Namespace, begins: int, ends: int) -> tuple[bool, int | None, float]:
    """(whether units moved, in how many steps all were home, steps from then on as a ratio to those before)."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(arguments.hidden, group) for _ in range(arguments.blocks)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = zr.BalanceConfig(update_every=arguments.update_every)
    zr.convert(model, process_group=group)
    balancer = zr.Balancer(model, optimizer, process_group=group, config=config)
    x = torch.randn(arguments.tokens, arguments.hidden)

    def timed_step() -> float:
        began = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        return time.perf_counter() - began

    injector = StragglerInjector(model, process_group=group, chi={}) if arguments.by == "sleeps" else None
    slowness = injector or Contention(core_index=group.rank())

    def set_slow(is_slow: bool) -> None:
        if injector is not None:
            injector.set_chi({1: arguments.chi} if is_slow else {})
        elif group.rank() == 1:
            slowness.chi = 1.0 + arguments.processes * is_slow

    has_moved, home_at = False, None
    seconds: list[float] = []
    with slowness:
        before = [timed_step() for _ in range(_WARM_UP + begins)][20:]
        set_slow(True)
        for _ in range(_MOST_WAITED):
            timed_step()
            has_moved = set(balancer.plan.owned) != {1.0}
            if has_moved:
                break
        for _ in range(ends):
            timed_step()
        set_slow(False)
        for step in range(_WATCHED):
            is_home = set(balancer.plan.owned) == {1.0}
            home_at = (step if home_at is None else home_at) if is_home else None
            seconds.append(timed_step())
    balancer.close()
    after = seconds[home_at:] if home_at is not None else seconds[-20:]
    return has_moved, home_at, statistics.median(after) / statistics.median(before)


def train(rank: int, arguments: argparse.Namespace, store: str, results: multiprocessing.Queue) -> None:
    """One rank: every offset with a model of its own."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for begins in arguments.begins:
        for ends in arguments.ends:
            measured = measure_offset(rank, arguments, begins, ends)
            dist.barrier()
            if rank == 0:
                results.put((begins, ends, *measured))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=("sleeps", "processes"), default="sleeps")
    parser.add_argument("--chi", type=float, default=3.0, help="of the sleeps")
    parser.add_argument("--processes", type=int, default=3, help="busy on the slow rank's core")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=520)
    parser.add_argument("--update-every", type=int, default=5)
    parser.add_argument("--begins", type=int, nargs="+", default=[0, 3], help="steps after an update")
    parser.add_argument("--ends", type=int, nargs="+", default=[0, 1, 2, 3, 5], help="steps after units have moved")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [context.Process(target=train, args=(rank, arguments, f"{folder}/store", results)) for rank in range(2)]
        for process in ranks:
            process.start()
        slowed = f"χ = {arguments.chi:g}" if arguments.by == "sleeps" else f"{arguments.processes} busy processes"
        table = Table("begins", "ends after the move", "moved", "home after steps", "step then / before", title=slowed)
        for _ in range(len(arguments.begins) * len(arguments.ends)):
            begins, ends, has_moved, home_at, ratio = results.get(timeout=600)
            home = "never" if home_at is None else str(home_at)
            table.add_row(str(begins), str(ends), str(has_moved), home, f"{ratio:.3f}")
            Console(stderr=True).print(f"begins {begins}, ends {ends}: moved {has_moved}, home {home}, {ratio:.3f}")
        for process in ranks:
            process.join()
    Console().print(table)


if __name__ == "__main__":
    main()
