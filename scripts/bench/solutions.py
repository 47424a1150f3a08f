"""All solutions side by side: torchrun --nproc-per-node 2 -m scripts.bench.solutions

Copies of a ViT under Colossal-AI, one a solution, train in the same processes and take turns; the last rank sleeps
after each matrix multiplication (scope "gemm"). For each χ the closed loops settle, and then told are: the step time as
a ratio to the homogeneous step and to the work-conserving bound T* (which no exact scheme that moves products can beat;
"with rest" counts what moves along with units, as far as the default has learned it), what share of the group's
products is dropped and what is moved, and the step time that the plan in force predicts; at the end also what new plans
had predicted before their first step. "ZERO as long as SEMI" is what ZERO-Pri, by which SEMI prunes, would have to drop
for SEMI's step time, interpolated between ratios that it is pinned to.

"removed" is the share of the removable slowdown that a solution removes, (Baseline − its step) / (Baseline − T*). With
``--unprepared 200`` the default also meets each χ unprepared, and told is its mean step over so many steps, those
before its first plan included. ``--shares 2 1`` adds a copy that is divided so from the start.

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
from dataclasses import astuple, dataclass, field, fields
from itertools import groupby

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zeroresize as zr
from scripts.bench.colossalai_ranks import ColossalAIRanks, Trainer
from scripts.bench.common import (
    gather_from_ranks,
    interval_of_ratio,
    save,
    shortest_step_s,
    slowness_of,
)
from vit_examples.config import ModelConfig
from zeroresize.config.paper import nested
from zeroresize.convert import balanced_layers
from zeroresize.injection.slow_layers import SlowLayers
from zeroresize.plan.group import Shares, WorkloadPlan
from zeroresize.policy.tensor.columns.order import aligned_ratio

DEFAULT, SEMI = "exact, the default", "SEMI"
#: SEMI whose units stay at home, as before there was ownership.
STAYING_SEMI = "SEMI, nothing moves"
#: Solutions whose closed loop runs, by name; Baseline and homogeneous are one more copy, in mode "off".
SOLUTIONS = {
    DEFAULT: {"mode": "exact"},
    "ZERO-PriDiffR": {"mode": "zero-pridiff"},
    "MIG": {"mode": "mig"},
    SEMI: {"mode": "semi"},
    STAYING_SEMI: {"mode": "semi", "moves": False},
}
#: After which units come home in any case.
_MOST_UPDATES = 40
SAME_TIME = "ZERO as long as SEMI"
PINNED = "pinned"
#: ZERO is pinned to what SEMI spares each straggler and to so much more or less.
OFFSETS = (-0.2, -0.1, 0.0, 0.1)


def fixed_lambdas(num_stragglers: int) -> dict[str, dict[str, object]]:
    """SEMI by both rules, with every number of migrating stragglers and with its own choice."""
    rules = {STAYING_SEMI: {"mode": "semi", "moves": False}, "SEMI paper": {"mode": "semi", "paper.semi_rule": "paper"}}
    choices = {f"λ={count}": {"paper.num_migrating": count} for count in range(num_stragglers + 1)}
    return {
        f"{rule}, {choice}": nested({**changes, **more})
        for rule, changes in rules.items()
        for choice, more in {**choices, "its own choice": {}}.items()
    }


@dataclass(frozen=True)
class TimedStep:
    """One step, the plan that was decided, this rank's shares, and whether it was a calibration step."""

    seconds: float
    plan: WorkloadPlan
    shares: Shares
    calibrates: bool = False


@dataclass
class Copy:
    """A model in training, slowed, under one configuration."""

    trainer: Trainer
    balancer: zr.Balancer
    slowness: SlowLayers
    steps: list[TimedStep] = field(default_factory=list)

    def timed_step(self) -> TimedStep:
        plan, calibrates = self.balancer.plan, self.balancer.is_calibrating
        seconds = self.trainer.timed_step()
        metrics = self.balancer.metrics()
        shares = Shares(**{field.name: metrics[f"balance/{field.name}_share"] for field in fields(Shares)})
        return TimedStep(seconds, plan, shares, calibrates)

    def window(self, num_steps: int) -> list[TimedStep]:
        """Some steps after one that is not counted."""
        self.trainer.step()
        return [self.timed_step() for _ in range(num_steps)]

    def updates(self, number: int) -> list[TimedStep]:
        return [self.timed_step() for _ in range(number * self.balancer.config.update_every)]


class Bench:
    """A copy a solution, and one in mode "off".

    Args:
        everyone: what every rank's χ is multiplied by, at homogeneous steps too.

    Attributes:
        pinned: (share of the group's products dropped, seconds) of ZERO's steps, by how far it is pinned from SEMI.
        first_predictions: predicted / measured step time of every plan that was new when it was measured.
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
        self.first_predictions: list[float] = []
        self.copies: dict[str, Copy] = {}
        self.pinned: dict[float, list[tuple[float, float]]] = {}
        besides = {"off": {"mode": "off"}} | ({PINNED: {"mode": "zero-pri"}} if SEMI in solutions else {})
        for name, changes in {**besides, **solutions}.items():
            trainer = ranks.trainer(shape, batch_size=batch_size)
            balancer = ranks.balance(trainer, config.in_mode(**changes))
            slowness = slowness_of(trainer.model)
            slowness.__enter__()
            self.copies[name] = Copy(trainer, balancer, slowness)

    def slow(self, copy: Copy, chis: Sequence[float]) -> None:
        copy.slowness.chi = self.everyone * chis[self.ranks.rank]

    def settle(self, chis: Sequence[float], num_updates: int) -> None:
        for name, copy in self.copies.items():
            self.slow(copy, chis)
            if name in self.solutions:
                self.first_predictions += predictions_of_new_plans(copy.updates(num_updates))
            else:  # nothing settles there
                copy.updates(1)

    def compare(self, chis: Sequence[float], rounds: int, num_steps: int) -> dict[str, list[float]]:
        """Seconds of the steps of every solution, all taking turns."""
        off = self.copies["off"]
        self.pinned = {offset: [] for offset in OFFSETS if PINNED in self.copies}
        for copy in self.copies.values():
            copy.steps.clear()
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            self.slow(off, [1.0] * len(chis))
            seconds["homogeneous"] += off.trainer.window(2 * num_steps)
            self.slow(off, chis)
            seconds["Baseline"] += off.trainer.window(max(num_steps // 2, 1))
            for name in self.solutions:
                window = self.copies[name].window(num_steps)
                seconds[name] += [step.seconds for step in window]
                self.copies[name].steps += window
            for offset, points in self.pinned.items():
                points += self._window_of_zero_beside_semi(offset, num_steps)
        return dict(seconds)

    def _window_of_zero_beside_semi(self, offset: float, num_steps: int) -> list[tuple[float, float]]:
        """(share of the group's products dropped, seconds) of ZERO's steps, pinned beside what SEMI spares now."""
        zero, semi = self.copies[PINNED], self.copies[SEMI]
        spared = [max(1.0 - rank.owned * (1.0 - rank.spared), 0.0) for rank in semi.balancer.plan.ranks]
        pins = [self._fast_ratio(max(own + offset, 0.0)) if own > 0.0 else 0.0 for own in spared]
        for rank, ratio in enumerate(pins):
            zero.balancer.pin(rank, ratio)
        try:
            steps = zero.window(num_steps)
            pruned = shares_of(steps).pruned
            return [(pruned, step.seconds) for step in steps]
        finally:
            zero.balancer.release()

    def _fast_ratio(self, ratio: float) -> float:
        """The nearest γ of which every layer makes a multiple of eight columns, as a decision's counts are.

        (A pinned ratio is kept to the column.)
        """
        zero = self.copies[PINNED]
        common = math.gcd(*(layer.num_columns for layer in balanced_layers(zero.trainer.model).values()))
        most = zero.balancer.config.max_ratio
        return aligned_ratio(common, min(ratio, most), most)

    def dropped_for(self, step_s: float) -> float:
        """What share of the group's products ZERO drops for this step time, NaN outside what was measured."""
        points = [tuple(map(statistics.median, zip(*points, strict=True))) for points in self.pinned.values()]
        times_s, shares = zip(*sorted((seconds, share) for share, seconds in points), strict=True)
        return float(np.interp(step_s, times_s, shares, left=math.nan, right=math.nan))

    def moving_rest(self) -> float:
        """What the ranks have learned of the rest of a step that moves along with units, their mean; collective."""
        copy = self.copies.get(DEFAULT) or self.copies["off"]
        return statistics.fmean(gather_from_ranks(copy.balancer.metrics()["balance/moving_rest"]))

    def unprepared_run(self, name: str, chis: Sequence[float], num_steps: int) -> list[float]:
        """Seconds of a solution's first steps in which ranks are slow; it has settled undisturbed before."""
        copy = self.copies[name]
        self.slow(copy, [1.0] * len(chis))
        for _ in range(_MOST_UPDATES):
            if len(set(copy.balancer.plan.owned)) == 1:
                break
            copy.updates(1)  # units are not home yet
        self.slow(copy, chis)
        return [copy.timed_step().seconds for _ in range(num_steps)]


def report(
    bench: Bench, chis: Sequence[float], seconds: dict[str, list[float]], runs: Mapping[str, list[float]]
) -> list[dict[str, object]]:
    """A table of every solution, and of what ``runs`` took unprepared."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    homogeneous_s = medians["homogeneous"]
    off = bench.copies["off"].balancer
    bound_s = shortest_step_s(off, chis, homogeneous_s)
    units_bound_s = shortest_step_s(off, chis, homogeneous_s, bench.moving_rest())

    def removed(step_s: float) -> float:
        """Share of the removable slowdown."""
        return (medians["Baseline"] - step_s) / (medians["Baseline"] - bound_s)

    shares = {name: shares_of(bench.copies[name].steps) for name in bench.solutions}
    moved = {name: moved_share(bench.copies[name].steps) for name in bench.solutions}
    if bench.pinned:
        seconds[SAME_TIME], medians[SAME_TIME] = seconds[SEMI], medians[SEMI]
        shares[SAME_TIME] = Shares(pruned=bench.dropped_for(medians[SEMI]))
    rows, table = [], Table(
        "solution", "step / homogeneous", "95 %", "step / T*", "with rest", "removed", "moved", "lent", "pruned",
        "predicted / measured",
        title=f"χ = {' '.join(f'{chi:g}' for chi in chis)}: homogeneous {1e3 * homogeneous_s:.0f} ms, "
        f"T* {bound_s / homogeneous_s:.3f} of it, {units_bound_s / homogeneous_s:.3f} with what moves along",
        title_justify="left",
    )  # fmt: skip
    for name, step_s in medians.items():
        low, high = interval_of_ratio(seconds[name], seconds["homogeneous"])
        mean_shares = shares.get(name, Shares())
        steps = bench.copies[name].steps if name in bench.solutions else []
        predicted = statistics.median(step.plan.predicted_step_s for step in steps) / step_s if steps else None
        table.add_row(
            name, f"{step_s / homogeneous_s:.3f}", f"[{low:.3f}, {high:.3f}]", f"{step_s / bound_s:.3f}",
            f"{step_s / units_bound_s:.3f}", f"{removed(step_s):.3f}",
            f"{moved.get(name, 0.0):.3f}", f"{mean_shares.lent:.3f}", f"{mean_shares.pruned:.3f}",
            "" if predicted is None else f"{predicted:.3f}",
        )  # fmt: skip
        rows.append({"chi": list(chis), "solution": name, "step": step_s / homogeneous_s, "interval": [low, high],
                     "to_bound": step_s / bound_s, "to_units_bound": step_s / units_bound_s,
                     "removed": removed(step_s), "moved": moved.get(name, 0.0),
                     "lent": mean_shares.lent, "pruned": mean_shares.pruned,
                     "predicted_to_measured": predicted})  # fmt: skip
    for name, step_seconds in runs.items():
        mean_s = statistics.fmean(step_seconds)
        table.add_row(
            f"{name}, {len(step_seconds)} steps", f"{mean_s / homogeneous_s:.3f}", "", f"{mean_s / bound_s:.3f}",
            f"{mean_s / units_bound_s:.3f}", f"{removed(mean_s):.3f}", "", "", "", "",
        )  # fmt: skip
        solution = f"{name}, mean of {len(step_seconds)} steps"
        rows.append({"chi": list(chis), "solution": solution, "step": mean_s / homogeneous_s,
                     "to_bound": mean_s / bound_s, "to_units_bound": mean_s / units_bound_s,
                     "removed": removed(mean_s),
                     "predicted_to_measured": None})  # fmt: skip
    if bench.ranks.rank == 0:
        Console(width=140).print(table)
    return rows


def shares_of(steps: Sequence[TimedStep]) -> Shares:
    """Return shares of the group's products, by each rank's median step (few calibrate); collective."""
    medians = map(statistics.median, zip(*(astuple(step.shares) for step in steps), strict=True))
    here = Shares(*medians)
    amounts = here.pruned * here.owned, here.lent * here.owned, here.borrowed, here.owned
    return Shares(*(statistics.fmean(gather_from_ranks(amount)) for amount in amounts))


def moved_share(steps: Sequence[TimedStep]) -> float:
    """Return the share of the group's products that stand on other ranks than the host put them; collective."""
    owned = statistics.median(step.shares.owned for step in steps)
    return statistics.fmean(gather_from_ranks(max(owned - 1.0, 0.0)))


def predictions_of_new_plans(steps: Sequence[TimedStep]) -> list[float]:
    """Predicted / measured step time of each plan whose shares are others than those of the plan before it.

    What it predicted was said before its first step; measured are its steps but for calibration steps.
    """
    ratios, before = [], None
    for _, run in groupby(steps, key=lambda step: id(step.plan)):
        steps_of_plan = list(run)
        plan = steps_of_plan[0].plan
        shares = [(rank.pruned, rank.lent, rank.owned) for rank in plan.ranks]
        measured_s = [step.seconds for step in steps_of_plan if not step.calibrates]
        if before is not None and shares != before and measured_s:
            ratios.append(plan.predicted_step_s / statistics.median(measured_s))
        before = shares
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--chi", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--unequal", type=float, nargs="+", help="χ of every rank, instead of --chi on the last one")
    parser.add_argument("--everyone", type=float, default=1.0, help="what every rank's χ is multiplied by")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="in a window")
    parser.add_argument("--updates", type=int, default=6, help="for every loop to settle, before it is measured")
    parser.add_argument("--update-every", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=0.1, help="SEMI's steps may take half of it longer")
    parser.add_argument("--only", nargs="+", choices=SOLUTIONS, default=list(SOLUTIONS), help="solutions")
    parser.add_argument("--unprepared", type=int, default=0, help="steps in which the default meets each χ unprepared")
    parser.add_argument(
        "--shares", type=float, nargs="+", help="of every rank: a copy that is divided so from the start"
    )
    parser.add_argument("--max-ratio", type=float, default=zr.BalanceConfig().max_ratio, help="γ_max")
    parser.add_argument(
        "--migration-transport", choices=("broadcast-reduce", "scatter-gather"), default="broadcast-reduce"
    )
    arguments = parser.parse_args()
    if arguments.unequal and 1.0 not in arguments.unequal:
        parser.error("--unequal: one rank at least must be normal, χ = 1")

    ranks = ColossalAIRanks()
    shape = ModelConfig(hidden_size=arguments.hidden, depth=arguments.depth, num_heads=arguments.heads)
    config = zr.BalanceConfig(
        mode="off",
        update_every=arguments.update_every,
        migration_transport=arguments.migration_transport,
        tolerance=arguments.tolerance,
        max_ratio=arguments.max_ratio,
    )
    if arguments.unequal:
        all_chis = [arguments.unequal]
        solutions = fixed_lambdas(sum(chi > 1 for chi in arguments.unequal))
    else:
        all_chis = [[*[1.0] * (ranks.num_ranks - 1), chi] for chi in arguments.chi]
        solutions = {name: SOLUTIONS[name] for name in arguments.only}
        if arguments.shares:
            shares_in_words = " ".join(f"{share:g}" for share in arguments.shares)
            staying = {"mode": "exact", "shares": tuple(arguments.shares), "moves": False}
            solutions[f"shares {shares_in_words}"] = staying
    bench = Bench(ranks, shape, arguments.batch, config, solutions, arguments.everyone)
    even = [1.0] * ranks.num_ranks
    bench.settle(even, 3)
    rows = []
    for chis in all_chis:
        runs = {DEFAULT: bench.unprepared_run(DEFAULT, chis, arguments.unprepared)} if arguments.unprepared else {}
        bench.settle(chis, arguments.updates)
        rows += report(bench, chis, bench.compare(chis, arguments.rounds, arguments.steps), runs)
        bench.settle(even, 3)
    settled = [row["predicted_to_measured"] for row in rows if row["predicted_to_measured"] is not None]
    errors = {
        "plans in force": [abs(ratio - 1) for ratio in settled],
        "new plans, before their first step": [abs(ratio - 1) for ratio in bench.first_predictions],
    }
    if ranks.rank == 0:
        for what, errors_of_plans in errors.items():
            print(
                f"predicted against measured step time, {len(errors_of_plans)} {what}: "
                f"median error {statistics.median(errors_of_plans):.3f}, at most {max(errors_of_plans):.3f}"
            )
        slowness = "-".join(f"{chi:g}" for chi in arguments.unequal or arguments.chi)
        kind = "lambda" if arguments.unequal else "solutions"
        setting = f"e{ranks.num_ranks}_h{arguments.hidden}_b{arguments.batch}_t{arguments.tolerance:g}"
        setting += f"_g{arguments.max_ratio:g}_x{arguments.everyone:g}"
        name = f"{kind}_{setting}_{arguments.migration_transport}_chi{slowness}"
        save(name, {"arguments": vars(arguments), "rows": rows, "prediction_errors": errors})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
