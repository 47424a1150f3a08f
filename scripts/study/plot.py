"""Draws a study: python -m scripts.study.plot docs/results/fig10.csv --x χ

Mean step time (of rows that lack it: the median step) and test accuracy, mean and standard deviation over the seeds,
against a quantity that the cells' names tell: ``SEMI χ=4`` is the point χ = 4 of the line SEMI, and
``Pri γ=9/10 all`` the point γ = 0.9 of the line ``Pri all``. A cell whose name does not tell it, such as Baseline, is
drawn across. With ``--rounding`` accuracy is drawn against that of Baseline with the same seed, and of trainings that
differ from Baseline in rounding alone as a band: no exact solution can be nearer.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.study.__main__ import read_table, step_column

#: [cells] of a line: where it is drawn, None for across, and the rows of its seeds.
Lines = dict[str, list[tuple[float | None, list[dict[str, str]]]]]


def place_of(cell: str, x: str) -> tuple[str, float | None]:
    """The line and the place on it that a cell's name tells."""
    match = re.search(rf"\b{re.escape(x)}=([\d./]+)", cell)
    if match is None:
        return cell, None
    line = f"{cell[: match.start()]}{cell[match.end() :]}"
    try:
        place = float(Fraction(match[1]))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"cell {cell!r}: {x}={match[1]} is no number") from error
    return re.sub(r"\s+", " ", line).strip(" ,"), place


def lines_of(rows: list[dict[str, str]], x: str) -> Lines:
    """The cells of a study's rows.

    Raises:
        ValueError: if no cell's name tells ``x``.
    """
    lines: Lines = {}
    for cell in dict.fromkeys(row["cell"] for row in rows):
        line, place = place_of(cell, x)
        lines.setdefault(line, []).append((place, [row for row in rows if row["cell"] == cell]))
    if all(place is None for cells in lines.values() for place, _ in cells):
        raise ValueError(f"no cell's name holds '{x}=' and a number; there are {list(lines)[:5]}")
    return lines


def against_baseline(rows: list[dict[str, str]], rounding: list[dict[str, str]]) -> list[dict[str, str]]:
    """Accuracy less that of Baseline with the same seed; in place of its own that of the trainings ``rounding``."""
    baseline = {row["seed"]: float(row["test_accuracy"]) for row in rows if row["cell"].startswith("Baseline")}
    if missing := {row["seed"] for row in rows + rounding} - baseline.keys():
        raise ValueError(f"there is no Baseline with the seeds {sorted(missing)}")

    def less(row: dict[str, str]) -> str:
        return str(float(row["test_accuracy"]) - baseline[row["seed"]])

    solutions = [{**row, "test_accuracy": "" if row["cell"].startswith("Baseline") else less(row)} for row in rows]
    alike = [{"cell": "Baseline, rounding alone", "seed": row["seed"], "test_accuracy": less(row)} for row in rounding]
    return solutions + alike


def draw(rows: list[dict[str, str]], x: str, accuracy: str = "test accuracy, %") -> Figure:
    """One panel a quantity."""
    lines, (column, label) = lines_of(rows, x), step_column(rows)
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    draw_lines(panels[0], lines, column, 1.0)
    draw_lines(panels[1], lines, "test_accuracy", 100.0)
    for axes, quantity in zip(panels, (f"{label}, ms", accuracy), strict=True):
        axes.set(xlabel=x, ylabel=quantity)
    panels[0].set_ylim(bottom=0)
    handles = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="outside right center", fontsize="small")
    return figure


def draw_lines(axes: Axes, lines: Lines, name: str, factor: float) -> None:
    """A column of the rows: lines with error bars, and lines across with a band."""
    for number, (line, cells) in enumerate(lines.items()):
        color = f"C{number % 10}"
        with_it = [(place, of_cell) for place, of_cell in cells if any(row.get(name) for row in of_cell)]
        drawn = [(place, *_mean_and_spread(of_cell, name, factor)) for place, of_cell in with_it]
        if points := sorted(point for point in drawn if point[0] is not None):
            places, means, spreads = zip(*points, strict=True)
            axes.errorbar(places, means, yerr=spreads, label=line, color=color, marker="o", capsize=3)
        for _, mean, spread in (point for point in drawn if point[0] is None):
            axes.axhline(mean, label=line, color=color, linestyle="--", linewidth=1)
            axes.axhspan(mean - spread, mean + spread, color=color, alpha=0.12)
    axes.grid(alpha=0.3)


def _mean_and_spread(rows: list[Mapping[str, Any]], name: str, factor: float) -> tuple[float, float]:
    values = [factor * float(row[name]) for row in rows if row.get(name)]
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="a CSV file of scripts.study")
    parser.add_argument("--x", default="χ", help="what the cells' names tell, such as χ or γ")
    parser.add_argument(
        "--rounding", type=Path, metavar="TABLE", help="of trainings that differ from Baseline in it alone"
    )
    parser.add_argument("--only", default="", help="cells whose names match this regular expression")
    parser.add_argument("--output", type=Path, help="the picture (default: beside the table, as PNG)")
    options = parser.parse_args()
    output = options.output or options.table.with_suffix(".png")
    try:
        rows = [row for row in read_table(options.table) if re.search(options.only, row["cell"])]
        accuracy = "test accuracy, %"
        if options.rounding is not None:
            rows = against_baseline(rows, read_table(options.rounding))
            accuracy = "test accuracy against Baseline, points"
        draw(rows, options.x, accuracy).savefig(output, dpi=130)
    except (ValueError, OSError, re.error) as error:
        sys.exit(f"error: {options.table}: {error}")
    print(f"written to {output}")


if __name__ == "__main__":
    main()
