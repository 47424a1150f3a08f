"""Draws docs/overview.png from fig10.csv, fig10_exact.csv and fig10_rounding.csv: python docs/draw_overview.py

Step time and accuracy of the solutions against χ: means over three seeds, with their standard deviation. Each study is
compared with its own Baseline. The band is mean and standard deviation of trainings without balancing that differ from
Baseline in rounding alone, by a learning rate changed by a ten-millionth: no exact solution can be nearer.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

HERE = Path(__file__).parent
SKEWNESSES = (1, 2, 4, 8)
#: Line of a table → (label, colour); the colours are told apart by the colour-blind.
LINES = {
    "Baseline": ("no balancing", "#555555"),
    "exact": ("exact (the default)", "#CC79A7"),
    "MIG": ("mig", "#0072B2"),
    "SEMI": ("semi, nothing moves", "#009E73"),
    "ZERO-PriDiffR": ("zero-pridiff", "#D55E00"),
}
Values = dict[tuple[str, int], dict[str, tuple[float, float]]]


def read_values(table: Path) -> Values:
    """(mean step in ms, test accuracy in %) by line and χ, then by seed."""
    values: Values = defaultdict(dict)
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            line, _, chi = row["cell"].partition(" χ=")
            values[line, int(chi)][row["seed"]] = float(row["mean_step_ms"]), 100 * float(row["test_accuracy"])
    return values


def rounding_alone(baseline: dict[str, tuple[float, float]]) -> list[float]:
    """How many points of accuracy trainings that differ from Baseline in rounding alone lie above it."""
    with (HERE / "results" / "fig10_rounding.csv").open(newline="", encoding="utf-8") as file:
        return [100 * float(row["test_accuracy"]) - baseline[row["seed"]][1] for row in csv.DictReader(file)]


def draw_line(axes: Axes, line: str, points: list[list[float]]) -> None:
    label, colour = LINES[line]
    means = [statistics.fmean(own) for own in points]
    spreads = [statistics.stdev(own) for own in points]
    style = "--" if line == "Baseline" else "-"
    axes.errorbar(SKEWNESSES, means, yerr=spreads, label=label, color=colour, linestyle=style, marker="o", capsize=3)


def main() -> None:
    figure, (times, losses) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    four, exact = (read_values(HERE / "results" / name) for name in ("fig10.csv", "fig10_exact.csv"))
    for line in LINES:
        values = exact if line == "exact" else four
        undisturbed = values["Baseline", 1]
        undisturbed_ms = statistics.fmean(step_ms for step_ms, _ in undisturbed.values())
        draw_line(times, line, [[ms / undisturbed_ms for ms, _ in values[line, chi].values()] for chi in SKEWNESSES])
        if line != "Baseline":
            # Against Baseline's of the same seed, which χ does not change: seeds differ more than solutions do.
            draw_line(
                losses,
                line,
                [
                    [accuracy - undisturbed[seed][1] for seed, (_, accuracy) in values[line, chi].items()]
                    for chi in SKEWNESSES
                ],
            )
    times.set_title("mean step time (1 = nobody slow)")
    times.set_ylim(bottom=0)
    losses.set_title("test accuracy against no balancing, points")
    alike = rounding_alone(four["Baseline", 1])
    mean, spread = statistics.fmean(alike), statistics.stdev(alike)
    band = losses.axhspan(mean - spread, mean + spread, color="#555555", alpha=0.2)
    losses.axhline(mean, color="#555555", linestyle="--", linewidth=1)
    losses.legend([band], ["no balancing, rounding alone"], frameon=False)
    for axes in (times, losses):
        axes.set_xscale("log", base=2)
        axes.set_xticks(SKEWNESSES, [f"{chi}×" for chi in SKEWNESSES])
        axes.set_xlabel("how slow one of two ranks is (χ)")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    times.legend(frameon=False)
    figure.savefig(HERE / "overview.png", dpi=110, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
