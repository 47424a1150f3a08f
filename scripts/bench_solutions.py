"""All solutions side by side: torchrun --nproc-per-node 2 -m scripts.bench_solutions

Copies of a ViT under Colossal-AI, one a solution, train in the same processes and take turns; the last rank sleeps
after each matrix multiplication (scope "gemm"). For each χ the closed loops settle, and then told are: the step time as
a ratio to the homogeneous step and to the work-conserving bound T* (which no exact scheme that moves products can
beat), what share of the group's products is dropped and what is moved, and the step time that the plan in force
predicts. "ZERO as long as SEMI" is what ZERO-Pri, by which SEMI prunes, would have to drop for SEMI's step time,
interpolated between ratios that it is pinned to.

``--unequal 4 2 1 1`` slows every rank by its own χ instead, and compares SEMI with every number λ of migrating
stragglers, by both rules (Fig. 11). Four ranks on two cores also want ``--everyone 8``: ranks that share a core slow
each other, and where one sleeps its neighbour is fast, so all sleep seven times as long as they multiply, and χ comes
on top of that.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zeroresize as zr
from scripts.benching import ColossalAIRanks, Trainer, interval_of_ratio, of_every_rank, save, slowness_of
from vit_examples.config import ModelConfig
from zeroresize.balanced_linear import BalancedLinear
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.policy.column_order import ALIGNMENT

#: Solutions whose closed loop runs, by name; Baseline and homogeneous are one more copy, in mode "off".
SOLUTIONS = {
    "ZERO-PriDiffR": {"mode": "zero-pridiff"},
    "MIG": {"mode": "mig"},
    "SEMI": {"mode": "semi"},
    "SEMI, exact": {"mode": "semi", "budget": 0.0},
}
SAME_TIME = "ZERO as long as SEMI"
PINNED = "pinned"
#: ZERO is pinned to what SEMI spares each straggler and to so much more or less.
OFFSETS = (-0.2, -0.1, 0.0, 0.1)


def fixed_lambdas(num_stragglers: int) -> dict[str, dict[str, object]]:
    """SEMI by both rules, with every number of migrating stragglers and with its own choice."""
    rules = {"SEMI": {"mode": "semi"}, "SEMI paper": {"mode": "semi", "semi_rule": "paper"}}
    choices = {f"λ={count}": {"migrating": count} for count in range(num_stragglers + 1)}
    return {
        f"{rule}, {choice}": {**changes, **more}
        for rule, changes in rules.items()
        for choice, more in {**choices, "its own choice": {}}.items()
    }


@dataclass
class Copy:
    """A model in training, slowed, under one configuration.

    Attributes:
        predicted_s, shares: what the plan predicted, and what shares of the group's products were pruned and lent, of
            every window.
    """

    trainer: Trainer
    balancer: zr.Balancer
    slowness: SlowLayers
    predicted_s: list[float] = field(default_factory=list)
    shares: list[tuple[float, float]] = field(default_factory=list)

    def updates(self, number: int) -> None:
        for _ in range(number * self.balancer.config.update_every):
            self.trainer.step()


class Bench:
    """A copy a solution, and one in mode "off".

    Args:
        everyone: what every rank's χ is multiplied by, at homogeneous steps too.
    """

    def __init__(
        self,
        ranks: ColossalAIRanks,
        shape: ModelConfig,
        batch_size: int,
        config: zr.BalanceConfig,
        solutions: Mapping[str, Mapping[str, object]],
        everyone: float = 1.0,
    ) -> None:
        self.ranks, self.solutions, self.everyone = ranks, tuple(solutions), everyone
        self.copies: dict[str, Copy] = {}
        self.pinned: dict[float, list[tuple[float, float]]] = {}
        besides = {"off": {"mode": "off"}} | ({PINNED: {"mode": "zero-pri"}} if "SEMI" in solutions else {})
        for name, changes in {**besides, **solutions}.items():
            trainer = ranks.trainer(shape, batch_size=batch_size)
            balancer = ranks.balance(trainer, config.replace(**changes))
            slowness = slowness_of(trainer.model)
            slowness.__enter__()
            self.copies[name] = Copy(trainer, balancer, slowness)

    def slow(self, copy: Copy, chis: Sequence[float]) -> None:
        copy.slowness.chi = self.everyone * chis[self.ranks.rank]

    def settle(self, chis: Sequence[float], num_updates: int) -> None:
        for name, copy in self.copies.items():
            self.slow(copy, chis)
            copy.updates(num_updates if name in self.solutions else 1)  # nothing settles elsewhere

    def compare(self, chis: Sequence[float], rounds: int, num_steps: int) -> dict[str, list[float]]:
        """Seconds of the steps of every solution, all taking turns; ``pinned`` then holds (share dropped, seconds)."""
        off = self.copies["off"]
        self.pinned = {offset: [] for offset in OFFSETS if PINNED in self.copies}
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            self.slow(off, [1.0] * len(chis))
            seconds["homogeneous"] += off.trainer.window(2 * num_steps)
            self.slow(off, chis)
            seconds["Baseline"] += off.trainer.window(max(num_steps // 2, 1))
            for name in self.solutions:
                copy = self.copies[name]
                copy.predicted_s.append(copy.balancer.plan.predicted_step_s)
                seconds[name] += copy.trainer.window(num_steps)
                copy.shares.append(shares_of(copy.balancer))
            for offset, points in self.pinned.items():
                points += self._window_of_zero_beside_semi(offset, num_steps)
        return dict(seconds)

    def _window_of_zero_beside_semi(self, offset: float, num_steps: int) -> list[tuple[float, float]]:
        """(share of the group's products dropped, seconds) of ZERO's steps, pinned beside what SEMI spares now."""
        zero, semi = self.copies[PINNED], self.copies["SEMI"]
        spared = [rank.pruned + rank.lent for rank in semi.balancer.plan.ranks]
        pins = [self._fast_ratio(max(own + offset, 0.0)) if own > 0.0 else 0.0 for own in spared]
        for rank, ratio in enumerate(pins):
            zero.balancer.pin(rank, ratio)
        try:
            times_s = zero.trainer.window(num_steps)
            pruned, _ = shares_of(zero.balancer)
            return [(pruned, seconds) for seconds in times_s]
        finally:
            zero.balancer.release()

    def _fast_ratio(self, ratio: float) -> float:
        """The nearest γ of which every layer makes a multiple of eight columns, as a decision's counts are.

        (A pinned ratio is kept to the column.)
        """
        zero = self.copies[PINNED]
        layers = [module for module in zero.trainer.model.modules() if isinstance(module, BalancedLinear)]
        num_steps = max(math.gcd(*(layer.num_columns for layer in layers)) // ALIGNMENT, 1)
        most = math.floor(zero.balancer.config.max_ratio * num_steps)
        return min(round(ratio * num_steps), most) / num_steps

    def dropped_for(self, step_s: float) -> float:
        """What share of the group's products ZERO drops for this step time, NaN outside what was measured."""
        points = [tuple(map(statistics.median, zip(*points, strict=True))) for points in self.pinned.values()]
        times_s, shares = zip(*sorted((seconds, share) for share, seconds in points), strict=True)
        return float(np.interp(step_s, times_s, shares, left=math.nan, right=math.nan))

    def bound(self, chis: Sequence[float], homogeneous_s: float) -> float:
        """T*, seconds: what is not a product stays, products are shared out by speed; collectives cost nothing more."""
        own = self.copies["off"].balancer.metrics()["balance/products_s"]
        products_s = statistics.fmean(
            seconds for seconds, chi in zip(of_every_rank(own), chis, strict=True) if chi == 1
        )
        return homogeneous_s - products_s + products_s * len(chis) / sum(1 / chi for chi in chis)


def report(bench: Bench, chis: Sequence[float], seconds: dict[str, list[float]]) -> list[dict[str, object]]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    homogeneous_s = medians["homogeneous"]
    bound_s = bench.bound(chis, homogeneous_s)
    shares = {
        name: tuple(map(statistics.median, zip(*bench.copies[name].shares, strict=True))) for name in bench.solutions
    }
    if bench.pinned:
        seconds[SAME_TIME], medians[SAME_TIME] = seconds["SEMI"], medians["SEMI"]
        shares[SAME_TIME] = bench.dropped_for(medians["SEMI"]), 0.0
    rows, table = [], Table(
        "solution", "step / homogeneous", "95 %", "step / T*", "pruned", "lent", "predicted / measured",
        title=f"χ = {' '.join(f'{chi:g}' for chi in chis)}: homogeneous {1e3 * homogeneous_s:.0f} ms, "
        f"T* {bound_s / homogeneous_s:.3f} of it", title_justify="left",
    )  # fmt: skip
    for name, step_s in medians.items():
        low, high = interval_of_ratio(seconds[name], seconds["homogeneous"])
        pruned, lent = shares.get(name, (0.0, 0.0))
        predicted = statistics.median(bench.copies[name].predicted_s) / step_s if name in bench.solutions else None
        table.add_row(
            name, f"{step_s / homogeneous_s:.3f}", f"[{low:.3f}, {high:.3f}]", f"{step_s / bound_s:.3f}",
            f"{pruned:.3f}", f"{lent:.3f}", "" if predicted is None else f"{predicted:.3f}",
        )  # fmt: skip
        rows.append({"chi": list(chis), "solution": name, "step": step_s / homogeneous_s, "interval": [low, high],
                     "to_bound": step_s / bound_s, "pruned": pruned, "lent": lent,
                     "predicted_to_measured": predicted})  # fmt: skip
    if bench.ranks.rank == 0:
        Console(width=120).print(table)
    return rows


def shares_of(balancer: zr.Balancer) -> tuple[float, float]:
    """Shares of the group's products that were pruned and lent in the last step; collective."""
    own = balancer.metrics()
    pruned, lent = (statistics.fmean(of_every_rank(own[f"balance/{kind}_share"])) for kind in ("pruned", "lent"))
    return pruned, lent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--chi", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--unequal", type=float, nargs="+", help="χ of every rank, instead of --chi on the last one")
    parser.add_argument("--everyone", type=float, default=1.0, help="what every rank's χ is multiplied by")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="in a window")
    parser.add_argument("--updates", type=int, default=6, help="for every loop to settle, before it is measured")
    parser.add_argument("--update-every", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.1, help="SEMI's steps may take half of it longer")
    parser.add_argument("--max-ratio", type=float, default=zr.BalanceConfig().max_ratio, help="γ_max")
    parser.add_argument("--migrate", choices=("broadcast-reduce", "scatter-gather"), default="broadcast-reduce")
    arguments = parser.parse_args()

    ranks = ColossalAIRanks()
    shape = ModelConfig(hidden_size=arguments.hidden, depth=arguments.depth, num_heads=12)
    config = zr.BalanceConfig(
        mode="off",
        update_every=arguments.update_every,
        migrate=arguments.migrate,
        tolerance=arguments.tolerance,
        max_ratio=arguments.max_ratio,
    )
    if arguments.unequal:
        all_chis = [arguments.unequal]
        solutions = fixed_lambdas(sum(chi > 1 for chi in arguments.unequal))
    else:
        all_chis = [[*[1.0] * (ranks.num_ranks - 1), chi] for chi in arguments.chi]
        solutions = SOLUTIONS
    bench = Bench(ranks, shape, arguments.batch, config, solutions, arguments.everyone)
    even = [1.0] * ranks.num_ranks
    bench.settle(even, 3)
    rows = []
    for chis in all_chis:
        bench.settle(chis, arguments.updates)
        rows += report(bench, chis, bench.compare(chis, arguments.rounds, arguments.steps))
        for copy in bench.copies.values():
            copy.predicted_s.clear()
            copy.shares.clear()
        bench.settle(even, 3)
    errors = [abs(row["predicted_to_measured"] - 1) for row in rows if row["predicted_to_measured"] is not None]
    if ranks.rank == 0:
        print(
            f"predicted against measured step time, {len(errors)} plans: median error {statistics.median(errors):.3f}"
        )
        slowness = "-".join(f"{chi:g}" for chi in arguments.unequal or arguments.chi)
        kind = "lambda" if arguments.unequal else "solutions"
        setting = f"e{ranks.num_ranks}_h{arguments.hidden}_b{arguments.batch}_t{arguments.tolerance:g}"
        setting += f"_g{arguments.max_ratio:g}_x{arguments.everyone:g}"
        name = f"{kind}_{setting}_{arguments.migrate}_chi{slowness}"
        save(name, {"arguments": vars(arguments), "rows": rows, "prediction_error": statistics.median(errors)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
