"""How well zr.watch sees slow ranks, and what it costs: OMP_NUM_THREADS=1 python -m scripts.bench.watching

``find``: a model under DDP on real ranks, of which one is slow for a while, again and again: by its products, its data
loader, or its host (a module that is no product). Of the products, χ is how many times as long they take; of the other
two, how many times as long the rank's whole step takes. With ``--work sleeping`` all parts of a step sleep for known
times, so that more ranks than cores are no matter. With ``--work virtual`` a clock that only they move tells the times,
with noise that is drawn, so that other work on the machine is no matter either. With ``--work computing`` products are
real ones. ``still``: the same without any slow rank. ``cost``: steps with and without a watch in turn, and without in
turn with without.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroresize as zr
from scripts.bench.sleeping import sleep_beside
from zeroresize.injection import SlowOps
from zeroresize.measure import clocks

CAUSES = ("products", "loader", "host")
#: What a watch calls them.
_CAUSE_OF = {"products": "products", "loader": "loader", "host": "rest"}
_WARM_UP = 200


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


@dataclass
class Spell:
    """What became of one time in which a rank was slow."""

    cause: str
    chi: float
    told_after: int | None = None  # steps
    told_cause: str = ""
    told_times: float = 1.0
    ended_after: int | None = None
    false_alarms: int = 0


def find(rank: int, arguments: argparse.Namespace, results: Any) -> None:
    training = Training(arguments)
    watch = zr.watch(training.model, training.optimizer, update_every=arguments.update_every)
    for _ in range(_WARM_UP):
        training.step()
    training.pace.step_s = statistics.median(watch.report().busy_s)
    draw = np.random.default_rng(arguments.seed)
    plan = [(cause, chi) for cause in arguments.causes for chi in arguments.chi for _ in range(arguments.repeats)]
    for at in draw.permutation(len(plan)):
        (cause, chi), victim = plan[at], int(draw.integers(dist.get_world_size()))
        spell = run_spell(training, watch, Spell(cause, chi), victim, arguments, draw)
        if rank == 0:
            results.put(spell)
    watch.close()


def run_spell(
    training: Training,
    watch: zr.Watch,
    spell: Spell,
    victim: int,
    arguments: argparse.Namespace,
    draw: np.random.Generator,
) -> Spell:
    """Train for a while with nobody slow, with ``victim`` slow, and again with nobody slow."""
    known = {slow.rank for slow in watch.report().slow}
    for phase, num_steps in (
        ("before", int(draw.integers(30, 50))),
        ("slow", arguments.slow),
        ("after", arguments.still),
    ):
        if phase == "slow" and dist.get_rank() == victim:
            training.slow(spell.cause, spell.chi)
        if phase == "after":
            training.slow("", 1.0)
        for step in range(num_steps):
            training.step()
            slow = {slow.rank: slow for slow in watch.report().slow}
            for new in set(slow) - known:
                if new == victim and phase == "slow":
                    spell.told_after = step + 1
                else:
                    spell.false_alarms += 1
            if victim in slow and phase == "slow" and spell.told_after is not None:
                spell.told_cause, spell.told_times = slow[victim].cause, slow[victim].times
            if victim in known - set(slow) and phase == "after":
                spell.ended_after = step + 1
            known = set(slow)
    return spell


def keep_still(rank: int, arguments: argparse.Namespace, results: Any) -> None:
    training = Training(arguments)
    watch = zr.watch(training.model, training.optimizer, update_every=arguments.update_every)
    num_alarms, known, least = 0, set[int](), 1.0
    seconds: list[float] = []
    for step in range(arguments.steps):
        began = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - began)
        slow = {slow.rank for slow in watch.report().slow}
        num_alarms += len(slow - known)
        known = slow
        if step > _WARM_UP and step % 10 == 0:
            least = min(least, *watch.scores)
    watch.close()
    if rank == 0:
        results.put((num_alarms, statistics.median(seconds), least))


def measure_cost(rank: int, arguments: argparse.Namespace, results: Any) -> None:
    training = Training(arguments)
    for _ in range(20):
        training.step()

    def block(is_watched: bool) -> tuple[float, float]:
        watch = None
        if is_watched:
            watch = zr.watch(training.model, training.optimizer, update_every=arguments.update_every)
        training.step()
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        for _ in range(arguments.block):
            training.step()
        elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        if watch is not None:
            watch.close()
        return elapsed_s / arguments.block, cpu_s / arguments.block

    for number in range(arguments.rounds):
        order = ["plain", "other", "watched"]
        order = order[number % 3 :] + order[: number % 3]
        measured = {name: block(name == "watched") for name in order}
        if rank == 0:
            results.put(tuple(measured[name] for name in ("plain", "other", "watched")))


def train(rank: int, num_ranks: int, arguments: argparse.Namespace, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    if arguments.work == "computing":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    if arguments.verbose and rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    else:
        logging.disable(logging.CRITICAL)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    {"find": find, "still": keep_still, "cost": measure_cost}[arguments.what](rank, arguments, results)
    dist.barrier()
    dist.destroy_process_group()


def collect(num_ranks: int, arguments: argparse.Namespace, num_results: int) -> list[Any]:
    """Start the ranks and return what rank 0 tells."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=train, args=(rank, num_ranks, arguments, f"{folder}/store", results))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        collected = [results.get(timeout=1800) for _ in range(num_results)]
        for process in ranks:
            process.join()
    return collected


def show_spells(spells: Sequence[Spell], num_ranks: int) -> Table:
    table = Table(
        "cause", "χ", "told", "after steps", "told as", "times told", "right cause", "end told after", "false alarms",
        title=f"{num_ranks} ranks",
    )  # fmt: skip
    for cause, chi in sorted({(spell.cause, spell.chi) for spell in spells}):
        alike = [spell for spell in spells if (spell.cause, spell.chi) == (cause, chi)]
        noticed = [spell for spell in alike if spell.told_after is not None]
        ended = [spell.ended_after for spell in noticed if spell.ended_after is not None]
        right = sum(spell.told_cause == _CAUSE_OF[spell.cause] for spell in noticed)
        table.add_row(
            cause,
            f"{chi:g}",
            f"{len(noticed)} of {len(alike)}",
            _median_and_most([spell.told_after for spell in noticed]),
            ", ".join(sorted({spell.told_cause for spell in noticed})),
            _median_and_most([spell.told_times for spell in noticed]),
            f"{right} of {len(noticed)}",
            _median_and_most(ended),
            str(sum(spell.false_alarms for spell in alike)),
        )
    return table


def _median_and_most(values: Sequence[Any]) -> str:
    return f"{statistics.median(values):.3g} ({max(values):.3g})" if values else ""


def show_cost(rounds: Sequence[Any], console: Console) -> None:
    draw = np.random.default_rng(0)
    plain, other, watched = (np.array(column) for column in zip(*rounds, strict=True))  # each [rounds, 2]
    for name, values in (("without a watch, again", other), ("with a watch", watched)):
        for kind, of_kind, base in zip(("wall", "CPU"), values.T, plain.T, strict=True):
            ratios = of_kind / base
            samples = [np.median(draw.choice(ratios, len(ratios))) for _ in range(2000)]
            low, high = np.percentile(samples, [2.5, 97.5])
            console.print(
                f"{name}, {kind} time: {np.median(ratios):.4f} [{low:.4f}, {high:.4f}] of a step without, "
                f"{1e6 * np.median(of_kind - base):+.0f} µs of {1e3 * np.median(base):.2f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("find", "still", "cost"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--work", choices=("sleeping", "virtual", "computing"), default="sleeping")
    parser.add_argument("--noise", type=float, default=0.02, help="of virtual steps, relative")
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=list(CAUSES))
    parser.add_argument("--chi", type=float, nargs="+", default=[1.05, 1.1, 1.25, 1.5, 2.0, 4.0])
    parser.add_argument("--repeats", type=int, default=2, help="spells of each cause and χ")
    parser.add_argument("--slow", type=int, default=150, help="steps of a spell")
    parser.add_argument("--still", type=int, default=100, help="steps after it")
    parser.add_argument("--steps", type=int, default=5000, help="of `still`")
    parser.add_argument("--rounds", type=int, default=60, help="of `cost`")
    parser.add_argument("--block", type=int, default=50, help="steps of a block of `cost`")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--update-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="show what the watch logs")
    arguments = parser.parse_args()
    console = Console(width=150)
    for num_ranks in arguments.ranks:
        if arguments.what == "find":
            number = len(arguments.causes) * len(arguments.chi) * arguments.repeats
            console.print(show_spells(collect(num_ranks, arguments, number), num_ranks))
        elif arguments.what == "still":
            ((num_alarms, step_s, least),) = collect(num_ranks, arguments, 1)
            console.print(
                f"{num_ranks} ranks, {arguments.steps} steps of {1e3 * step_s:.2f} ms: {num_alarms} alarms, "
                f"least score {least:.3f}"
            )
        else:
            console.print(f"{num_ranks} ranks, {arguments.rounds} rounds of blocks of {arguments.block} steps")
            show_cost(collect(num_ranks, arguments, arguments.rounds), console)


if __name__ == "__main__":
    main()
