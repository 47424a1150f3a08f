"""Whether units come home, and whether balancing ever loses: python -m scripts.bench.coming_home

Simulated, with the policy code of training. ``settings``: spells of slowness that begin and end near a move, drawn by a
seed, and ``lending``: the same in modes that lend and prune; ``offsets``: one spell that ends at every step near its
move; ``load``: a rank whose load swings by a fifth; ``against-off``: random spells and bursts over thousands of steps.
What misses its target is listed, with the spell that missed it.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from scripts.bench.common import parser_of, run, show
from scripts.simulated.cluster import Cluster, Speeds
from scripts.simulated.noise import Noise
from scripts.simulated.spells import COST, LONGEST, SEGMENTS, Outcome, Spell, drawn, outcome
from scripts.simulated.training import simulate, unbalanced_step_s
from zeroresize.config import BalanceConfig
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.costs import MigrationCost

#: Seconds of a move, and what lending takes; where spells are short, so dear that no move and no loan pays.
_USUAL_PRICES = (0.05, MigrationCost(0.001, 0.01))
_PRICES = {"short": (0.25, MigrationCost(9.0, 9.0))}
_PERIODS = (5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500)
#: Spells, ranks, steps between updates.
_AGAINST_OFF = (
    ("pareto", 4, 10), ("pareto", 8, 10), ("pareto", 4, 2), ("bursts", 4, 10), ("bursts", 4, 4), ("bursts", 4, 2),
    ("short", 2, 10), ("short", 8, 10),
)  # fmt: skip
SECTIONS = ("settings", "lending", "offsets", "load", "against-off")


def cluster_of(chi: Speeds, seed: int, kind: str = "") -> Cluster:
    move_s, migration = _PRICES.get(kind, _USUAL_PRICES)
    return Cluster(
        chi, 0.04, 0.06, COST, migration, noise=Noise(0.02), seed=seed, segments=SEGMENTS, bytes_of_units=1.0,
        move=MoveCost(0.0, move_s), moving_rest=0.2,
    )  # fmt: skip


def _spell_and_outcome(task: tuple[Spell, int]) -> tuple[Spell, int, Outcome]:
    return *task, outcome(*task)


def tell(name: str, results: Sequence[tuple[Spell, int, Outcome]], shown: int) -> None:
    """Print how many runs missed their targets, and the worst of them."""
    updates = [ended.updates for *_, ended in results if ended.moved]
    late = [ended for *_, ended in results if ended.late > 0]
    misses = [result for result in results if result[2].late > 0 or result[2].step > LONGEST]
    print(
        f"{name}: {len(results)} runs, {len(updates)} of them away after the spell; late {len(late)}, of these never "
        f"home {sum(math.isinf(ended.late) for ended in late)}; steps above {LONGEST} of undisturbed "
        f"{sum(ended.step > LONGEST for *_, ended in results)}, worst {max(ended.step for *_, ended in results):.3f}; "
        f"home after {statistics.median(updates or [math.nan]):.1f} updates in the median"
    )
    by = Counter((spell.mode, spell.slows, spell.factor != 1.0, spell.units_left is None) for spell, _, _ in misses)
    for (mode, slows, is_wrong, is_natural), count in by.most_common(8):
        print(f"   mode {mode}, slow {slows}, wrong calibration {is_wrong}, natural {is_natural}: {count}")
    for spell, seed, ended in sorted(misses, key=lambda miss: -miss[2].step)[:shown]:
        print(f"   {ended} seed {seed} {spell}")


def load_moves(period: int, shape: str, seed: int, mode: str) -> float:
    """Moves per 1,000 steps of four ranks of which one's load swings by a fifth."""

    def chi(step: int) -> list[float]:
        swing = math.sin(2.0 * math.pi * step / period)
        swing = swing if shape == "sine" else math.copysign(1.0, swing)
        return [1.0, 1.0, 1.0, 1.0 + 0.2 * swing]

    return len(simulate(BalanceConfig(mode=mode, update_every=10), cluster_of(chi, seed), 4000).moves) / 4.0


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


def against_off(task: tuple[str, int, int, int, int, str]) -> tuple[float, float]:
    """Steps of a balanced run as a ratio to those without, and its moves per 1,000 steps."""
    kind, num_ranks, every, num_steps, seed, mode = task
    course = KINDS[kind](num_ranks, num_steps, seed)
    cluster = cluster_of(lambda step: course[step], seed, kind)
    run = simulate(BalanceConfig(mode=mode, update_every=every), cluster, num_steps)
    ratio = math.fsum(run.step_s) / math.fsum(unbalanced_step_s(cluster, num_steps))
    return ratio, 1000.0 * len(run.moves) / num_steps


def main() -> None:
    defaults = {"number": 2000, "seed": 0, "seeds": 3, "offset_seeds": 20, "off_seeds": 5, "steps": 6000}
    parser = parser_of(__doc__, **defaults, shown=5, processes=2)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--mode", choices=("exact", "semi"), default="exact", help="where units move")
    options = parser.parse_args()
    mode, seeds = options.mode, range(options.seeds)
    with multiprocessing.Pool(options.processes, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:

        def run_spells(name: str, spells: Sequence[Spell], seeds: range) -> None:
            tasks = list(itertools.product(spells, seeds))
            tell(name, pool.map(_spell_and_outcome, tasks, chunksize=8), options.shown)

        if "settings" in options.only:
            run_spells("settings", drawn(options.number, options.seed, (mode,)), seeds)
        if "lending" in options.only:
            run_spells("lending", drawn(options.number // 4, options.seed, ("mig", "zero-pri", "semi")), seeds)
        if "offsets" in options.only:
            for deviation, num_seeds in ((0.0, 1), (0.02, options.offset_seeds)):
                spells = [Spell(mode=mode, begins=3, ends=end, deviation=deviation) for end in range(4, 94)]
                run_spells(f"offsets, noise {deviation}", spells, range(num_seeds))
        if "load" in options.only:
            worst = {
                (period, shape): max(load_moves(period, shape, seed, mode) for seed in range(3))
                for period in _PERIODS
                for shape in ("sine", "square")
            }
            rows = [[period, *(f"{worst[period, shape]:.1f}" for shape in ("sine", "square"))] for period in _PERIODS]
            show("moves per 1,000 steps, most of 3 seeds", ("period", "sine", "square"), rows)
        if "against-off" in options.only:
            rows = []
            for case in _AGAINST_OFF:
                tasks = [(*case, options.steps, seed, mode) for seed in range(options.off_seeds)]
                ratios, moves = zip(*pool.map(against_off, tasks, chunksize=1), strict=True)
                rows.append([*case, f"{statistics.fmean(ratios):.4f}", f"{max(ratios):.4f}", f"{max(moves):.1f}"])
            show(f"{mode} / off", ("spells", "ranks", "every", "mean", "worst", "moves per 1,000"), rows)


if __name__ == "__main__":
    run(main)
