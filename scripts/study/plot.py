"""Draws a study: python -m scripts.study.plot docs/results/fig10.csv --x χ

Mean step time (of rows that lack it: the median step) and test accuracy, mean and standard deviation over the seeds,
against a quantity that the cells' names tell: ``SEMI χ=4`` is the point χ = 4 of the line SEMI, and
``Pri γ=9/10 all`` the point γ = 0.9 of the line ``Pri all``. A cell whose name does not tell it, such as Baseline, is
drawn across.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts.study.columns import read_table, step_time

NEEDED_COLUMNS = ("cell", "step_ms", "test_accuracy")


@dataclass(frozen=True)
class Point:
    """One cell: where it is drawn, and its values, one a seed.

    Attributes:
        x: None for a line across.
        values: by the label of the axis that shows them, the same labels for every cell.
    """

    line: str
    x: float | None
    values: dict[str, tuple[float, ...]]


def read_points(table: Path, x: str, only: str = "") -> list[Point]:
    """The cells of a study's table whose names match ``only``, in its order.

    Raises:
        ValueError: if no cell's name tells ``x``, or it is no study's table.
    """
    try:
        wanted = re.compile(only)
    except re.error as error:
        raise ValueError(f"--only {only!r}: not a regular expression: {error}") from error
    rows = [row for row in read_table(table, NEEDED_COLUMNS) if wanted.search(row["cell"])]
    by_cell: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        by_cell[row["cell"]].append(row)
    step_column, step_label = step_time(rows)
    points = []
    for cell, rows in by_cell.items():
        values = {
            f"{step_label}, ms": tuple(float(row[step_column]) for row in rows if row.get(step_column)),
            "test accuracy, %": tuple(100 * float(row["test_accuracy"]) for row in rows if row["test_accuracy"]),
        }
        points.append(Point(*place_of(cell, x), values))
    if all(point.x is None for point in points):
        raise ValueError(f"{table}: no cell's name holds '{x}=' and a number; there are {list(by_cell)[:5]}")
    return points


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


def draw(points: list[Point], x: str) -> Figure:
    """One panel a quantity."""
    quantities = list(points[0].values)
    figure, panels = pyplot.subplots(1, len(quantities), figsize=(12, 4.5), layout="constrained")
    for axes, label in zip(panels, quantities, strict=True):
        draw_quantity(axes, points, label)
        axes.set_xlabel(x)
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylim(bottom=0)
    lines = {
        label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(lines.values(), lines, loc="outside right center", fontsize="small")
    return figure


def draw_quantity(axes: Axes, points: list[Point], quantity: str) -> None:
    """Lines with error bars, and lines across with a band."""
    for number, line in enumerate(dict.fromkeys(point.line for point in points)):
        color = f"C{number % 10}"
        line_points = sorted((point.x, *summary(point.values[quantity])) for point in points
                     if point.line == line and point.x is not None and point.values[quantity])  # fmt: skip
        if line_points:
            places, means, spreads = zip(*line_points, strict=True)
            axes.errorbar(places, means, yerr=spreads, label=line, color=color, marker="o", capsize=3, linewidth=1.2)
            continue
        for point in points:
            if point.line == line and point.values[quantity]:
                mean, spread = summary(point.values[quantity])
                axes.axhline(mean, label=line, color=color, linestyle="--", linewidth=1)
                axes.axhspan(mean - spread, mean + spread, color=color, alpha=0.12)


def summary(values: tuple[float, ...]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="a CSV file of scripts.study")
    parser.add_argument("--x", default="χ", help="what the cells' names tell, such as χ, γ or λ")
    parser.add_argument("--only", default="", help="cells whose names match this regular expression")
    parser.add_argument("--output", type=Path, help="the picture (default: beside the table, as PNG)")
    arguments = parser.parse_args()
    try:
        points = read_points(arguments.table, arguments.x, only=arguments.only)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    output = arguments.output or arguments.table.with_suffix(".png")
    figure = draw(points, arguments.x)
    try:
        figure.savefig(output, dpi=130)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {output}: cannot be written: {error}")
    pyplot.close(figure)
    print(f"written to {output}")


if __name__ == "__main__":
    main()
