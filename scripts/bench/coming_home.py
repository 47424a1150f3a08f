"""Whether units come home, and whether balancing ever loses: python -m scripts.bench.coming_home

Simulated, with the policy code of training. ``settings``: spells of slowness that begin and end near a move, drawn by a
seed; ``offsets``: one spell that ends at every step near its move; ``load``: a rank whose load swings by a fifth;
``against-off``: random spells and bursts over thousands of steps. What misses its target is listed, with a command that
runs it alone.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.simulated.scenario import believed_cost
from scripts.simulated.training import Cluster, Noise, simulate, unbalanced_step_s
from zeroresize.config import BalanceConfig
from zeroresize.plan.ownership import SegmentWork, owned_shares
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost

#: So fine that whole units are no matter.
_SEGMENTS = (SegmentWork(16384, 8, 1.0),)
#: What fewer columns cost: 20 % of them take 28 % of the time, 5 % take 10 %.
_COST = ResizingCost(
    (0.0, 0.18, 0.36, 0.54, 0.72, 0.9), (1.0, 0.85, 0.69, 0.53, 0.36, 0.16), (0.0, 0.002, 0.002, 0.002, 0.002, 0.001)
)
#: Updates within which units are to be home after a spell, besides those in which the move's price is saved; the most.
_UPDATES, _MOST_UPDATES = 4, 8
#: Of an undisturbed step, how long steps may take from then on.
_LONGEST = 1.05
#: Home is better by more than noise where it saves this share of a step, or so many standard deviations of a step.
_LEAST_SAVED, _DEVIATIONS = 0.02, 2.0
#: Intervals before and after the part of a run that matters.
_BEFORE, _AFTER = 12, 12


@dataclass(frozen=True)
class Spell:
    """One rank is slow for a while, near a move.

    Attributes:
        num_ranks, update_every, mode: of the group.
        chi: χ of the last rank meanwhile.
        slows: "products", or "all" of its work.
        units_left: share of its units that a move by hand leaves it; None where the controller alone decides.
        begins, ends: steps from the move by hand on; where there is none, from an update on.
        calibration, factor: how what pruning costs was measured wrong, as in ``scenario.py``.
        rest_s, gemm_s: seconds of a step.
        move_s: of a move.
        moving_rest: share of ``rest_s`` that moves along.
        deviation: of the noise, relative.
    """

    num_ranks: int = 4
    update_every: int = 10
    mode: str = "exact"
    chi: float = 3.0
    slows: str = "products"
    units_left: float | None = None
    begins: int = 3
    ends: int = 23
    calibration: str = "share"
    factor: float = 1.0
    rest_s: float = 0.04
    gemm_s: float = 0.06
    move_s: float = 0.05
    moving_rest: float = 0.2
    deviation: float = 0.0

    @property
    def middle(self) -> int:
        """The step of the move by hand."""
        return self.update_every * (_BEFORE + 3)

    def cluster(self, seed: int, *, is_slow: bool = True) -> Cluster:
        begins, ends = self.middle + self.begins, self.middle + self.ends
        others = (1.0,) * (self.num_ranks - 1)

        def chi(step: int) -> list[float]:
            return [*others, self.chi if is_slow and begins <= step < ends else 1.0]

        return Cluster(
            chi, self.rest_s, self.gemm_s, _COST, MigrationCost(0.001, 0.01), noise=Noise(self.deviation), seed=seed,
            segments=_SEGMENTS if self.mode in ("exact", "semi") else (), bytes_of_units=1.0,
            move=MoveCost(0.0, self.move_s), moving_rest=self.moving_rest, slows_rest=self.slows == "all",
        )  # fmt: skip

    @property
    def divisions(self) -> dict[int, tuple[float, ...]]:
        """The move by hand."""
        if self.units_left is None:
            return {}
        others = (self.num_ranks - self.units_left) / (self.num_ranks - 1)
        return {self.middle: (*(others,) * (self.num_ranks - 1), self.units_left)}

    def step_s(self, shares: Sequence[float]) -> float:
        """Seconds of a step of equally fast ranks that own these shares."""
        owned = owned_shares(shares, _SEGMENTS)
        rest = [self.rest_s * (1.0 - self.moving_rest * (1.0 - share)) for share in owned]
        return max(own + self.gemm_s * _COST.executed_at(share) for own, share in zip(rest, owned, strict=True))


@dataclass(frozen=True)
class Outcome:
    """What became of a spell.

    Attributes:
        moved: whether anything was away, lent or pruned when it ended or later.
        late: updates later than allowed that all was home and whole; inf is never, 0 in time.
        updates: how many it took.
        step: mean step from the deadline on, as a ratio to that of the same run without a spell and with balancing off.
    """

    moved: bool
    late: float
    updates: float
    step: float


def outcome(spell: Spell, seed: int) -> Outcome:
    every = spell.update_every
    config = BalanceConfig(mode=spell.mode, update_every=every)
    ends = spell.middle + max(spell.ends, 0 if spell.units_left is not None else -(10**9))
    num_steps = -(-ends // every) * every + every * (_MOST_UPDATES + _AFTER) + (80 if every == 1 else 0)
    believed = believed_cost(_COST, spell.calibration, spell.factor)
    run = simulate(config, spell.cluster(seed), num_steps, believed_cost=believed, divisions=spell.divisions)
    off = unbalanced_step_s(spell.cluster(seed, is_slow=False), num_steps)
    home = (1.0,) * spell.num_ranks
    homogeneous_s = spell.rest_s + spell.gemm_s
    threshold = max(_LEAST_SAVED, _DEVIATIONS * spell.deviation)
    away_until, moved, saving = ends, False, math.inf
    for update, (owned, pruned, lent) in enumerate(zip(run.owned, run.ratios, run.lent, strict=True)):
        step = (update + 1) * every
        if step < ends - every:
            continue
        saved = spell.step_s(owned) / homogeneous_s - 1.0
        is_away = owned != home and saved > threshold
        if is_away or any(one + other > 0.01 for one, other in zip(pruned, lent, strict=True)):
            moved = True
            away_until = max(away_until, min(step + every, num_steps))
        if is_away:
            saving = min(saving, saved * homogeneous_s)
    price_updates = math.ceil(spell.move_s / saving / every) if saving < math.inf else 0
    allowed = _UPDATES + price_updates
    allowed = min(allowed, _MOST_UPDATES) if every >= 5 else allowed
    deadline = min(-(-ends // every) + allowed, num_steps // every - 1) * every
    updates = (away_until - ends) / every
    late = max(-(-away_until // every) - deadline // every, 0)
    step = statistics.fmean(run.step_s[deadline:]) / statistics.fmean(off[deadline:])
    return Outcome(moved, math.inf if away_until >= num_steps else float(late), updates, step)


def drawn(number: int, seed: int, modes: Sequence[str]) -> list[Spell]:
    """Draw ``number`` settings; equal seeds give equal settings."""
    draw = np.random.default_rng(seed)
    spells = []
    for index in range(number):
        every = int(draw.choice([1, 5, 10]))
        begins, ends = sorted(draw.choice(np.arange(-3 * every, 3 * every + 1), 2, replace=False).tolist())
        mode = modes[index % len(modes)]
        by_hand = len(modes) == 1 and draw.random() < 0.7
        wrong = draw.random() < 0.5
        left = float(draw.choice([0.0, draw.uniform(0.0, 0.5)], p=[0.1, 0.9]))
        spells.append(
            Spell(
                num_ranks=int(draw.choice([2, 4, 8])),
                update_every=every,
                mode=mode,
                chi=round(float(np.exp(draw.uniform(math.log(1.5), math.log(10.0)))), 3),
                slows=str(draw.choice(["products", "all"])),
                units_left=round(left, 3) if by_hand else None,
                begins=begins,
                ends=ends if by_hand else begins + int(draw.integers(1, 7 * every + 1)),
                calibration=str(draw.choice(["share", "savings", "power"])),
                factor=float(draw.choice([0.5, 2**-0.5, 2**0.5, 2.0])) if wrong else 1.0,
                moving_rest=round(float(draw.uniform(0.0, 0.6)), 3),
                move_s=round(float(np.exp(draw.uniform(math.log(0.01), math.log(0.5)))), 4),
                deviation=float(draw.choice([0.0, 0.01, 0.03])),
            )
        )
    return spells


def _spell_and_outcome(task: tuple[Spell, int]) -> tuple[Spell, int, Outcome]:
    return *task, outcome(*task)


def tell(name: str, results: Sequence[tuple[Spell, int, Outcome]], console: Console, *, shown: int) -> None:
    """Print how many runs missed their targets, and the worst of them."""
    moved = [result for result in results if result[2].moved]
    late = [result for result in results if result[2].late > 0]
    long = [result for result in results if result[2].step > _LONGEST]
    misses = [result for result in results if result[2].late > 0 or result[2].step > _LONGEST]
    never = sum(math.isinf(ended.late) for *_, ended in late)
    worst = max((ended.step for *_, ended in results), default=math.nan)
    usual = statistics.median(ended.updates for *_, ended in moved) if moved else math.nan
    console.print(
        f"{name}: {len(results)} runs, {len(moved)} of them away after the spell; late {len(late)}, of these never "
        f"home {never}; steps above {_LONGEST} of undisturbed {len(long)}, worst {worst:.3f}; home after {usual:.1f} "
        "updates in the median"
    )
    by = Counter((spell.mode, spell.slows, spell.factor != 1.0, spell.units_left is None) for spell, _, _ in misses)
    for (mode, slows, is_wrong, is_natural), count in by.most_common(8):
        console.print(f"   mode {mode}, slow {slows}, wrong calibration {is_wrong}, natural {is_natural}: {count}")
    for spell, seed, ended in sorted(misses, key=lambda one: -one[2].step)[:shown]:
        console.print(f"   {ended} seed {seed} {spell}", soft_wrap=True)


# ---------------------------------------------------------------------------------------------------------- load


def load_moves(period: int, shape: str, seed: int, mode: str = "exact", num_ranks: int = 4, every: int = 10) -> float:
    """Moves per 1,000 steps of a group in which one rank's load swings by a fifth."""

    def chi(step: int) -> list[float]:
        angle = 2.0 * math.pi * step / period
        swing = math.sin(angle) if shape == "sine" else math.copysign(1.0, math.sin(angle))
        return [*(1.0,) * (num_ranks - 1), 1.0 + 0.2 * swing]

    cluster = Cluster(
        chi, 0.04, 0.06, _COST, MigrationCost(0.001, 0.01), noise=Noise(0.02), seed=seed, segments=_SEGMENTS,
        bytes_of_units=1.0, move=MoveCost(0.0, 0.05), moving_rest=0.2,
    )  # fmt: skip
    run = simulate(BalanceConfig(mode=mode, update_every=every), cluster, 4000)
    return len(run.moves) / 4.0


# --------------------------------------------------------------------------------------------------- against off


def pareto_spells(num_ranks: int, num_steps: int, seed: int) -> list[list[float]]:
    """[steps][ranks] χ: spells with P(length > t) ∝ 1 / t from 5 steps on, and pauses likewise."""
    draw = np.random.default_rng((seed, 7))
    chi = np.ones((num_steps, num_ranks))
    for rank in range(num_ranks):
        step = 0
        while step < num_steps:
            step += int(30 * (1.0 + draw.pareto(1.0)))
            length = int(5 * (1.0 + draw.pareto(1.0)))
            chi[step : step + length, rank] = draw.uniform(1.5, 4.0)
            step += length
    return chi.tolist()


def bursts(num_ranks: int, num_steps: int, seed: int) -> list[list[float]]:
    """[steps][ranks] χ: bursts of 10 steps of χ = 3 on one rank, one in 50 steps."""
    draw = np.random.default_rng((seed, 8))
    chi = np.ones((num_steps, num_ranks))
    for step in np.flatnonzero(draw.random(num_steps) < 1 / 50):
        chi[step : step + 10, draw.integers(num_ranks)] = 3.0
    return chi.tolist()


def short_spells(num_ranks: int, num_steps: int, seed: int) -> list[list[float]]:
    """[steps][ranks] χ: spells of 20 to 45 steps of χ = 3 on one rank after the other, 50 to 300 steps apart."""
    draw = np.random.default_rng((seed, 9))
    chi = np.ones((num_steps, num_ranks))
    step = 60
    while step < num_steps:
        length = int(draw.integers(20, 46))
        chi[step : step + length, draw.integers(num_ranks)] = 3.0
        step += length + int(draw.integers(50, 301))
    return chi.tolist()


KINDS: dict[str, Callable[[int, int, int], list[list[float]]]] = {
    "pareto": pareto_spells,
    "bursts": bursts,
    "short": short_spells,
}
#: Seconds of a move, and what lending takes; where spells are short, so dear that no move and no loan pays.
_PRICES = {"short": (0.25, MigrationCost(9.0, 9.0))}
_USUAL_PRICES = (0.05, MigrationCost(0.001, 0.01))


def against_off(task: tuple[str, int, int, int, int, str]) -> tuple[tuple[str, int, int, int], float, float]:
    """(what, its step / off's, moves per 1,000 steps)."""
    kind, num_ranks, every, num_steps, seed, mode = task
    course = KINDS[kind](num_ranks, num_steps, seed)
    move_s, migration = _PRICES.get(kind, _USUAL_PRICES)
    cluster = Cluster(
        lambda step: course[step], 0.04, 0.06, _COST, migration, noise=Noise(0.02), seed=seed,
        segments=_SEGMENTS, bytes_of_units=1.0, move=MoveCost(0.0, move_s), moving_rest=0.2,
    )  # fmt: skip
    run = simulate(BalanceConfig(mode=mode, update_every=every), cluster, num_steps)
    ratio = math.fsum(run.step_s) / math.fsum(unbalanced_step_s(cluster, num_steps))
    return (kind, num_ranks, every, seed), ratio, 1000.0 * len(run.moves) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("settings", "lending", "offsets", "load", "against-off")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections)
    parser.add_argument("--number", type=int, default=2000, help="settings")
    parser.add_argument("--seed", type=int, default=0, help="of the settings")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, with other noise")
    parser.add_argument("--offset-seeds", type=int, default=20)
    parser.add_argument("--off-seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6000, help="against off")
    parser.add_argument("--shown", type=int, default=5, help="so many of the worst are listed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mode", choices=("exact", "semi"), default="exact", help="where units move")
    arguments = parser.parse_args()
    mode = arguments.mode
    console = Console(width=180)
    began = time.perf_counter()
    with multiprocessing.Pool(arguments.processes) as pool:
        for name, modes in (("settings", (mode,)), ("lending", ("mig", "zero-pri", "semi"))):
            if name in arguments.only:
                number = arguments.number if name == "settings" else arguments.number // 4
                tasks = list(itertools.product(drawn(number, arguments.seed, modes), range(arguments.seeds)))
                tell(name, pool.map(_spell_and_outcome, tasks, chunksize=8), console, shown=arguments.shown)
        if "offsets" in arguments.only:
            for deviation, seeds in ((0.0, 1), (0.02, arguments.offset_seeds)):
                spells = [Spell(mode=mode, begins=3, ends=end, deviation=deviation) for end in range(4, 94)]
                tasks = list(itertools.product(spells, range(seeds)))
                results = pool.map(_spell_and_outcome, tasks, chunksize=8)
                tell(f"offsets, noise {deviation}", results, console, shown=arguments.shown)
        if "load" in arguments.only:
            table = Table("period", "sine", "square", title="moves per 1,000 steps, most of 3 seeds")
            for period in (5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500):
                worst = [
                    max(load_moves(period, shape, seed, mode) for seed in range(3)) for shape in ("sine", "square")
                ]
                table.add_row(str(period), *(f"{moves:.1f}" for moves in worst))
            console.print(table)
        if "against-off" in arguments.only:
            cases = [
                ("pareto", 4, 10),
                ("pareto", 8, 10),
                ("pareto", 4, 2),
                ("bursts", 4, 10),
                ("bursts", 4, 4),
                ("bursts", 4, 2),
                ("short", 2, 10),
                ("short", 8, 10),
            ]
            tasks = [(*case, arguments.steps, seed, mode) for case in cases for seed in range(arguments.off_seeds)]
            ratios_to_off = pool.map(against_off, tasks, chunksize=1)
            table = Table("spells", "ranks", "every", "mean", "worst", "moves per 1,000", title=f"{mode} / off")
            for case, group in itertools.groupby(ratios_to_off, key=lambda one: one[0][:3]):
                ratios = list(group)
                table.add_row(
                    case[0], str(case[1]), str(case[2]), f"{statistics.fmean(one[1] for one in ratios):.4f}",
                    f"{max(one[1] for one in ratios):.4f}", f"{max(one[2] for one in ratios):.1f}",
                )  # fmt: skip
            console.print(table)
    console.print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
