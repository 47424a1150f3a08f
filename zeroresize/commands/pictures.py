"""Pictures of a run as SVG, by matplotlib; ranks differ by line and hatch, so that they read in grey."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zeroresize.commands.statuses import changes_of, of_all_ranks
from zeroresize.status import Status
from zeroresize.utils.extras import need

_LINES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 3)), (0, (7, 2, 1, 2)), (0, (3, 1, 1, 1)))
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--")
#: Of so many ranks each has a line of its own; of more only those that were slow have, and the middle of all.
_MOST_LINES = 8
_INCHES, _MOST_LETTERS = (8.0, 2.6), 18


def drawn(draw: Callable[[Any], None], title: str, ylabel: str) -> str:
    """Return an SVG with this title, which screen readers read, of what ``draw`` draws on axes over steps."""
    matplotlib = need("matplotlib", "report")
    figures = need("matplotlib.figure", "report")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "zeroresize", "font.size": 9, "hatch.linewidth": 0.5}
    with matplotlib.rc_context(settings):
        figure = figures.Figure(figsize=_INCHES)
        axes = figure.subplots(gridspec_kw={"left": 0.08, "right": 0.8, "bottom": 0.18})  # alike, one below the other
        draw(axes)
        axes.set(xlabel="step", ylabel=ylabel, title=title)
        axes.margins(x=0.0)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    begin = svg.index(">", svg.index("<svg")) + 1
    return f'{svg[svg.index("<svg") : begin - 1]} role="img"><title>{title}</title>{svg[begin:]}'


def of_steps(statuses: Sequence[Status]) -> str:
    """What steps took, and would have taken as the host divides work."""
    steps = [status.step for status in statuses]

    def draw(axes: Any) -> None:
        axes.plot(steps, [1e3 * status.step_s for status in statuses], "k-", lw=1.4, label="measured")
        even_ms = [1e3 * status.even_step_s for status in statuses]
        if not all(map(math.isnan, even_ms)):
            axes.plot(steps, even_ms, color="0.5", ls="--", lw=1.2, label="if divided evenly")
        axes.set_ylim(bottom=0.0)
        for _, status in changes_of(statuses):
            axes.axvline(status.step, color="0.7", lw=0.6)

    return drawn(draw, "Step time, with a line where work was divided otherwise", "milliseconds")


def of_runs(runs: Mapping[str, Sequence[Status]]) -> str:
    """What steps took in several runs, by their names."""

    def draw(axes: Any) -> None:
        for place, (name, statuses) in enumerate(runs.items()):
            steps_ms = [1e3 * status.step_s for status in statuses]
            label = name if len(name) <= _MOST_LETTERS else f"…{name[1 - _MOST_LETTERS :]}"
            axes.plot([status.step for status in statuses], steps_ms, label=label, **_line(place))
        axes.set_ylim(bottom=0.0)

    return drawn(draw, "Step time of each run", "milliseconds")


def of_ranks(statuses: Sequence[Status], what: str, title: str, ylabel: str) -> str:
    """One number of each rank over steps, or of those that were slow, where there are many."""
    known = of_all_ranks(statuses)
    ranks = chosen_ranks(known)

    def draw(axes: Any) -> None:
        steps = [status.step for status in known]
        for place, rank in enumerate(ranks):
            numbers = [getattr(status.ranks[rank], what) for status in known]
            axes.plot(steps, numbers, label=f"rank {rank}", **_line(place))
        axes.set_ylim(bottom=0.0)

    return drawn(draw, title, ylabel)


def _line(place: int) -> dict[str, Any]:
    return {"color": str(0.6 * (place % 4) / 3), "ls": _LINES[place % len(_LINES)], "lw": 1.4}


def of_shares(statuses: Sequence[Status]) -> str:
    """Where the work is: each rank's share, one on the other."""
    known = of_all_ranks(statuses)
    num_ranks = len(known[-1].ranks)
    if num_ranks > _MOST_LINES:
        return of_ranks(statuses, "share", "Work of each rank, of an even share", "share")

    def draw(axes: Any) -> None:
        shares = [[status.ranks[rank].share for status in known] for rank in range(num_ranks)]
        greys = [str(0.95 - 0.5 * (rank % 3) / 2) for rank in range(num_ranks)]
        labels = [f"rank {rank}" for rank in range(num_ranks)]
        areas = axes.stackplot([status.step for status in known], shares, colors=greys, labels=labels)
        for area, hatch in zip(areas, _HATCHES, strict=False):
            area.set(hatch=hatch, edgecolor="0.2", linewidth=0.5)
        axes.set_ylim(0.0, num_ranks)

    return drawn(draw, "Where the work is", "even shares")


def chosen_ranks(statuses: Sequence[Status]) -> list[int]:
    """Ranks that a picture shows: all, or where these are many those that were slow, and the fastest."""
    num_ranks = len(statuses[-1].ranks)
    if num_ranks <= _MOST_LINES:
        return list(range(num_ranks))
    slow = {each.rank for status in statuses for each in status.ranks if each.slow_since is not None}
    fastest = max(statuses[-1].ranks, key=lambda each: each.speed).rank
    return sorted({*sorted(slow)[: _MOST_LINES - 1], fastest})
