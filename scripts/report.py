"""Turns a run's folder into pictures and one HTML page: python -m scripts.report runs/vit

Step time, every rank's busy time and γ, the layers' shares over time, and which columns were pruned how often: from
what ``vit_examples.train`` wrote, also while it still runs. The page is one file that can be mailed.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from zeroresize.telemetry import read_records

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
img { width: 100% } table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: right }
th:first-child, td:first-child { text-align: left } figcaption { color: #555 } figure { margin: 2rem 0 }
</style></head><body>
<h1>{{ title }}</h1>
<table>{% for name, value in facts %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>{% endfor %}</table>
<h2>Ranks</h2>
<table><tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}</table>
{% for picture in pictures %}
<figure><img alt="{{ picture.caption }}" src="data:image/png;base64,{{ picture.data }}">
<figcaption>{{ picture.caption }}</figcaption></figure>
{% endfor %}
</body></html>
"""
HEADINGS = ("rank", "updates", "busy, ms", "products, ms", "γ", "γ, most", "pruned share", "straggler in", "balancing")


@dataclass(frozen=True)
class RunFolder:
    """What a run wrote.

    Attributes:
        steps: the ``kind`` step lines of ``metrics.jsonl``.
        records: of each rank, one an update.
        columns: of each rank, by layer: in how many steps each column was pruned.
        summary: of a finished run, else empty.
    """

    path: Path
    steps: list[dict[str, Any]]
    records: dict[int, list[dict[str, Any]]]
    columns: dict[int, dict[str, np.ndarray]]
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Raises ValueError if ``path`` is no folder of a run."""
        records = {rank_of(file): read_records(file) for file in path.glob("balance-rank*.jsonl")}
        if not records:
            raise ValueError(f"{path}: no balance-rank*.jsonl there; give the output folder of vit_examples.train")
        columns = {rank_of(file): dict(np.load(file)) for file in path.glob("columns-rank*.npz")}
        summary, metrics = path / "summary.json", path / "metrics.jsonl"
        return cls(
            path=path,
            steps=[line for line in (read_records(metrics)) if line["kind"] == "step"],
            records=dict(sorted(records.items())),
            columns=dict(sorted(columns.items())),
            summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {},
        )

    def series(self, rank: int, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one number of a rank's records, NaN where there was none."""
        records = self.records[rank]
        values = [np.nan if record[name] is None else record[name] for record in records]
        return [record["step"] for record in records], values


def rank_of(file: Path) -> int:
    return int(re.search(r"rank(\d+)", file.name)[1])  # type: ignore[index]


def times_picture(run: RunFolder) -> Figure:
    figure, (wall, busy, ratio) = pyplot.subplots(3, 1, sharex=True, figsize=(9, 8), layout="constrained")
    timed = [line for line in run.steps if line["step_s"] is not None]
    wall.plot([line["step"] for line in timed], [1e3 * line["step_s"] for line in timed], color="black", linewidth=1)
    wall.set_ylabel("step time, ms")
    for rank in run.records:
        steps, seconds = run.series(rank, "busy_s")
        busy.plot(steps, 1e3 * np.array(seconds), label=f"rank {rank}", drawstyle="steps-post")
        ratio.plot(*run.series(rank, "ratio"), label=f"rank {rank}", drawstyle="steps-post")
    busy.set_ylabel("busy time at\nfull work, ms")
    ratio.set_ylabel("γ")
    ratio.set_ylim(-0.02, 1)
    ratio.set_xlabel("optimizer step")
    for axes in (wall, busy):
        axes.set_ylim(bottom=0)
    for axes in (wall, busy, ratio):
        axes.grid(alpha=0.3)
    if len(run.records) <= 16:
        busy.legend(loc="upper left", ncols=4, fontsize="small")
    return figure


def layers_picture(run: RunFolder, rank: int) -> Figure:
    records = run.records[rank]
    layers = list(records[0]["layer_shares"])
    shares = np.array([[record["layer_shares"][layer] for record in records] for layer in layers])
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(layers)), layout="constrained")
    edges = [0, *(record["step"] for record in records)]
    mesh = axes.pcolormesh(edges, np.arange(len(layers) + 1), shares, vmin=0, vmax=1, cmap="viridis")
    axes.set_yticks(np.arange(len(layers)) + 0.5, layers, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("optimizer step")
    figure.colorbar(mesh, label="share of columns pruned")
    return figure


def columns_picture(run: RunFolder, rank: int, bins: int = 192) -> Figure:
    counts = run.columns[rank]
    most = max(int(steps.max()) for steps in counts.values())
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.22 * len(counts)), layout="constrained")
    rows = [[part.mean() for part in np.array_split(steps, min(bins, len(steps)))] for steps in counts.values()]
    for position, row in enumerate(rows):
        edges = np.linspace(0, 1, len(row) + 1)
        mesh = axes.pcolormesh(edges, [position, position + 1], [row], vmin=0, vmax=max(most, 1), cmap="magma")
    axes.set_yticks(np.arange(len(counts)) + 0.5, list(counts), fontsize=7)
    axes.set_ylim(len(counts), 0)
    axes.set_xlabel("column, as a share of the layer's input features")
    figure.colorbar(mesh, label="steps pruned")
    return figure


def table_rows(run: RunFolder) -> list[list[str]]:
    """One row a rank: its last known times, its γ, how often it was a straggler, what balancing cost it."""
    rows = []
    walls_s = [line["step_s"] for line in run.steps if line["step_s"] is not None]
    wall_s = sum(walls_s) / len(walls_s) if walls_s else 0.0
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
                f"{100 * np.mean([record['pruned_share'] for record in records]):.1f} %",
                f"{sum(record['is_straggler'] for record in records)} updates",
                f"{100 * balancing_s / steps / wall_s:.2f} % of a step" if wall_s else "-",
            ]
        )
    return rows


def write_report(run: RunFolder, folder: Path) -> Path:
    """Write ``report.html`` and its pictures as PNG files into ``folder``; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[tuple[str, str, Callable[[], Figure]]] = [
        ("times", "Step time; each rank's busy time as it would be at full work; γ.", lambda: times_picture(run))
    ]
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
    names = ("step_ms", "images_per_s", "test_accuracy", "epochs", "steps", "ranks", "device")
    facts = [
        (name, f"{run.summary[name]:.4g}" if isinstance(run.summary[name], float) else run.summary[name])
        for name in names
        if run.summary.get(name) is not None
    ]
    balance = run.summary.get("config", {}).get("balance", {})
    facts += [(f"balance.{name}", balance[name]) for name in ("mode", "ratio", "priority", "target") if name in balance]
    page = (
        jinja2.Environment(autoescape=True)
        .from_string(PAGE)
        .render(
            title=f"Balancing in {run.path.resolve().name}",
            facts=facts or [("state", "the run has not ended")],
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
