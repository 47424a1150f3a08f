"""Runs a grid of trainings and tabulates them: python -m scripts.study scripts/grids/fig10.yaml

A grid is a YAML file: a configuration of vit_examples, seeds, and named cells, each with overrides of it. Every
(cell, seed) is one run of ``vit_examples.train`` in a folder of its own, and one row of a CSV file. What has a finished
folder or a row never runs again (delete both to repeat it), so a study that was stopped goes on where it was, also on
another machine; a killed study loses at most the run that was under way. Where a run fails the others go on, and the
end tells why. ``--config vit_1b --ranks 8`` runs a grid at the paper's scale; ``scripts.plot_study`` draws the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from vit_examples.config_file import load_config
from vit_examples.launch import started, train_command
from zeroresize.value_checks import known_keys
from zeroresize.yaml_values import read_yaml

GRID_KEYS = ("config", "ranks", "seeds", "shared", "cells")


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    name: str
    seed: int
    overrides: tuple[str, ...]
    folder: Path

    @property
    def summary_file(self) -> Path:
        return self.folder / "summary.json"

    @property
    def key(self) -> tuple[str, str]:
        return self.name, str(self.seed)

    def row(self) -> dict[str, Any] | None:
        """One flat row with the versions it ran with, if the run is finished."""
        if not self.summary_file.is_file():
            return None
        summary = json.loads(self.summary_file.read_text(encoding="utf-8"))
        plain = {key: value for key, value in summary.items() if not isinstance(value, Mapping)}
        versions = {f"version_{name}": version for name, version in summary["versions"].items()}
        return {"cell": self.name, "seed": self.seed, **plain, **versions}


@dataclass(frozen=True)
class Study:
    """A grid file, read and checked."""

    name: str
    config: str
    ranks: int
    cells: tuple[Cell, ...]


def read_study(path: Path, output: Path, *, config: str | None = None, ranks: int | None = None) -> Study:
    """Read a grid; every cell's configuration is checked before any runs.

    Args:
        output: every cell gets a folder in there, in one that is named after the grid, and ``config`` and ``ranks`` if
            those are given.
        config, ranks: instead of the grid's own.

    Raises:
        ValueError: naming the file and the key or cell that is wrong.
    """
    document = read_yaml(path)
    try:
        known_keys("key", document, GRID_KEYS)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(document.get("cells"), Mapping) or "config" not in document:
        raise ValueError(f"{path}: 'config' and 'cells', a mapping, are needed")
    changes = ([Path(config).stem] if config is not None else []) + ([f"{ranks}ranks"] if ranks is not None else [])
    name = "-".join([path.stem, *changes])
    config, ranks = config or document["config"], ranks or document.get("ranks", 2)
    cells = []
    for seed in document.get("seeds", [0]):
        for cell, own in document["cells"].items():
            folder = output / name / slug(cell) / f"seed{seed}"
            values = {**document.get("shared", {}), **(own or {}), "training.seed": seed, "balance.seed": seed}
            overrides = (*(f"{key}={as_yaml(value)}" for key, value in values.items()), f"output.folder={folder}")
            try:
                load_config(config, overrides).validate_group_size(ranks)
            except ValueError as error:
                raise ValueError(f"{path}, cell {cell!r}: {error}") from error
            cells.append(Cell(cell, seed, overrides, folder))
    return Study(name, config, ranks, tuple(cells))


def as_yaml(value: Any) -> str:
    """On one line; unlike JSON it keeps keys that are numbers."""
    return yaml.safe_dump(value, default_flow_style=True, width=2**16).removesuffix("...\n").strip()


def slug(name: str) -> str:
    """A cell's name as a folder's."""
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", name.replace("/", "-"))


def run_cell(study: Study, cell: Cell) -> None:
    """Train one cell from its beginning; its output is in ``train.log``.

    Raises:
        RuntimeError: if training fails, with what its log says of the reason.
    """
    shutil.rmtree(cell.folder, ignore_errors=True)
    cell.folder.mkdir(parents=True)
    command = train_command(study.config, (*cell.overrides, "output.progress=false"), study.ranks)
    log = cell.folder / "train.log"
    with started(command, log, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}) as process:
        code = process.wait()
    if code:
        reason = reason_in(log.read_text(encoding="utf-8", errors="replace").splitlines())
        raise RuntimeError(f"cell {cell.name!r}, seed {cell.seed} failed with code {code}; from {log}:\n{reason}")


def reason_in(lines: list[str]) -> str:
    """The mistakes that ranks name (several ranks name the same one: once), or else the end of the log."""
    mistakes: dict[str, str] = {}
    for line in lines:
        if line.startswith("error (rank"):
            mistakes.setdefault(line.partition("): ")[2], line)
    return "\n".join(mistakes.values() or lines[-30:])


def run_study(study: Study, table: Path, console: Console) -> list[str]:
    """Run what is not finished yet, writing the table after every run; returns what failed."""
    rows = known_rows(study, table)
    to_run = [cell for cell in study.cells if cell.key not in rows]
    failures = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(study.name, total=len(to_run))
        for cell in to_run:
            progress.update(task, description=f"{cell.name}, seed {cell.seed}")
            try:
                run_cell(study, cell)
            except RuntimeError as error:
                failures.append(str(error))
                console.print(f"[red]failed:[/red] {cell.name}, seed {cell.seed}", highlight=False)
            write_csv(all_rows(study, table), table)
            progress.advance(task)
    return failures


def known_rows(study: Study, table: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of the study's finished runs by (cell, seed), from their folders or else from ``table``.

    Raises:
        ValueError: if a row in ``table`` is of another number of ranks.
    """
    rows = all_rows(study, table)
    known = {cell.key: rows[cell.key] for cell in study.cells if cell.key in rows}
    for (name, seed), row in known.items():
        if int(row["ranks"]) != study.ranks:
            raise ValueError(
                f"{table}: cell {name!r}, seed {seed} ran on {row['ranks']} ranks, this study is of {study.ranks}: "
                "give another --csv"
            )
    return known


def all_rows(study: Study, table: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The study's rows in the order of its cells, and after them those that ``table`` holds of other runs."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as stream:
            rows = {(row["cell"], row["seed"]): row for row in csv.DictReader(stream)}
    rows |= {cell.key: row for cell in study.cells if (row := cell.row()) is not None}
    own = {cell.key: rows.pop(cell.key) for cell in study.cells if cell.key in rows}
    return own | rows


def write_csv(rows: Mapping[tuple[str, str], dict[str, Any]], path: Path) -> None:
    """Write the table at once, so that a killed study never leaves half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(key for row in rows.values() for key in row)))
        writer.writeheader()
        writer.writerows(rows.values())
    unfinished.replace(path)


def results_table(study: Study, rows: Mapping[tuple[str, str], dict[str, Any]]) -> Table:
    """Step time and test accuracy a cell: means and standard deviations over the seeds, accuracy against the first."""
    table = Table(title=study.name, title_justify="left")
    for heading in ("cell", "seeds", "step, ms", "accuracy, %", "against the first"):
        table.add_column(heading, justify="left" if heading == "cell" else "right")
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        by_cell.setdefault(row["cell"], []).append(row)
    first = None
    for name, own in by_cell.items():
        step_ms = [float(row["step_ms"]) for row in own if row["step_ms"]]
        accuracy = [100 * float(row["test_accuracy"]) for row in own]
        first = statistics.mean(accuracy) if first is None else first
        difference = f"{statistics.mean(accuracy) - first:+.1f}"
        table.add_row(name, str(len(own)), _with_spread(step_ms, 0), _with_spread(accuracy, 1), difference)
    return table


def _with_spread(values: list[float], digits: int) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="a YAML file, such as those in scripts/grids")
    parser.add_argument("--config", help="of vit_examples, instead of the grid's")
    parser.add_argument("--ranks", type=int, help="instead of the grid's")
    parser.add_argument("--output", type=Path, default=Path("runs/studies"), help="where the runs go")
    parser.add_argument("--csv", type=Path, help="where the table goes (default: beside the runs)")
    parser.add_argument("--dry-run", action="store_true", help="check the grid, list the runs, train nothing")
    parser.add_argument("--report", action="store_true", help="tabulate what is finished, train nothing")
    arguments = parser.parse_args()
    console = Console()
    try:
        study = read_study(arguments.grid, arguments.output.resolve(), config=arguments.config, ranks=arguments.ranks)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    table = arguments.csv or arguments.output / f"{study.name}.csv"
    try:
        rows = known_rows(study, table)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if arguments.dry_run:
        for cell in study.cells:
            console.print(f"{'done' if cell.key in rows else 'to do'}  {cell.name}, seed {cell.seed}", highlight=False)
        return
    failures = [] if arguments.report else run_study(study, table, console)
    rows = known_rows(study, table)
    if rows:
        write_csv(all_rows(study, table), table)
    console.print(results_table(study, rows))
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
