"""The demo's picture: step time over steps for every run, and γ of the straggler below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def save_picture(path: Path, results: dict[str, dict[str, Any]], *, straggler: int) -> None:
    """Draw ``results`` (by run name: ``lines`` of metrics.jsonl) into ``path``; ``straggler`` is a rank."""
    figure = draw(results, straggler=straggler)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw(results: dict[str, dict[str, Any]], *, straggler: int) -> Figure:
    """Step times of every run above, γ of those that prune below."""
    figure, (times, ratios) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
    )
    for name, result in results.items():
        _draw_run(times, ratios, name, result["lines"], straggler)
    times.set_ylabel("step time, ms")
    first = [line.get_ydata()[1:] for line in times.lines]  # the first step warms up
    times.set_ylim(0, 1.25 * max((max(values) for values in first if len(values)), default=1.0))
    times.set_title(f"One tensor-parallel step, rank {straggler} slowed (homogeneous: not slowed)")
    ratios.set_ylabel(f"share of rank {straggler}'s work\nthat others do or nobody")
    ratios.set_ylim(-0.02, 1.02)
    ratios.set_xlabel("optimizer step")
    for axes in (times, ratios):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="upper right")
    return figure


def _draw_run(times: Axes, ratios: Axes, name: str, lines: list[dict[str, Any]], straggler: int) -> None:
    steps = [line for line in lines if line["kind"] == "step" and line["step_s"] is not None]
    numbers = [line["step"] for line in steps]
    (curve,) = times.plot(numbers, [1e3 * line["step_s"] for line in steps], label=name, linewidth=1.2)
    gammas = [ranks[straggler] for line in lines if line["kind"] == "epoch" for ranks in line["ratios"]]
    if any(gamma > 0 for gamma in gammas):
        gammas = gammas[: len(numbers)]
        ratios.plot(numbers, gammas, color=curve.get_color(), label=name, drawstyle="steps-post")
