"""Shows what a slow rank costs and what balancing wins back: ``python -m vit_examples.demo`` (or ``make demo``).

Trains the same small vision transformer on two ranks for each entry of :data:`RUNS`, and ends with a table and a
picture. The runs that all others are compared with train in two halves, before and after them: a machine's speed
changes within minutes, and how far their halves differ says by how much.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vit_examples.balance_log import mean_in_force
from vit_examples.config import TrainingConfig, load_config
from vit_examples.demo_picture import save_picture
from vit_examples.harness.run_folder import claimed, empty
from vit_examples.launch import started, train_command
from vit_examples.step_times import seconds_by_process, timed_steps, timing
from zeroresize.utils.files import read_json_lines

NUM_RANKS = 2
STRAGGLER = 1
_SLOWED = ("straggler.kind=sleep", f"straggler.chi={{{STRAGGLER}: 4.0}}")


@dataclass(frozen=True)
class DemoRun:
    """One training run: how it is called, what it changes in the configuration, whether it trains in two halves."""

    name: str
    overrides: tuple[str, ...]
    in_halves: bool = False


@dataclass(frozen=True)
class Turn:
    """A run trains up to an epoch, from the start or from where it was."""

    run: DemoRun
    until_epoch: int
    goes_on: bool = False


RUNS = (
    DemoRun("homogeneous", ("balance.mode=off",), in_halves=True),
    DemoRun("Baseline", ("balance.mode=off", *_SLOWED), in_halves=True),
    DemoRun("exact", ("balance.mode=exact", *_SLOWED)),
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
    try:
        results = run_all(parsed.config, parsed.set, parsed.output, console)
    except RunFailed as failure:
        console.print(str(failure), markup=False, highlight=False, soft_wrap=True)
        return 1
    except ValueError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command begins anew\n")
        return 128 + signal.SIGINT
    picture = parsed.output / "demo.png"
    save_picture(picture, results, straggler=STRAGGLER)
    console.print(results_table(results))
    console.print(f"Picture: {picture}   Details: {parsed.output}/<run>/metrics.jsonl, summary.json, tensorboard")
    python = os.path.relpath(sys.executable)
    console.print(f"All runs compared: {python} -m scripts.report {parsed.output}", highlight=False, soft_wrap=True)
    return 0


def introduction(turns: Sequence[Turn]) -> str:
    """What is going to be trained."""
    halves = " The first two in halves: the others lie between, since a machine's speed changes."
    return (
        f"Training a small vision transformer on {NUM_RANKS} ranks, {len(RUNS)} times: undisturbed, then with rank "
        f"{STRAGGLER}'s products 4 times slower (χ = 4), without and with balancing."
        f"{halves if any(turn.goes_on for turn in turns) else ''}"
    )


def run_all(config: str, overrides: Sequence[str], output: Path, console: Console) -> dict[str, dict[str, Any]]:
    """Run every entry of ``RUNS``; gives by name its ``summary``, the ``lines`` of its metrics, the straggler's
    ``updates``, and ``halves_ms``: milliseconds of a step, the median of each of its turns.

    Raises:
        ValueError: if the configuration is wrong, or ``output`` is in use or cannot be written to.
        RunFailed: as soon as a run fails.
    """
    settings = load_config(config, overrides)
    folders = {run.name: output / run.name.lower() for run in RUNS}
    with claimed(output):
        empty(*folders.values())
        order = turns(settings.training)
        console.print(introduction(order))
        train_in_order(order, config, overrides, folders, console)
        return {name: results_of(folder, settings.output.settle_steps) for name, folder in folders.items()}


def train_in_order(
    order: Sequence[Turn], config: str, overrides: Sequence[str], folders: Mapping[str, Path], console: Console
) -> None:
    """Train turn by turn, showing how far each run is.

    Raises:
        RunFailed: as soon as a run fails.
    """
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    last_epoch = max(turn.until_epoch for turn in order)
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console, refresh_per_second=2) as progress:
        tasks = {run.name: progress.add_task(run.name, total=None, start=False, note="waiting") for run in RUNS}
        for turn in order:
            task = tasks[turn.run.name]
            progress.start_task(task)
            progress.update(task, note="starting the ranks")
            is_last = turn.until_epoch == last_epoch
            for done, total, note in train(config, [*overrides, *turn.run.overrides], folders[turn.run.name], turn):
                whole = total if total is None or is_last else total * last_epoch // turn.until_epoch
                progress.update(task, completed=done, total=whole, note=note)
            progress.stop_task(task)
            if not is_last:
                progress.update(task, note="goes on at the end")


def turns(training: TrainingConfig) -> list[Turn]:
    """Who trains when: runs in halves first and, in reverse, last.

    There are halves only where training does not depend on how many epochs are to come.
    """
    epochs = training.epochs
    if epochs < 2 or training.lr_schedule != "constant":
        return [Turn(run, epochs) for run in RUNS]
    first = [Turn(run, epochs // 2) for run in RUNS if run.in_halves]
    last = [Turn(turn.run, epochs, goes_on=True) for turn in reversed(first)]
    return [*first, *(Turn(run, epochs) for run in RUNS if not run.in_halves), *last]


def results_of(folder: Path, settle_steps: int) -> dict[str, Any]:
    """What a finished run wrote, as :func:`run_all` gives it."""
    lines = read_lines(folder)
    median_ms = [
        timing([seconds], settle_steps=settle_steps)["step_ms"] for seconds in seconds_by_process(timed_steps(lines))
    ]
    return {
        "summary": read_json(folder / "summary.json"),
        "lines": lines,
        "updates": read_json_lines(folder / f"balance-rank{STRAGGLER}.jsonl"),
        "halves_ms": median_ms,
    }


def train(config: str, overrides: Sequence[str], folder: Path, turn: Turn) -> Iterator[tuple[int, int | None, str]]:
    """Train in ranks of its own, yielding (steps done, steps in all if known, what to say) about twice a second.

    Raises:
        RunFailed: if it ends with an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = [f"output.folder={folder}", "output.progress=false", f"training.epochs={turn.until_epoch}"]
    if turn.run.in_halves:
        settings.append(f"output.save_every={turn.until_epoch}")
    command = train_command(config, (*overrides, *settings), NUM_RANKS) + (["--resume"] if turn.goes_on else [])
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
    table = Table(
        title="One slow rank, without and with balancing",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,  # without vertical lines, for which there is no room
        padding=(0, 1, 0, 0),
    )
    drops = [name for name, result in results.items() if any(update["pruned"] > 0 for update in result["updates"])]
    is_shorter = any(step_ms[name] < step_ms["homogeneous"] for name in drops)
    table.caption = caption(results, steps, is_shorter=is_shorter)
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


def caption(results: dict[str, dict[str, Any]], steps: int, *, is_shorter: bool) -> str:
    """What the table does not say of itself.

    Args:
        is_shorter: whether the step of a run that drops work is shorter than the undisturbed one's.
    """
    said = [
        f"homogeneous: nobody slow; Baseline: rank {STRAGGLER} slow, nothing done; exact: the default mode. Step: "
        "median, without the first steps of each start. Speed-up: Baseline's step over this one; slowdown: this one "
        "over homogeneous's. Moved, lent and dropped: shares of the slow rank's "
        "products, mean over all steps, also those before the first plan. What moves belongs to the other rank from "
        "then on, what is lent is computed by it step by step: both are exact. After only "
        f"{steps} steps accuracy suffers from what is dropped.",
    ]
    if is_shorter:
        said.append(
            f"Why a step may be shorter than homogeneous where work is dropped: rank {STRAGGLER} then ends 5% before "
            "the other, which does not wait for it, and while it sleeps the other has more of the machine."
        )
    halves = [
        f"{name} {' and '.join(f'{half:.0f}' for half in result['halves_ms'])} ms"
        for name, result in results.items()
        if len(result["halves_ms"]) > 1
    ]
    if halves:
        said.append(f"Noise of this machine, by halves before and after the other runs: {', '.join(halves)}.")
    return "\n".join(said)


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
