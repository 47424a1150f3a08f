"""Balancing modes side by side: torchrun --nproc-per-node 2 -m scripts.bench.modes

Copies of a ViT under Colossal-AI, one a mode, train in the same processes and take turns in short windows, so that a
drift of the machine hits all alike; the last rank sleeps after each matrix multiplication. For each χ the closed loops
settle, then told are: the step as a ratio to the homogeneous one and to the work-conserving bound T* (which no exact
scheme that moves products can beat), what share of the group's products is moved, lent and dropped, and the step that
the plan in force predicts. With ``--ratios`` ZERO-Rd is also pinned to each of these. Before and after, traces tell in
how many updates the slow rank's plan settles, and is let go: what it spares the rank.

With ``--blocks 1 16`` there is a copy of each mode that prunes for each length of blocks, with ``--max-ratios`` for
each of these, and with ``--gathering`` another one of each whose products gather and scatter column by column.

``--kind contend`` makes the straggler by real competitors for its core (they slow everything, and --chi 2 and 4 mean 1
and 3 of them). Four ranks on two cores want ``--everyone 8``: ranks that share a core slow each other, and where one
sleeps its neighbour is fast, so all sleep seven times as long as they multiply, and χ comes on top of that.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist

import zeroresize as zr
from scripts.bench.balanced_copies import Copy
from scripts.bench.bounds import shortest_step_s
from scripts.bench.common import in_turns, interval_of_ratio, parser_of, pin_to_core, run, save, show
from scripts.bench.gathering import gathering
from vit_examples.config import ModelConfig, RunConfig, TrainingConfig
from vit_examples.contention import Contention
from vit_examples.host_colossalai import ColossalAIHost
from zeroresize.config.keys import PRUNING_MODES

MODES = ("exact", "mig", "zero-rd", "zero-pri", "zero-pridiff", "semi")


class GatheringCopy(Copy):
    """A copy whose products gather column by column."""

    def step(self) -> None:
        with gathering():
            super().step()


def _copies(options: Any) -> Iterator[tuple[str, dict[str, Any], type[Copy]]]:
    """Name, balance, and kind of each copy."""
    kinds = {"": Copy, ", gathering": GatheringCopy} if options.gathering else {"": Copy}
    for mode in ("off", *options.modes):
        if mode not in PRUNING_MODES:
            yield mode, {"mode": mode}, Copy
            continue
        for most, block, (how, kind) in product(options.max_ratios, options.blocks, kinds.items()):
            name = mode + (f", max_ratio {most:g}" if most != zr.BalanceConfig.max_ratio else "")
            name += f", block {block}" if block != 1 else ""
            yield name + how, {"mode": mode, "block": block, "max_ratio": most}, kind


class Bench:
    """A copy a mode, one in mode "off", and who is slow."""

    def __init__(self, options: Any, stack: ExitStack) -> None:
        self.everyone, self.copies = options.everyone, dict[str, Copy]()
        model = ModelConfig(hidden_size=options.hidden, depth=options.depth, num_heads=options.heads)
        training = TrainingConfig(batch_size=options.batch, lr=1e-4)
        for name, choices, kind in _copies(options):
            balance = zr.BalanceConfig(update_every=options.update_every, **choices)
            config = RunConfig(timeout_s=1800.0, model=model, training=training, balance=balance)
            if not self.copies:
                ColossalAIHost.join(config)
                torch.set_num_threads(1)
                if options.kind == "sleep":  # contention pins by itself
                    pin_to_core()
            self.copies[name] = kind(config)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.contention = Contention(core_index=self.rank) if options.kind == "contend" else None
        for slowness in [self.contention] if self.contention else [copy.slowness for copy in self.copies.values()]:
            stack.enter_context(slowness)

    def slow(self, chi: float, *copies: Copy) -> None:
        """Make the last rank slow, in these copies or in all."""
        slowness = chi if self.rank == self.num_ranks - 1 else 1.0
        if self.contention is not None:
            self.contention.chi = slowness
        for copy in copies or self.copies.values():
            copy.slowness.chi = self.everyone * slowness

    def updates(self, number: int) -> dict[str, list[float]]:
        return {mode: copy.updates(number) for mode, copy in self.copies.items() if mode != "off"}

    def compare(self, chi: float, ratios: Sequence[float], rounds: int, num_steps: int) -> dict[str, list[float]]:
        """Seconds of the steps in every setting, all taking turns."""
        off, last = self.copies["off"], self.num_ranks - 1
        for copy in self.copies.values():
            copy.shares.clear()

        def homogeneous() -> list[float]:
            self.slow(1.0, off)
            seconds = off.window(2 * num_steps)
            self.slow(chi, off)
            return seconds

        settings = {"homogeneous": homogeneous, "Baseline": lambda: off.window(max(num_steps // 2, 1))}
        settings |= {mode: lambda mode=mode: self.copies[mode].window(num_steps) for mode in self.copies}
        del settings["off"]
        if "zero-rd" in self.copies:
            zero = self.copies["zero-rd"]
            for ratio in ratios:
                settings[f"fixed {ratio:g}"] = lambda ratio=ratio: zero.pinned(last, ratio, num_steps)
        return {name: [*chain.from_iterable(windows)] for name, windows in in_turns(settings, rounds).items()}


def report(bench: Bench, chi: float, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    homogeneous_s = medians["homogeneous"]
    chis = [1.0] * (bench.num_ranks - 1) + [chi]
    bound_s = shortest_step_s(bench.copies["off"].balancer, chis, homogeneous_s)
    rows, cells = [], []
    for name, step_s in medians.items():
        low, high = interval_of_ratio(seconds[name], seconds["homogeneous"])
        row = {"chi": chi, "setting": name, "step": step_s / homogeneous_s, "interval": [low, high]}
        row["to_bound"], shares, predicted = step_s / bound_s, {}, ""
        if name in bench.copies:
            shares = bench.copies[name].group_shares()
            predicted = f"{bench.copies[name].predicted_s / step_s:.3f}"
        rows.append(row | shares)
        share_cells = [f"{shares[what]:.3f}" if shares else "" for what in ("moved", "lent", "dropped")]
        interval = f"[{low:.3f}, {high:.3f}]"
        cells.append([name, f"{row['step']:.3f}", interval, f"{row['to_bound']:.3f}", *share_cells, predicted])
    if bench.rank == 0:
        title = f"χ = {chi:g}: homogeneous {1e3 * homogeneous_s:.0f} ms, T* {bound_s / homogeneous_s:.3f} of it"
        headings = ["mode", "step / homogeneous", "95 %", "step / T*", "moved", "lent", "dropped"]
        show(title, [*headings, "predicted / measured"], cells)
    return rows


def main() -> None:
    sizes = {"hidden": 768, "depth": 2, "heads": 12, "batch": 16, "everyone": 1.0, "update_every": 5, "settle": 6}
    lists = {"chi": [2.0, 4.0, 8.0], "blocks": [1], "max_ratios": [0.9]}
    parser = parser_of(__doc__, **sizes, **lists, rounds=3, steps=6, gathering=False)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["exact", "mig", "zero-pridiff", "semi"])
    parser.add_argument("--ratios", type=float, nargs="+", default=[], help="to which zero-rd is pinned")
    parser.add_argument("--kind", choices=("sleep", "contend"), default="sleep")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        bench = Bench(options, stack)
        bench.slow(1.0)
        bench.updates(3)
        for chi in options.chi:
            bench.slow(chi)
            traces = {"appears": bench.updates(options.settle)}
            rows += report(bench, chi, bench.compare(chi, options.ratios, options.rounds, options.steps))
            bench.slow(1.0)
            traces["recovers"] = bench.updates(4)
            for name, spared in traces.items() if bench.rank == 0 else ():
                for mode, values in spared.items():
                    print(f"χ = {chi:g}, {mode}, spared when it {name}: " + " ".join(f"{own:.2f}" for own in values))
    if bench.rank == 0:
        save("modes", {"arguments": vars(options), "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
