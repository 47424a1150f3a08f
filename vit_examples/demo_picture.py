"""The demo's picture: step time over steps for every run, and below it what the straggler does not compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vit_examples.step_times import TimedSteps, timed_steps

#: First steps of each start that may leave the picture at the top.
WARM_UP = 3


def save_picture(path: Path, results: dict[str, dict[str, Any]], *, straggler: int) -> None:
    """Draw ``results`` (by run name: ``lines`` of metrics.jsonl) into ``path``; ``straggler`` is a rank."""
    figure = draw(results, straggler=straggler)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw(results: dict[str, dict[str, Any]], *, straggler: int) -> Figure:
    """Step times of every run above; below, of those that move, lend or prune, what the straggler is relieved of."""
    figure, (times, ratios) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
    )
    timed = {name: timed_steps(result["lines"]) for name, result in results.items()}
    for name, result in results.items():
        color = _draw_times(times, name, timed[name])
        _draw_ratios(ratios, name, color, result["lines"], straggler)
    times.set_ylabel("step time, ms")
    settled = [
        1e3 * step.seconds
        for steps in timed.values()
        for step in steps
        if step.seconds is not None and step.begin - step.from_step >= WARM_UP
    ]
    times.set_ylim(0, 1.05 * max(settled, default=1.0))
    times.set_title(f"One tensor-parallel step, rank {straggler} slowed (homogeneous: not slowed)")
    ratios.set_ylabel(f"share of rank {straggler}'s work\nthat others do or nobody")
    ratios.set_ylim(-0.02, 1.02)
    ratios.set_xlabel("optimizer step")
    ratios.set_xlim(0, max((steps[-1].end for steps in timed.values() if steps), default=1))
    ratios.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (times, ratios):
        axes.grid(alpha=0.3)
    if times.lines:
        figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=len(results))
    return figure


def _draw_times(axes: Axes, name: str, timed: Sequence[TimedSteps]) -> Any:
    """A line that is broken where a process went on; gives its color."""
    middles, step_ms = [], []
    for before, after in zip([None, *timed], timed, strict=False):
        if before is not None and before.from_step != after.from_step:
            middles.append(float(after.begin))
            step_ms.append(float("nan"))
        middles.append((after.begin + after.end) / 2)
        step_ms.append(float("nan") if after.seconds is None else 1e3 * after.seconds)
    (curve,) = axes.plot(middles, step_ms, label=name, linewidth=1.2)
    return curve.get_color()


def _draw_ratios(axes: Axes, name: str, color: Any, lines: Sequence[dict[str, Any]], straggler: int) -> None:
    ends = [line["step"] + 1 for line in lines if line["kind"] == "step"]  # a line's plan is in force after its step
    relieved = [ranks[straggler] for line in lines if line["kind"] == "epoch" for ranks in line["ratios"]]
    if any(share > 0 for share in relieved):
        axes.plot(ends[: len(relieved)], relieved, color=color, label=name, drawstyle="steps-post")
