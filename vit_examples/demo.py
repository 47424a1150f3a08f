"""Shows what a slow rank costs and what balancing wins back: ``python -m vit_examples.demo`` (or ``make demo``).

Trains the same small vision transformer on two ranks once for each entry of :data:`RUNS`, one after the other, and ends
with a table and a picture.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vit_examples.balance_log import mean_in_force
from vit_examples.demo_picture import save_picture
from vit_examples.launch import started, train_command
from zeroresize.json_lines import read_json_lines

NUM_RANKS = 2
STRAGGLER = 1
_SLOWED = ("straggler.kind=sleep", f"straggler.chi={{{STRAGGLER}: 4.0}}")


@dataclass(frozen=True)
class DemoRun:
    """One training run: how it is called and what it changes in the configuration."""

    name: str
    overrides: tuple[str, ...]


RUNS = (
    DemoRun("homogeneous", ("balance.mode=off",)),
    DemoRun("Baseline", ("balance.mode=off", *_SLOWED)),
    DemoRun("ZERO-PriDiffR", ("balance.mode=zero-pridiff", *_SLOWED)),
    DemoRun("MIG", ("balance.mode=mig", *_SLOWED)),
    DemoRun("SEMI", ("balance.mode=semi", *_SLOWED)),
)


class RunFailed(RuntimeError):
    """A run ended with an error; the text holds its log's end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vit_examples.demo", description="One slow rank, without and with balancing.")
    parser.add_argument("--config", default="demo", help="configuration of all runs")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder of results")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it, such as host=torch")
    parsed = parser.parse_args(arguments)
    console = Console()
    console.print(
        f"Training a small vision transformer on {NUM_RANKS} ranks, {len(RUNS)} times: undisturbed, then with rank "
        f"{STRAGGLER}'s products 4 times slower (χ = 4), without and with balancing."
    )
    try:
        results = run_all(parsed.config, parsed.set, parsed.output, console)
    except RunFailed as failure:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 1
    picture = parsed.output / "demo.png"
    save_picture(picture, results, straggler=STRAGGLER)
    console.print(results_table(results))
    console.print(f"Picture: {picture}   Details: {parsed.output}/<run>/metrics.jsonl, summary.json, tensorboard")
    return 0


def run_all(config: str, overrides: Sequence[str], output: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Run every entry of ``RUNS``; gives by name its ``summary``, the ``lines`` of its metrics and the
    straggler's ``updates``.

    Raises:
        RunFailed: as soon as one fails.
    """
    results = {}
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console, refresh_per_second=2) as progress:
        tasks = {run.name: progress.add_task(run.name, total=None, start=False, note="waiting") for run in RUNS}
        for run in RUNS:
            folder = output / run.name.lower()
            shutil.rmtree(folder, ignore_errors=True)
            progress.start_task(tasks[run.name])
            progress.update(tasks[run.name], note="starting torchrun")
            for done, total, note in train(config, [*overrides, *run.overrides], folder):
                progress.update(tasks[run.name], completed=done, total=total, note=note)
            progress.stop_task(tasks[run.name])
            results[run.name] = {
                "summary": read_json(folder / "summary.json"),
                "lines": read_lines(folder),
                "updates": read_json_lines(folder / f"balance-rank{STRAGGLER}.jsonl"),
            }
    return results


def train(config: str, overrides: Sequence[str], folder: Path) -> Iterator[tuple[int, int | None, str]]:
    """Train in a torchrun of its own, yielding (steps done, steps in all if known, what to say) about twice a second.

    Raises:
        RunFailed: if it ends with an error.
    """
    folder.mkdir(parents=True)
    command = train_command(config, (*overrides, "output.progress=false", f"output.folder={folder}"), NUM_RANKS)
    log = folder / "log.txt"
    with started(command, log, {"OMP_NUM_THREADS": "1"}) as process:
        while True:
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                yield progress_of(folder)
                continue
            break
    if process.returncode != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-80:])
        raise RunFailed(f"{tail}\n\nThe run failed with status {process.returncode}; its whole log: {log}")
    done, total, _ = progress_of(folder)
    yield done, total, "done"


def progress_of(folder: Path) -> tuple[int, int | None, str]:
    """How far the run that writes into ``folder`` is."""
    steps = [line for line in read_lines(folder) if line["kind"] == "step"]
    total = read_json(folder / "config.json").get("total_steps")
    if not steps:
        return 0, total, "starting the ranks"
    times = sorted(line["step_s"] for line in steps[-10:] if line["step_s"] is not None)
    note = f"{1e3 * times[len(times) // 2]:.0f} ms a step" if times else ""
    return steps[-1]["step"] + 1, total, note


def results_table(results: dict[str, dict[str, Any]]) -> Table:
    """Step time, speed-up and accuracy of every run, at most 80 columns wide."""
    step_ms = {name: result["summary"]["step_ms"] for name, result in results.items()}
    steps = max(result["summary"]["steps"] for result in results.values())
    table = Table(title="One slow rank, without and with balancing", title_justify="left", caption_justify="left")
    table.caption = (
        f"homogeneous: nobody slow; Baseline: rank {STRAGGLER} slow, nothing done (speed-up 1). Dropped and lent: "
        "shares of the slow rank's products, mean over all steps; what is lent is computed by the other rank, exactly "
        "(SEMI lends where that takes less time than it saves). After only "
        f"{steps} steps accuracy suffers from what is dropped."
    )
    for heading in ("run", "step, ms", "speed-up", "÷ homogen.", "dropped", "lent", "accuracy"):
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    for name, result in results.items():
        dropped, lent = (mean_in_force(result["updates"], share, steps) for share in ("pruned_share", "lent_share"))
        table.add_row(
            name,
            f"{step_ms[name]:.0f}",
            f"{step_ms['Baseline'] / step_ms[name]:.2f}×",
            f"{step_ms[name] / step_ms['homogeneous']:.2f}×",
            f"{dropped:.2f}",
            f"{lent:.2f}",
            f"{result['summary']['test_accuracy']:.1%}",
        )
    return table


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's ``metrics.jsonl`` so far."""
    return read_json_lines(folder / "metrics.jsonl")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping; empty if it does not exist or is being written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
