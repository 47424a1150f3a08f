"""Turns a run's folder into pictures and one HTML page: python -m scripts.report runs/vit

Step time beside what it would have been at full work, every rank's busy time and γ, who lent what to whom, the layers'
shares over time, and which columns were pruned how often: from what ``vit_examples.train`` wrote, also while it still
runs. The page is one file that can be mailed.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
from collections.abc import Callable
from pathlib import Path

import jinja2
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from scripts.report_pictures import (
    columns_picture,
    layers_picture,
    loans_over_time_picture,
    loans_picture,
    times_picture,
    work_picture,
)
from scripts.report_run import RunFolder

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { width: 100% } table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: right }
th:first-child, td:first-child { text-align: left } figcaption { color: #555 } figure { margin: 2rem 0 }
</style></head><body>
<h1>{{ title }}</h1>
<table>{% for name, value in facts %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>What balancing brought</h2>
<table>{% for name, value in brought %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>Ranks</h2>
<table><tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
{% for picture in pictures %}
<figure><img alt="{{ picture.caption }}" src="data:image/png;base64,{{ picture.data }}">
<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
</body></html>
"""
HEADINGS = (
    "rank", "updates", "busy, ms", "products, ms", "γ", "γ, most", "dropped", "lent", "borrowed", "straggler in",
    "balancing",
)  # fmt: skip
SHARES = ("pruned_share", "lent_share", "borrowed_share")
#: What the page says of a summary's numbers.
SUMMARY_LABELS = {
    "step_ms": "median step, ms",
    "mean_step_ms": "mean step, ms",
    "images_per_s": "images a second",
    "epoch_s": "training of an epoch, s",
    "test_accuracy": "test accuracy",
    "epochs": "epochs",
    "steps": "steps",
    "ranks": "ranks",
    "device": "device",
    "commit": "commit",
}


def brought_rows(run: RunFolder) -> list[tuple[str, str]]:
    """The mean step as measured, the least that it would have taken at full work, and how they compare."""
    measured_s, at_full_work_s = run.measured_and_at_full_work()
    if not np.isfinite(measured_s):
        return [("mean step, measured and at full work", "not known")]
    return [
        ("mean step, measured", f"{1e3 * measured_s:.1f} ms"),
        ("mean step at full work, estimated lower bound (slowest rank's busy time, without collectives)",
         f"{1e3 * at_full_work_s:.1f} ms"),
        ("steps at full work would have taken, estimated", f"at least {at_full_work_s / measured_s:.2f} times as long"),
    ]  # fmt: skip


def table_rows(run: RunFolder) -> list[list[str]]:
    """One row a rank: its last known times, its γ, shares of its products over all steps, how often it was a straggler,
    what balancing cost it.
    """
    rows = []
    wall_s = run.mean_step_s()
    for rank, records in run.records.items():
        last = records[-1]
        balancing_s = sum(record["balancing_s"] for record in records[1:])  # the first holds the pre-test
        steps = max(last["step"] - records[0]["step"], 1)
        rows.append(
            [
                str(rank),
                str(len(records)),
                *(f"{1e3 * last[name]:.1f}" if last[name] is not None else "-" for name in ("busy_s", "products_s")),
                f"{last['ratio']:.2f}",
                f"{max(record['ratio'] for record in records):.2f}",
                *(f"{100 * run.mean_share(rank, name):.1f} %" for name in SHARES),
                f"{sum(record['is_straggler'] for record in records)} updates",
                f"{100 * balancing_s / steps / wall_s:.2f} % of a step" if np.isfinite(wall_s) else "-",
            ]
        )
    return rows


def write_report(run: RunFolder, folder: Path) -> Path:
    """Write ``report.html`` and its pictures as PNG files into ``folder``; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[tuple[str, str, Callable[[], Figure]]] = [
        ("times", "Step time; each rank's busy time as it would be at full work; γ.", lambda: times_picture(run)),
        ("work", "What becomes of each rank's products, and what it computes for others.", lambda: work_picture(run)),
    ]
    lends = bool(run.loans())
    if lends:
        caption = "Who lent how much to whom, mean over the run's steps."
        pictures.append(("loans", caption, lambda: loans_picture(run)))
        caption = "Who lent how much to whom, over time."
        pictures.append(("loans-over-time", caption, lambda: loans_over_time_picture(run)))
    for rank, records in run.records.items():
        if any(record["pruned_share"] > 0 for record in records):
            caption = f"Rank {rank}: share of each layer's columns that was pruned."
            pictures.append((f"layers-rank{rank}", caption, lambda rank=rank: layers_picture(run, rank)))
    for rank, counts in run.columns.items():
        if any(steps.any() for steps in counts.values()):
            caption = f"Rank {rank}: in how many steps each column was pruned (epochs that have ended)."
            pictures.append((f"columns-rank{rank}", caption, lambda rank=rank: columns_picture(run, rank)))
    embedded = []
    for name, caption, draw in pictures:
        figure, buffer = draw(), io.BytesIO()
        figure.savefig(buffer, dpi=130, format="png")
        pyplot.close(figure)
        (folder / f"{name}.png").write_bytes(buffer.getvalue())
        embedded.append({"caption": caption, "data": base64.b64encode(buffer.getvalue()).decode()})
    facts = [
        (label, f"{run.summary[name]:.4g}" if isinstance(run.summary[name], float) else run.summary[name])
        for name, label in SUMMARY_LABELS.items()
        if run.summary.get(name) is not None
    ]
    if not run.summary:
        facts.append(("state", "the run has not ended"))
    straggler = run.summary.get("config", {}).get("straggler", {})
    if straggler.get("kind", "none") != "none":
        facts += [(f"straggler.{name}", straggler[name]) for name in ("kind", "schedule", "chi")]
    if len(run.records) > 1 and not lends:
        facts.append(("lent", "nothing"))
    balance = run.summary.get("config", {}).get("balance", {})
    facts += [(f"balance.{name}", balance[name]) for name in ("mode", "ratio", "priority", "target") if name in balance]
    page = (
        jinja2.Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            title=f"Balancing in {run.path.resolve().name}",
            brought=brought_rows(run),
            facts=facts,
            headings=HEADINGS,
            rows=table_rows(run),
            pictures=embedded,
        )
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the output folder of a run")
    parser.add_argument("--output", type=Path, help="where the page goes (default: report/ in the run's folder)")
    arguments = parser.parse_args()
    try:
        run = RunFolder.read(arguments.folder)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"written to {write_report(run, arguments.output or arguments.folder / 'report')}")


if __name__ == "__main__":
    main()
