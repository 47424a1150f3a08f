"""Balancing in scenarios of a simulated cluster, side by side: python -m scripts.bench.scenarios

The policy code of training meets stragglers that come and go, noise of several kinds, calibrations that were wrong,
groups of 2 to 64 ranks, and intervals of 1 to 10 steps; each line in 8 runs with other noise (``--seeds``), or in two
with ``--quick``, which has fewer lines. To compare two versions write the older one's figures with ``--csv``, and give
that file to the newer one's ``--before``: what was otherwise stands in brackets.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.common import counted, parser_of, run, show
from scripts.simulated.figures import Figures, mean_figures
from scripts.simulated.scenario import CALIBRATIONS, COURSES, NOISES, Scenario
from zeroresize.config import BalanceConfig

MODES = ("zero-pri", "mig", "semi")
OSCILLATING = ("each in turn, 1 update", "2 updates on, 2 off", "1 update on, 3 off")
Lines = list[tuple[Scenario, str]]


def sections(quick: bool) -> dict[str, Lines]:
    """All lines; ``quick`` leaves out what is between the ends of a range."""
    ranks, cadences = ((2, 64), (1, 10)) if quick else ((2, 4, 8, 16, 64), (1, 2, 4, 10))
    deviations, watched = (0.05,) if quick else (0.02, 0.05, 0.1), ("nobody slow", "χ=4")
    factors = (0.5, 2.0) if quick else (0.5, 2**-0.5, 2**0.5, 2.0)

    def lines(scenarios: Iterator[Scenario], modes: Sequence[str] = MODES) -> Lines:
        return [(scenario, mode) for scenario in scenarios for mode in modes]

    return {
        "courses": lines(Scenario(course) for course in COURSES),
        "ranks": lines(Scenario(course, num) for course, num in itertools.product(watched, ranks)),
        "cadence": lines(
            Scenario(course, update_every=every)
            for course, every in itertools.product((*watched, *OSCILLATING), cadences)
        ),
        "noise": lines(
            Scenario(course, noise=noise, deviation=deviation)
            for course, noise, deviation in itertools.product(("nobody slow", "χ=2"), NOISES, deviations)
        ),
        "noise at short intervals": lines(
            Scenario("nobody slow", update_every=every, noise=noise, deviation=deviation)
            for every, noise, deviation in itertools.product(cadences[:-1], NOISES, deviations)
        ),
        "calibration": lines(
            (
                Scenario("χ=4", update_every=every, calibration=calibration, factor=factor)
                for every, calibration, factor in itertools.product(cadences, CALIBRATIONS, factors)
            ),
            ("zero-pri", "semi"),
        ),
        "few products": lines(Scenario("χ=2.5", num, rest_share=rest) for num, rest in ((2, 0.9), (8, 0.9), (2, 0.6))),
    }


def as_row(section: str, scenario: Scenario, mode: str, mean: Figures) -> dict[str, Any]:
    """What is written of a line of the table; medians of release leave out ranks that were never released."""
    finite = [updates for updates in mean.released if updates < math.inf]
    return {
        "section": section,
        "scenario": scenario.course,
        "mode": mode,
        "ranks": scenario.num_ranks,
        "every": scenario.update_every,
        "noise": f"{scenario.noise} {100 * scenario.deviation:g} %",
        "calibration": "right" if scenario.factor == 1.0 else f"{scenario.calibration} × {scenario.factor:.2f}",
        "products": round(1.0 - scenario.rest_share, 6),
        "step / off": mean.step_per_off,
        "step / homogeneous": mean.step,
        "false starts": mean.false_starts,
        "spared falsely": mean.falsely_spared,
        "at most": mean.most_falsely_spared,
        "settled, median": statistics.median(mean.settled or [math.nan]),
        "settled, worst": max(mean.settled, default=math.nan),
        "swing": mean.swing,
        "released, median": statistics.median(finite or [math.nan]),
        "released, worst": max(finite, default=math.nan),
        "never released": sum(updates == math.inf for updates in mean.released),
        "recoveries": len(mean.released),
        "dropped": mean.pruned,
        "lent": mean.lent,
    }


#: Columns that tell which line it is, and those that the table shows beside them.
KEYS = ("section", "scenario", "mode", "ranks", "every", "noise", "calibration", "products")
SHOWN = (
    "step / off", "step / homogeneous", "false starts", "spared falsely", "settled, median", "settled, worst", "swing",
    "released, median", "released, worst", "never released", "dropped", "lent",
)  # fmt: skip


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in KEYS)


def print_table(rows: Sequence[dict[str, Any]], before: dict[tuple[str, ...], dict[str, str]]) -> None:
    """The table, section by section; in brackets what it was before, where that differs."""
    for section, rows_of_section in itertools.groupby(rows, key=lambda row: row["section"]):
        lines = []
        for row in rows_of_section:
            pairs = zip(cells(row), cells(before.get(key_of(row), row)), strict=True)
            lines.append([*key_of(row)[1:], *(new if new == old else f"{new} ({old})" for new, old in pairs)])
        show(section, (*KEYS[1:], *SHOWN), lines)


def cells(row: dict[str, Any]) -> list[str]:
    """The figures of a row as the table shows them, from numbers or from what a CSV file says."""
    return [f"{float(row[name]):.3f}" for name in SHOWN]


def main() -> None:
    parser = parser_of(__doc__, quick=False, seeds=0)
    parser.add_argument("--only", nargs="+", choices=sections(quick=True), help="sections")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--csv", type=Path, help="write the figures here, unrounded")
    parser.add_argument("--before", type=Path, help="a CSV file of another version, to compare with")
    arguments = parser.parse_args()
    seeds, before = arguments.seeds or (2 if arguments.quick else 8), {}
    configs = {mode: BalanceConfig(mode=mode) for mode in MODES}
    if arguments.before:
        before = {key_of(row): row for row in csv.DictReader(arguments.before.read_text("utf-8").splitlines())}
    chosen = [
        (section, scenario, mode)
        for section, lines in sections(arguments.quick).items()
        if section in (arguments.only or [section])
        for scenario, mode in lines
        if mode in arguments.modes
    ]
    if not chosen:
        parser.error(f"sections {arguments.only} have no line with modes {arguments.modes}: choose others")
    rows = [
        as_row(*line, mean_figures([line[1].figures(configs[line[2]], seed) for seed in range(seeds)]))
        for line in counted(chosen)
    ]
    print_table(rows, before)
    if arguments.csv:
        with arguments.csv.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    run(main)
