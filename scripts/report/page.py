"""The HTML of the report: one page of one run, or of many with a comparison first."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from scripts.report.compare import HEADINGS as COMPARED
from scripts.report.compare import NamedRun, compared_with, comparison_rows
from scripts.report.files import section_of
from scripts.report.gain import gain_rows
from scripts.report.pictures import (
    columns_picture,
    layers_picture,
    loans_over_time_picture,
    loans_picture,
    times_picture,
    units_picture,
    work_picture,
)
from scripts.report.run import WORK, Moves, RunFolder
from zeroresize.config.keys import MIGRATING_MODES

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { max-width: 100% } table { border-collapse: collapse } figure { margin: 2rem 0 }
td, th { padding: .15rem .8rem .15rem 0; text-align: right; vertical-align: top }
th:first-child, td:first-child, .facts td, .moves :nth-child(2) { text-align: left }
figcaption, .note { color: #555 } .damage { color: #a00 }
</style></head><body>
<h1>{{ title }}</h1>
{% for line in left_out %}<p class="damage">Left out: {{ line }}</p>{% endfor %}
{% if compared %}
<table><tr>{% for heading in compared_headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{% for row in compared %}<tr>{% for cell in row %}
<td>{% if loop.first %}<a href="#{{ cell | urlencode }}">{{ cell }}</a>{% else %}{{ cell }}{% endif %}</td>
{% endfor %}</tr>{% endfor %}</table>
<p class="note">{{ compared_with }} Moved, lent and dropped: of its even share of the products, mean over all steps, of
the rank of which most moved to others, was lent, or was dropped. Times of steps leave out the first ones of each start,
which warm up. This table compares runs with each other; below, each run is compared with its own steps at full work.
Where the two differ much, something else was busy during one of them.</p>
{% endif %}
{% for run in runs %}
{% if compared %}<h2 id="{{ run.title }}">{{ run.title }}</h2>{% endif %}
{% for line in run.left_out %}<p class="damage">Left out: {{ line }}</p>{% endfor %}
<h3>What balancing brought</h3>
<table class="facts">{% for name, value in run.gain %}
<tr>{% if name %}<td>{{ name }}</td>{% endif %}<td>{{ value }}</td></tr>{% endfor %}</table>
<h3>The run</h3>
<table class="facts">{% for name, value in run.facts %}
<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<h3>Ranks</h3>
<table><tr>{% for heading in run.rank_headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{% for row in run.ranks %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<p class="note">Percentages, but for balancing, are of an even share of the products, and mean over all steps, but for
what a rank owns now. Columns in which there is nothing are left out.</p>
{% if run.moves %}
<h3>Moves</h3>
<table class="moves"><tr>{% for heading in move_headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{% for row in run.moves %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
<p class="note">Units of all layers together. A move that is told at a step was made since the update before.</p>
{% endif %}
{% for picture in run.pictures %}
<figure><img alt="{{ picture.caption }}" src="data:image/png;base64,{{ picture.data }}">
<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
{% endfor %}
</body></html>
"""
RANK_HEADINGS = (
    "rank", "updates", "busy, ms", "multiplying, ms", "γ", "γ, most", "dropped", "lent", "borrowed", "straggler in",
    "balancing", "owns now", "units now", "moved", "taken over",
)  # fmt: skip
#: What says nothing where it stands in all rows of these columns.
IDLE = {
    "γ": "0.00", "γ, most": "0.00", "dropped": "0.0 %", "lent": "0.0 %", "borrowed": "0.0 %", "owns now": "100.0 %",
    "units now": "", "moved": "0.0 %", "taken over": "0.0 %",
}  # fmt: skip
MOVE_HEADINGS = ("step", "what moved", "MB", "s")
#: What the page says of a summary's numbers, besides the times of a step.
SUMMARY_LABELS = {
    "images_per_s": "images a second",
    "epoch_s": "training of an epoch, s",
    "test_accuracy": "test accuracy",
    "epochs": "epochs",
    "steps": "steps",
    "ranks": "ranks",
    "device": "device",
    "commit": "commit",
}
#: So many loans are told in words; more are drawn.
MOST_IN_WORDS = 4
#: So many moves are told one by one, and so many ranks of each.
MOST_MOVES, MOST_RANKS_OF_A_MOVE = 40, 8


@dataclass(frozen=True)
class Picture:
    """One that is on the page: what it shows, and its PNG in base64."""

    caption: str
    data: str


@dataclass(frozen=True)
class RunSection:
    """What the page says of a run."""

    title: str
    left_out: Sequence[str]
    facts: Sequence[tuple[str, str]]
    gain: Sequence[tuple[str, str]]
    rank_headings: Sequence[str]
    ranks: Sequence[Sequence[str]]
    moves: Sequence[Sequence[str]]
    pictures: Sequence[Picture]


def section_of_run(title: str, run: RunFolder, folder: Path) -> RunSection:
    """All that the page says of ``run``; its pictures go into ``folder``, too."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [_written(caption, draw(), folder / f"{name}.png") for name, caption, draw in pictures_of(run)]
    headings, *ranks = _with_anything([list(RANK_HEADINGS), *rank_rows(run)])
    return RunSection(
        title, run.left_out, fact_rows(run), gain_rows(run), headings, ranks, move_rows(run.moves()), pictures
    )


def page_of(title: str, sections: Sequence[RunSection], compared: Sequence[NamedRun], left_out: Sequence[str]) -> str:
    """The page; with a table of those that are ``compared``, if any."""
    return (
        jinja2.Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            title=title,
            left_out=left_out,
            compared=comparison_rows(compared),
            compared_headings=COMPARED,
            compared_with=compared_with(compared),
            move_headings=MOVE_HEADINGS,
            runs=sections,
        )
    )


def fact_rows(run: RunFolder) -> list[tuple[str, str]]:
    """What the run was, and what its summary says."""
    speed, (fewest, most) = run.speed(), run.left_out_steps()
    how_many = "step" if most == 1 else f"{most} steps" if fewest == most else f"{fewest} to {most} steps"
    without = f", without the first {how_many} of a start" if most else ""
    rows = [
        (f"{name} step, ms{without}", f"{speed[key]:.4g}")
        for key, name in (("mean_step_ms", "mean"), ("step_ms", "median"))
        if np.isfinite(speed[key])
    ]
    for name, label in SUMMARY_LABELS.items():
        if (value := run.summary.get(name)) is not None:
            rows.append((label, f"{value:.4g}" if isinstance(value, float) else str(value)))
    if not run.has_ended:
        rows.append(("state", "the run has not ended"))
    straggler, balance = section_of(run.config, "straggler"), section_of(run.config, "balance")
    if straggler.get("kind", "none") != "none":
        rows += [(f"straggler.{name}", str(straggler.get(name))) for name in ("kind", "schedule", "chi")]
    names = ("mode", "ratio", "priority", "target")
    rows += [(f"balance.{name}", str(balance[name])) for name in names if name in balance]
    return rows + loan_rows(run)


def loan_rows(run: RunFolder) -> list[tuple[str, str]]:
    """What was lent, in words, unless that would be many of them."""
    loans = run.loans()
    if not loans:
        return [("lent", "nothing")] if run.mode in MIGRATING_MODES else []
    if len(loans) > MOST_IN_WORDS:
        return []
    return [
        (
            f"rank {owner} lent to rank {receiver}",
            f"{run.mean_lent(owner, receiver):.2f} of its even share, mean of all steps",
        )
        for owner, receiver in loans
    ]


def move_rows(moves: Sequence[Moves]) -> list[list[str]]:
    """One row for all that changed hands by an update, as ``MOVE_HEADINGS`` say; of very many the first ones."""
    rows = [
        [str(move.step), _changes_in_words(move), f"{move.num_bytes / 1e6:.3g}", f"{move.seconds:.2g}"]
        for move in moves[:MOST_MOVES]
    ]
    if left := moves[MOST_MOVES:]:
        num_bytes, seconds = sum(move.num_bytes for move in left), sum(move.seconds for move in left)
        rows.append(["later", f"{len(left)} more moves", f"{num_bytes / 1e6:.3g}", f"{seconds:.2g}"])
    return rows


def _changes_in_words(moves: Moves) -> str:
    if not moves.changes:
        return "nothing in the end: home and back for a checkpoint, or away again after a resume"
    most = sorted(moves.changes, key=lambda rank: -sum(map(abs, moves.changes[rank].values())))[:MOST_RANKS_OF_A_MOVE]
    changes = [
        f"rank {rank}: " + ", ".join(f"{number:+d} {kind}" for kind, number in moves.changes[rank].items())
        for rank in sorted(most)
    ]
    others = len(moves.changes) - len(most)
    return "; ".join([*changes, *([f"less of {others} other ranks"] if others else [])]).replace("-", "−")


def _with_anything(rows: list[list[str]]) -> list[list[str]]:
    """The rows, the first of which are headings, without the columns in which there is nothing."""
    columns = [own for own in zip(*rows, strict=True) if any(cell != IDLE.get(own[0]) for cell in own[1:])]
    return [list(row) for row in zip(*columns, strict=True)]


def rank_rows(run: RunFolder) -> list[list[str]]:
    """One row a rank: its last known times, its γ, parts of an even share over all steps, how often it was a straggler,
    what balancing cost it, and what it owns.
    """
    rows = []
    step_s = run.speed()["mean_step_ms"] / 1e3
    for rank, records in run.records.items():
        last = records[-1]
        # The first holds the calibration.
        balancing_s = sum(record["balancing_since_update_s"] for record in records[1:])
        steps = max(last["step"] - records[0]["step"], 1)
        rows.append(
            [
                str(rank),
                str(len(records)),
                *(f"{1e3 * last[name]:.1f}" if last[name] is not None else "-" for name in ("busy_s", "gemm_s")),
                f"{last['ratio']:.2f}",
                f"{max(record['ratio'] for record in records):.2f}",
                *(f"{100 * run.mean_work(rank, name):.1f} %" for name in ("pruned", "lent", "borrowed")),
                f"{sum(record['is_straggler'] for record in records)} updates",
                f"{100 * balancing_s / steps / step_s:.2f} % of a step" if step_s > 0 else "-",
                f"{100 * last['owned']:.1f} %",
                ", ".join(f"{number} {kind}" for kind, number in last["units"].items()) if run.has_moved else "",
                *(f"{100 * run.mean_work(rank, name):.1f} %" for name in ("moved", "taken")),
            ]
        )
    return rows


def pictures_of(run: RunFolder) -> list[tuple[str, str, Callable[[], Figure]]]:
    """Name, caption and how to draw it, of all that shows anything."""
    below = "at even shares; what it computes" if run.has_moved else "at full work; γ"
    pictures: list[tuple[str, str, Callable[[], Figure]]] = [
        ("times", f"Step time; each rank's busy time as it would be {below}.", lambda: times_picture(run)),
    ]
    if any(run.most_by_a_rank(name) > 0 for name in WORK[1:]):
        caption = "What becomes of each rank's products, and what it takes over from others; black: an even share."
        pictures.append(("work", caption, lambda: work_picture(run)))
    if run.has_moved and run.kinds_of_units:
        caption = "How many units of each kind every rank owns."
        pictures.append(("units", caption, lambda: units_picture(run)))
    loans = run.loans()
    if len(loans) > MOST_IN_WORDS:
        caption = "Who lent how much to whom, mean over the run's steps."
        pictures.append(("loans", caption, lambda: loans_picture(run)))
    if len(loans) > 1:  # one alone is in the picture of work
        caption = "Who lent how much to whom, over time."
        pictures.append(("loans-over-time", caption, lambda: loans_over_time_picture(run)))
    for rank, records in run.records.items():
        if any(record["pruned"] > 0 for record in records):
            caption = f"Rank {rank}: share of each layer's columns that was pruned."
            pictures.append((f"layers-rank{rank}", caption, lambda rank=rank: layers_picture(run, rank)))
    for rank, counts in run.columns.items():
        if any(steps.any() for steps in counts.values()):
            caption = f"Rank {rank}: in how many steps each column was pruned (epochs that have ended)."
            pictures.append((f"columns-rank{rank}", caption, lambda rank=rank: columns_picture(run, rank)))
    return pictures


def _written(caption: str, figure: Figure, file: Path) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=130, format="png")
    pyplot.close(figure)
    file.write_bytes(buffer.getvalue())
    return Picture(caption, base64.b64encode(buffer.getvalue()).decode())
