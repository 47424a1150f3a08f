"""How well zr.watch sees slow ranks, and what it costs: OMP_NUM_THREADS=1 python -m scripts.bench.watching

``find``: a model under DDP on real ranks, of which one is slow for a while, again and again: by its products, its data
loader, its host (a module that is no product), or the link to its neighbour, with which it sums beside DDP; or its rows
are longer, which are counted, so that nobody is to be told. Of products and rows, χ is how many times as long they take
or are; of the others, how many times as long the rank's whole step takes. Ranks are even in number. With ``--work
virtual`` a clock that only a step's parts, and reading it, move tells the times, with noise that is drawn: more ranks
than cores and other work on the machine are no matter. With ``--work computing`` products are real ones. ``--slow``
counts steps of a spell, ``--still`` those after it, of which a watch listens to some.
``still``: ``--steps`` without any slow rank. ``cost``: blocks of steps with and without a watch in turn, and without in
turn with without; a block should be long enough for some exchanges.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

import zeroresize as zr
from scripts.bench.common import bootstrap_interval, in_turns, parser_of, pin_to_core, results_of_ranks, run, show
from scripts.bench.paced_training import Training
from zeroresize.measure import clocks
from zeroresize.utils.texts import digits

#: What slows a rank, and what a watch calls it.
CAUSES = {"products": "products", "loader": "loader", "host": "rest", "link": "link", "rows": ""}
_WARM_UP = 2000
#: Of exchanges, after which a watch listens to no more steps than its cost allows.
_FIRST_WINDOWS = 8
Tell = Callable[[Any], None]


@dataclass
class Spell:
    """What became of one time in which a rank was slow."""

    cause: str
    chi: float
    told_after: int | None = None  # steps
    told_after_s: float = 0.0
    told_cause: str = ""
    told_times: float = 1.0
    ended_after: int | None = None
    false_alarms: list[str] = field(default_factory=list)  # what was said, and when


def find(training: Training, arguments: argparse.Namespace, tell: Tell) -> None:
    watch = zr.watch(training.model, training.optimizer, update_every=arguments.update_every)
    for _ in range(_WARM_UP):
        training.step()
    training.pace.step_s = statistics.median(watch.report().busy_s)
    draw = np.random.default_rng(arguments.seed)
    plan = [(cause, chi) for cause in arguments.causes for chi in arguments.chi for _ in range(arguments.repeats)]
    for at in draw.permutation(len(plan)):
        (cause, chi), victim = plan[at], int(draw.integers(dist.get_world_size()))
        tell(run_spell(training, watch, Spell(cause, chi), victim, arguments, draw))
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
    known = set(seen(watch, victim))
    for phase, num_steps in (
        ("before", int(draw.integers(300, 500))),
        ("slow", arguments.slow),
        ("after", arguments.still),
    ):
        if phase == "slow" and dist.get_rank() == victim:
            training.slow(spell.cause, spell.chi)
        if phase == "after":
            training.slow("", 1.0)
        began = clocks.CpuClock().mark()
        for step in range(num_steps):
            watch.count(training.pace.rows)
            training.step()
            slow = seen(watch, victim)
            for new in set(slow) - known:
                if new == victim and phase == "slow":
                    spell.told_after, spell.told_after_s = step + 1, clocks.CpuClock().mark() - began
                else:
                    spell.false_alarms.append(f"{spell.cause} {spell.chi:g}, {phase}, step {step + 1}: {slow[new]}")
            if victim in slow and phase == "slow" and spell.told_after is not None:
                spell.told_cause, spell.told_times = slow[victim].cause, slow[victim].times
            if victim in known - set(slow) and phase == "after":
                spell.ended_after = step + 1
            known = set(slow)
    return spell


def seen(watch: zr.Watch, victim: int) -> dict[int, Any]:
    """Who is slow, by rank: the victim where it is its link, and -1 for what else is told of many."""
    report = watch.report()
    of_many = {victim if each.cause == "link" and victim in each.ranks else -1: each for each in report.past}
    return {slow.rank: slow for slow in report.slow} | of_many


def keep_still(training: Training, arguments: argparse.Namespace, tell: Tell) -> None:
    watch = zr.watch(training.model, training.optimizer, update_every=arguments.update_every)
    num_alarms, known, least, seconds = 0, set[int](), 1.0, list[float]()
    for step in range(arguments.steps):
        began = time.perf_counter()
        training.step()
        seconds.append(time.perf_counter() - began)
        slow = set(seen(watch, -2))
        num_alarms += len(slow - known)
        known = slow
        if step > _WARM_UP and step % 10 == 0:
            least = min(least, *watch.scores)
    watch.close()
    tell((num_alarms, statistics.median(seconds), least))


def measure_cost(training: Training, arguments: argparse.Namespace, tell: Tell) -> None:
    for _ in range(20):
        training.step()

    def block(is_watched: bool) -> tuple[float, ...]:
        """Wall and CPU seconds of a step, by this thread; one of how many steps a watch listened to."""
        watch = None
        if is_watched:
            watch = zr.watch(training.model, training.optimizer, update_every=arguments.update_every)
        for _ in range((_FIRST_WINDOWS if is_watched else 1) * arguments.update_every):
            training.step()
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.thread_time()
        for _ in range(arguments.block):
            training.step()
        elapsed_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
        stride = 0.0
        if watch is not None and watch._slowness is not None:
            stride = float(watch._slowness._sampling._latest)
            watch.close()
        return elapsed_s / arguments.block, cpu_s / arguments.block, stride

    variants = {"plain": lambda: block(False), "again": lambda: block(False), "watched": lambda: block(True)}
    tell(in_turns(variants, arguments.rounds))


RUNS = {"find": find, "still": keep_still, "cost": measure_cost}


def train(rank: int, arguments: argparse.Namespace, tell: Tell) -> None:
    logging.disable(logging.CRITICAL)
    if arguments.work == "computing":
        pin_to_core(rank)
    RUNS[arguments.what](Training(arguments), arguments, tell)


def show_spells(spells: Sequence[Spell], num_ranks: int) -> None:
    rows = []
    for cause, chi in sorted({(spell.cause, spell.chi) for spell in spells}):
        alike = [spell for spell in spells if (spell.cause, spell.chi) == (cause, chi)]
        noticed = [spell for spell in alike if spell.told_after is not None]
        right = sum(spell.told_cause == CAUSES[spell.cause] for spell in noticed)
        rows.append([
            cause, f"{chi:g}", f"{len(noticed)} of {len(alike)}",
            _median_and_most([spell.told_after for spell in noticed]),
            _median_and_most([spell.told_after_s for spell in noticed]),
            ", ".join(sorted({spell.told_cause for spell in noticed})),
            _median_and_most([spell.told_times for spell in noticed]), f"{right} of {len(noticed)}",
            _median_and_most([spell.ended_after for spell in noticed if spell.ended_after is not None]),
            sum(len(spell.false_alarms) for spell in alike),
        ])  # fmt: skip
    headings = [
        "cause",
        "χ",
        "told",
        "after steps",
        "after s",
        "told as",
        "times told",
        "right cause",
        "end told after",
    ]
    show(f"{num_ranks} ranks", [*headings, "false alarms"], rows)
    for alarm in [alarm for spell in spells for alarm in spell.false_alarms]:
        print(alarm)


def _median_and_most(values: Sequence[Any]) -> str:
    return f"{digits(statistics.median(values))} ({digits(max(values))})" if values else ""


def show_cost(rounds: dict[str, Sequence[tuple[float, ...]]]) -> None:
    plain = np.array(rounds["plain"])  # [rounds, 3], as the others
    print(f"a watch listens to one of {np.median(rounds['watched'], axis=0)[2]:g} steps")
    for name, which in (("without a watch, again", "again"), ("with a watch", "watched")):
        for kind, of_kind, base in zip(("wall", "CPU"), np.array(rounds[which]).T, plain.T, strict=False):
            low, high = bootstrap_interval((of_kind / base).tolist())
            print(
                f"{name}, {kind} time: {np.median(of_kind / base):.4f} [{low:.4f}, {high:.4f}] of a step without, "
                f"{1e6 * np.median(of_kind - base):+.0f} µs of {1e3 * np.median(base):.2f} ms"
            )


def main() -> None:
    defaults = {"ranks": [2], "noise": 0.02, "chi": [1.05, 1.1, 1.25, 1.5, 2.0, 4.0], "repeats": 2}
    defaults |= {
        "slow": 4800,
        "still": 3200,
        "steps": 40_000,
        "rounds": 20,
        "block": 200,
        "layers": 2,
        "hidden": 256,
        "tokens": 256,
    }
    parser = parser_of(__doc__, **defaults, update_every=10, seed=0)
    parser.add_argument("what", choices=RUNS)
    parser.add_argument("--work", choices=("virtual", "computing"), default="virtual")
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=list(CAUSES))
    arguments = parser.parse_args()
    for num_ranks in arguments.ranks:
        number = len(arguments.causes) * len(arguments.chi) * arguments.repeats if arguments.what == "find" else 1
        results = results_of_ranks(train, num_ranks, arguments, number)
        if arguments.what == "find":
            show_spells(results, num_ranks)
        elif arguments.what == "still":
            num_alarms, step_s, least = results[0]
            print(f"{num_ranks} ranks, {arguments.steps} steps of {1e3 * step_s:.2f} ms: {num_alarms} alarms, "
                  f"least score {least:.3f}")  # fmt: skip
        else:
            show_cost(results[0])


if __name__ == "__main__":
    run(main)
