"""Shows what a slow rank costs and what balancing wins back: ``python -m vit_examples.demo`` (or ``make demo``).

Trains the same small vision transformer on two ranks for each entry of :data:`RUNS`, and ends with the table and the
page of ``zeroresize report``. What moves belongs to the other rank from then on, what is lent is computed by it step by
step: both are exact. After so few steps accuracy suffers from what is dropped.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vit_examples.config import load_config
from vit_examples.harness.folders import claimed, empty
from vit_examples.one_node import started, train_command
from zeroresize.commands.__main__ import main as zeroresize
from zeroresize.utils.console import plain_console
from zeroresize.utils.files import read_json_lines
from zeroresize.utils.progress import Progress as Lines

NUM_RANKS = 2
STRAGGLER = 1
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


class RunFailed(RuntimeError):
    """A run ended with an error; the text holds its log's end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="vit_examples.demo", description="One slow rank, without and with balancing.")
    parser.add_argument("--config", default="demo", help="configuration of all runs")
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder of results")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change it, such as host=torch")
    parsed = parser.parse_args(arguments)
    console = plain_console()
    try:
        run_all(parsed.config, parsed.set, parsed.output, console)
    except (RunFailed, ValueError) as error:
        is_failed = isinstance(error, RunFailed)
        console.print(f"{'' if is_failed else 'error: '}{error}", markup=False, soft_wrap=True)
        return 1 if is_failed else 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command begins anew\n")
        return 128 + signal.SIGINT
    folders = [str(parsed.output / name.lower()) for name in RUNS]
    return zeroresize(["report", *folders, "--out", str(parsed.output / "report.html")])


def run_all(config: str, overrides: Sequence[str], output: Path, console: Console) -> None:
    """Run every entry of ``RUNS`` in a folder of its own, each emptied before.

    Raises:
        ValueError: if the configuration is wrong, or another run is at one of the folders.
        RunFailed: if a run fails.
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
                with Lines(f"{name}: steps", tell=console.print, is_shown=not console.is_terminal) as lines:
                    for done, total, note in train(config, [*overrides, *changes], folders[name]):
                        progress.update(tasks[name], completed=done, total=total, note=note)
                        lines.num_done, lines.total = done, total
                progress.stop_task(tasks[name])


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
    try:
        total = json.loads((folder / "config.json").read_text(encoding="utf-8"))["total_steps"]
    except (FileNotFoundError, json.JSONDecodeError):  # it is not there yet, or not whole
        total = None
    if not steps:
        return 0, total, "starting the ranks"
    usual_s = statistics.median(line["step_s"] for line in steps[-10:])
    return steps[-1]["step"] + 1, total, f"{1e3 * usual_s:.0f} ms a step"


if __name__ == "__main__":
    sys.exit(main())
