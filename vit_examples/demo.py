"""Shows what a slow rank costs and what balancing wins back: ``python -m vit_examples.demo`` (or ``make demo``).

Trains the same small vision transformer on two ranks for each entry of :data:`RUNS`, and ends with a table and a
picture.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vit_examples.balance_log import mean_in_force
from vit_examples.config import load_config
from vit_examples.harness.run_folder import claimed, empty
from vit_examples.one_node import started, train_command
from vit_examples.step_times import timed_steps
from zeroresize.utils.files import read_json_lines

NUM_RANKS = 2
STRAGGLER = 1
#: First steps of a run that may leave the picture at the top.
WARM_UP = 3
_SLOWED = ("straggler.kind=sleep", f"straggler.chi={{{STRAGGLER}: 4.0}}")
#: What each run changes in the configuration, by its name.
RUNS = {
    "homogeneous": ("balance.mode=off",),
    "Baseline": ("balance.mode=off", *_SLOWED),
    "exact": ("balance.mode=exact", *_SLOWED),
    "ZERO-PriDiffR": ("balance.mode=zero-pridiff", *_SLOWED),
    "MIG": ("balance.mode=mig", *_SLOWED),
    "SEMI": ("balance.mode=semi", *_SLOWED),
}
_CAPTION = (
    "homogeneous: nobody slow; Baseline: rank {straggler} slow, nothing done; exact: the default mode. Step: median, "
    "without the first steps. Speed-up: Baseline's step over this one; slowdown: this one over homogeneous's. Moved, "
    "lent and dropped: shares of the slow rank's products, mean over all steps, also those before the first plan. What "
    "moves belongs to the other rank from then on, what is lent is computed by it step by step: both are exact. After "
    "only {steps} steps accuracy suffers from what is dropped."
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
    try:
        results = run_all(parsed.config, parsed.set, parsed.output, console)
    except (RunFailed, ValueError) as error:
        is_failed = isinstance(error, RunFailed)
        console.print(f"{'' if is_failed else 'error: '}{error}", markup=False, highlight=False, soft_wrap=True)
        return 1 if is_failed else 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command begins anew\n")
        return 128 + signal.SIGINT
    figure = draw(results)
    figure.savefig(parsed.output / "demo.png", dpi=130)
    pyplot.close(figure)
    console.print(results_table(results))
    console.print(f"Picture: {parsed.output}/demo.png   Details: {parsed.output}/<run>/metrics.jsonl, summary.json")
    python = os.path.relpath(sys.executable)
    console.print(f"All runs compared: {python} -m scripts.report {parsed.output}", highlight=False, soft_wrap=True)
    return 0


def run_all(config: str, overrides: Sequence[str], output: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Run every entry of ``RUNS``; gives by name its ``summary``, the ``lines`` of its metrics, and the straggler's
    ``updates``.
    """
    load_config(config, overrides)
    folders = {name: output / name.lower() for name in RUNS}
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with claimed(output):
        empty(*folders.values())
        console.print(
            f"Training a small vision transformer on {NUM_RANKS} ranks, {len(RUNS)} times: undisturbed, then with rank "
            f"{STRAGGLER}'s products 4 times slower (χ = 4), without and with balancing."
        )
        with Progress(*columns, TextColumn("{task.fields[note]}"), console=console, refresh_per_second=2) as progress:
            tasks = {name: progress.add_task(name, total=None, start=False, note="waiting") for name in RUNS}
            for name, changes in RUNS.items():
                progress.start_task(tasks[name])
                for done, total, note in train(config, [*overrides, *changes], folders[name]):
                    progress.update(tasks[name], completed=done, total=total, note=note)
                progress.stop_task(tasks[name])
        return {name: results_of(folder) for name, folder in folders.items()}


def results_of(folder: Path) -> dict[str, Any]:
    """What a finished run wrote, as :func:`run_all` gives it."""
    return {
        "summary": read_json(folder / "summary.json"),
        "lines": read_json_lines(folder / "metrics.jsonl"),
        "updates": read_json_lines(folder / f"balance-rank{STRAGGLER}.jsonl"),
    }


def train(config: str, overrides: Sequence[str], folder: Path) -> Iterator[tuple[int, int | None, str]]:
    """Train in ranks of its own, yielding (steps done, steps in all if known, what to say) about twice a second."""
    command = train_command(config, (*overrides, f"output.folder={folder}", "output.progress=false"), NUM_RANKS)
    log = folder / "log.txt"
    with started(command, log, {"OMP_NUM_THREADS": "1"}) as process:
        while process.poll() is None:
            yield progress_of(folder)
            try:
                process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
    if process.returncode != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-80:])
        raise RunFailed(f"{tail}\n\nThe run failed with status {process.returncode}; its whole log: {log}")
    done, total, _ = progress_of(folder)
    yield done, total, "done"


def progress_of(folder: Path) -> tuple[int, int | None, str]:
    """How far the run that writes into ``folder`` is."""
    steps = [line for line in read_json_lines(folder / "metrics.jsonl") if line["kind"] == "step"]
    total = read_json(folder / "config.json").get("total_steps")
    if not steps:
        return 0, total, "starting the ranks"
    times = sorted(line["step_s"] for line in steps[-10:] if line["step_s"] is not None)
    note = f"{1e3 * times[len(times) // 2]:.0f} ms a step" if times else ""
    return steps[-1]["step"] + 1, total, note


def results_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """Step time, speed-up and accuracy of every run, at most 80 columns wide."""
    step_ms = {name: result["summary"]["step_ms"] for name, result in results.items()}
    steps = max(result["summary"]["steps"] for result in results.values())
    table = Table(
        title="One slow rank, without and with balancing",
        caption=_CAPTION.format(straggler=STRAGGLER, steps=steps),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,  # without vertical lines, for which there is no room
        padding=(0, 1, 0, 0),
    )
    for heading in ("run", "step, ms", "speed-up", "slowdown", "moved", "lent", "dropped", "accuracy"):
        table.add_column(heading, justify="left" if heading == "run" else "right", no_wrap=True)
    for name, result in results.items():
        updates = [of_even_share(update) for update in result["updates"]]
        moved, lent, dropped = (mean_in_force(updates, share, steps) for share in ("moved", "lent", "pruned"))
        table.add_row(
            name,
            f"{step_ms[name]:.0f}",
            f"{step_ms['Baseline'] / step_ms[name]:.2f}×",
            f"{step_ms[name] / step_ms['homogeneous']:.2f}×",
            f"{moved:.2f}",
            f"{lent:.2f}",
            f"{dropped:.2f}",
            f"{result['summary']['test_accuracy']:.1%}",
        )
    return table


def of_even_share(update: Mapping[str, Any]) -> dict[str, Any]:
    """A record with what moved, and with what is lent and dropped of the rest, as shares of the even share."""
    owned = update["owned"]
    return {**update, "moved": 1.0 - owned, "lent": owned * update["lent"], "pruned": owned * update["pruned"]}


def draw(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Step times of every run above; below, of those that move, lend or prune, what the straggler is relieved of."""
    figure, (times, ratios) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained"
    )
    settled, last = [1.0], 1
    for name, result in results.items():
        timed = [step for step in timed_steps(result["lines"]) if step.seconds is not None]
        step_ms = [1e3 * step.seconds for step in timed]
        settled += [ms for ms, step in zip(step_ms, timed, strict=True) if step.begin >= WARM_UP]
        last = max([last, *(step.end for step in timed)])
        (curve,) = times.plot([(step.begin + step.end) / 2 for step in timed], step_ms, label=name, linewidth=1.2)
        # A line's plan is in force after its step.
        ends = [line["step"] + 1 for line in result["lines"] if line["kind"] == "step"]
        epochs = [line for line in result["lines"] if line["kind"] == "epoch"]
        relieved = [ranks[STRAGGLER] for line in epochs for ranks in line["ratios"]]
        if any(share > 0 for share in relieved):
            color = curve.get_color()
            ratios.plot(ends[: len(relieved)], relieved, color=color, label=name, drawstyle="steps-post")
    times.set_ylabel("step time, ms")
    times.set_ylim(0, 1.05 * max(settled))
    times.set_title(f"One tensor-parallel step, rank {STRAGGLER} slowed (homogeneous: not slowed)")
    ratios.set_ylabel(f"share of rank {STRAGGLER}'s work\nthat others do or nobody")
    ratios.set_ylim(-0.02, 1.02)
    ratios.set_xlabel("optimizer step")
    ratios.set_xlim(0, last)
    ratios.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (times, ratios):
        axes.grid(alpha=0.3)
    figure.legend(*times.get_legend_handles_labels(), loc="outside lower center", ncols=len(results))
    return figure


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file's mapping; empty if it does not exist or is being written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


if __name__ == "__main__":
    sys.exit(main())
