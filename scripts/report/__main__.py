"""Compares runs of vit_examples.train by a table and a picture: python -m scripts.report runs/demo

A row for each run in the folders below, also while it still runs: its steps, how many times as fast as the run in mode
"off" with the same settings and stragglers, its accuracy, and what was moved, lent and dropped of an even share of the
products, mean over all steps, of the rank of which most was. The picture shows the steps of all runs, and how much was
taken off the rank that was relieved most. Times leave out the first steps of each start, which warm up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from scripts.report.runs import PARTS, Run, references_of, runs_at

HEADINGS = ("run", "steps", "median step, ms", "mean step, ms", "speed-up", "accuracy", *PARTS)
#: Steps of a median that a line is drawn through.
_WINDOW = 5


def rows_of(runs: Sequence[Run]) -> list[list[str]]:
    """One row a run, as ``HEADINGS`` say."""
    rows = []
    for run in runs:
        speed, accuracy = run.speed(), run.summary.get("test_accuracy")
        references = [reference.speed()["step_ms"] for reference in references_of(runs, run)]
        rows.append(
            [
                run.name,
                str(run.num_steps) if run.summary else f"{run.num_steps}, not ended",
                *(f"{speed[name]:.1f}" for name in ("step_ms", "mean_step_ms")),
                f"{statistics.fmean(references) / speed['step_ms']:.2f}×" if references else "–",
                f"{100 * accuracy:.1f} %" if isinstance(accuracy, int | float) else "–",
                *(f"{share:.2f}" for share in run.parts().values()),
            ]
        )
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [HEADINGS, ["---", *["---:"] * (len(HEADINGS) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture_of(runs: Sequence[Run]) -> Figure:
    """Step times, and what was taken off the rank that was relieved most, over steps; a line a run."""
    figure, (times, parts) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 7), layout="constrained")
    for number, run in enumerate(runs):
        seconds = [steps.seconds for steps in run.timed]
        usual = [statistics.median(seconds[max(at - _WINDOW + 1, 0) : at + 1]) for at in range(len(seconds))]
        color = f"C{number % 10}"
        times.plot([steps.end for steps in run.timed], [1e3 * step_s for step_s in usual], color=color, label=run.name)
        rank = run.most_relieved()
        begins, _ = run.plans(rank, "moved")
        relieved = [sum(shares) for shares in zip(*(run.plans(rank, part)[1] for part in PARTS), strict=True)]
        steps, values = [*begins, max(run.num_steps, begins[-1])], [*relieved, relieved[-1]]
        parts.plot(steps, values, color=color, drawstyle="steps-post")
    times.set(ylabel=f"step, ms (median of {_WINDOW})")
    times.set_ylim(bottom=0)
    parts.set(ylabel="moved, lent and dropped\nof the most relieved rank", xlabel="optimizer step", ylim=(-0.02, 1.02))
    parts.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (times, parts):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, fontsize="small")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the output folder of a run, or one with such folders below it")
    parser.add_argument("--output", type=Path, help="the picture (default: report.png in that folder)")
    options = parser.parse_args(arguments)
    runs, left_out = runs_at(options.folder)
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr)
    if not runs:
        sys.exit(f"error: {options.folder}: no run there can be read; give output folders of vit_examples.train")
    output = options.output or options.folder / "report.png"
    figure = picture_of(runs)
    try:
        figure.savefig(output, dpi=130)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {output}: cannot be written: {error}")
    pyplot.close(figure)
    print(markdown(rows_of(runs)))
    print(f"\npicture: {output}")


if __name__ == "__main__":
    main()
