"""Pictures of a run as SVG, by matplotlib; ranks differ by line and hatch, so that they read in grey."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from zeroresize.commands.statuses import changes_of, of_all_ranks
from zeroresize.status import Status
from zeroresize.utils.extras import need

_LINES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 3)), (0, (7, 2, 1, 2)), (0, (3, 1, 1, 1)))
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--")
#: Of so many ranks each has a line of its own; of more only those that were slow have, and the middle of all.
_MOST_LINES = 8
_INCHES = (8.0, 2.6)
#: Of a line of a legend beside the picture.
_MOST_CHARACTERS = 18


@contextmanager
def _axes(svgs: list[str], title: str, ylabel: str) -> Iterator[Any]:
    """Axes over steps, whose SVG is put into ``svgs``; screen readers read its title."""
    matplotlib = need("matplotlib", "report")
    figures = need("matplotlib.figure", "report")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "zeroresize", "font.size": 9, "hatch.linewidth": 0.5}
    with matplotlib.rc_context({**settings, "text.parse_math": False}):  # names may have a $
        figure = figures.Figure(figsize=_INCHES)
        axes = figure.subplots(gridspec_kw={"left": 0.08, "right": 0.8, "bottom": 0.18})  # alike, one below the other
        yield axes
        axes.set(xlabel="step", ylabel=ylabel, title=title)
        axes.set_ylim(bottom=0.0)
        axes.margins(x=0.0)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    svgs.append(buffer.getvalue().partition("\n<svg")[2].join(('<svg role="img"', "")))


def _line(place: int) -> dict[str, Any]:
    return {"color": str(0.6 * (place % 4) / 3), "ls": _LINES[place % len(_LINES)], "lw": 1.4}


def of_run(statuses: Sequence[Status]) -> list[str]:
    """What steps took, and would have taken as the host divides work; ranks' speeds, and where the work is."""
    svgs: list[str] = []
    with _axes(svgs, "Step time, with a line where work was divided otherwise", "milliseconds") as axes:
        steps = [status.step for status in statuses]
        axes.plot(steps, [1e3 * status.step_s for status in statuses], "k-", lw=1.4, label="measured")
        even_ms = [1e3 * status.even_step_s for status in statuses]
        if not all(map(math.isnan, even_ms)):
            axes.plot(steps, even_ms, color="0.5", ls="--", lw=1.2, label="if divided evenly")
        for _, status in changes_of(statuses):
            axes.axvline(status.step, color="0.7", lw=0.6)
    known = of_all_ranks(statuses)
    if not known:
        return svgs
    steps, ranks = [status.step for status in known], chosen_ranks(known)
    labels = [f"rank {rank}" for rank in ranks]
    with _axes(svgs, "Speed of each rank, of the fastest", "speed") as axes:
        for place, rank in enumerate(ranks):
            axes.plot(steps, [status.ranks[rank].speed for status in known], label=labels[place], **_line(place))
    shares = [[status.ranks[rank].share for status in known] for rank in ranks]
    if statuses[-1].kind == "nothing" or any(map(math.isnan, chain(*shares))):
        return svgs
    if len(known[-1].ranks) > _MOST_LINES:
        with _axes(svgs, "Work of each rank, of an even share", "share") as axes:
            for place, of_rank in enumerate(shares):
                axes.plot(steps, of_rank, label=labels[place], **_line(place))
        return svgs
    with _axes(svgs, "Where the work is", "even shares") as axes:
        greys = [str(0.95 - 0.5 * (rank % 3) / 2) for rank in ranks]
        for area, hatch in zip(axes.stackplot(steps, shares, colors=greys, labels=labels), _HATCHES, strict=False):
            area.set(hatch=hatch, edgecolor="0.2", linewidth=0.5)
        axes.set_ylim(top=len(ranks))
    return svgs


def of_runs(runs: Mapping[str, Sequence[Status]]) -> str:
    """What steps took in several runs, by their names."""
    svgs: list[str] = []
    with _axes(svgs, "Step time of each run", "milliseconds") as axes:
        for place, (name, statuses) in enumerate(runs.items()):
            steps_ms = [1e3 * status.step_s for status in statuses]
            label = textwrap.fill(f"run {name}", _MOST_CHARACTERS)  # what begins with _ is in no legend
            axes.plot([status.step for status in statuses], steps_ms, label=label, **_line(place))
    return svgs[0]


def chosen_ranks(statuses: Sequence[Status]) -> list[int]:
    """Ranks that a picture shows: all, or where these are many those that were slow, and the fastest."""
    num_ranks = len(statuses[-1].ranks)
    if num_ranks <= _MOST_LINES:
        return list(range(num_ranks))
    slow = {each.rank for status in statuses for each in status.ranks if each.slow_since is not None}
    fastest = max(statuses[-1].ranks, key=lambda each: each.speed).rank
    return sorted({*sorted(slow)[: _MOST_LINES - 1], fastest})
