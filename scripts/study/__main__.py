"""Runs a grid of trainings and tabulates them: python -m scripts.study scripts/study/grids/fig10.yaml

A grid is a YAML file: a configuration of vit_examples, seeds, and named cells, each with overrides of it. Every
(cell, seed) is one run of ``vit_examples.train`` in a folder of its own, and one row of a CSV file. What has a finished
folder or a row never runs again (delete both to repeat it), so a study that was stopped goes on where it was, also on
another machine; where runs write checkpoints (``output.save_every``) from the newest. What is there with other settings
is an error, before anything runs. Where a run fails the others go on, and the end tells why. Runs are jobs of submitit:
side by side on SLURM, and else here, one after the other. ``scripts.study.plot`` draws the table.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import io
import re
import signal
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from scripts.study.grid import Study, read_study
from scripts.study.jobs import Jobs
from zeroresize.utils.console import plain_console
from zeroresize.utils.files import write_whole
from zeroresize.utils.progress import Progress

Rows = dict[tuple[str, str], dict[str, Any]]
NEEDED_COLUMNS = ("cell", "seed", "test_accuracy")


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file of a study.

    Raises:
        ValueError: if it is something else, or a row is cut off.
        OSError: if it cannot be read.
    """
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        rows = list(reader)
    if missing := [name for name in NEEDED_COLUMNS if name not in (reader.fieldnames or ())]:
        raise ValueError(f"{path}: not a table of scripts.study: the columns {missing} are missing")
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"{path}, row {number}: another number of values than columns: correct or delete that row")
    return rows


def step_column(rows: list[Mapping[str, Any]]) -> tuple[str, str]:
    """The column that tells the step time of all rows alike, and what it is: the mean, which older rows lack."""
    has_means = all(row.get("mean_step_ms") or not row.get("step_ms") for row in rows)
    return ("mean_step_ms", "mean step") if has_means else ("step_ms", "median step")


def all_rows(study: Study, table: Path) -> Rows:
    """The study's finished runs by (cell, seed), in the order of its cells, and behind them what else ``table`` holds.

    Raises:
        ValueError: if a run is there with other settings than this study's, or the table is damaged.
    """
    rows: Rows = {(row["cell"], row["seed"]): row for row in read_table(table)} if table.exists() else {}
    for cell in study.cells:
        row = cell.row() or rows.get(cell.key)
        there = row.get("settings") if row is not None else cell.settings_there if cell.checkpoint else cell.settings
        if there != cell.settings:
            raise ValueError(
                f"cell {cell.name!r}, seed {cell.seed} is there with other settings, in {table} or {cell.folder}:\n"
                f"  then {there}\n  now  {cell.settings}\ngive another --csv and --output, or delete it there"
            )
        if row is not None:
            rows[cell.key] = row
    of_study = {cell.key: rows.pop(cell.key) for cell in study.cells if cell.key in rows}
    return of_study | rows


def write_csv(rows: Rows, path: Path) -> None:
    """Write the table at once, so that a killed study never leaves half of it; without rows there is none."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(key for row in rows.values() for key in row)))
    writer.writeheader()
    writer.writerows(rows.values())
    write_whole(path, stream.getvalue())


def run_study(study: Study, table: Path, console: Console, jobs: Jobs) -> list[str]:
    """Run what is not finished yet, writing the table after every run; returns what failed.

    Raises:
        ValueError: if a run is there with other settings.
    """
    rows = all_rows(study, table)
    write_csv(rows, table)
    failures, submitted = [], {}
    for cell in (cell for cell in study.cells if cell.key not in rows):
        try:
            submitted[cell] = jobs.submit(study, cell)
        except ValueError as error:
            failures.append(str(error))
    try:
        with Progress("runs of the study", len(submitted)) as progress:
            for number, (cell, job) in enumerate(submitted.items(), 1):
                console.print(f"{number} of {len(submitted)}: {cell.name}, seed {cell.seed}")
                if (failure := job.exception()) is not None:  # it ends only now
                    failures.append(str(failure))
                write_csv(all_rows(study, table), table)
                progress.advance()
    except KeyboardInterrupt:
        for job in submitted.values():
            job.cancel()
        raise
    return failures


def results_table(study: Study, rows: Rows) -> Table:
    """Step time and test accuracy a cell: means and standard deviations over the seeds, accuracy against the first."""
    of_study = [rows[cell.key] for cell in study.cells if cell.key in rows]
    column, label = step_column(of_study)
    table = Table("cell", "seeds", f"{label}, ms", "accuracy, %", "against the first", title=study.name)
    first = None
    for name in dict.fromkeys(row["cell"] for row in of_study):
        rows = [row for row in of_study if row["cell"] == name]
        step_ms = [float(row[column]) for row in rows if row.get(column)]
        accuracy = [100 * float(row["test_accuracy"]) for row in rows if row.get("test_accuracy") not in ("", None)]
        first = statistics.fmean(accuracy) if accuracy and first is None else first
        difference = f"{statistics.fmean(accuracy) - first:+.1f}" if accuracy and first is not None else "-"
        table.add_row(name, str(len(rows)), _with_spread(step_ms, 0), _with_spread(accuracy, 1), difference)
    return table


def _with_spread(values: list[float], digits: int) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="a YAML file, such as those in scripts/study/grids")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="in every cell, as vit_examples.train"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/studies"), help="where the runs go")
    parser.add_argument("--csv", type=Path, help="where the table goes (default: beside the runs)")
    parser.add_argument("--only", default="", metavar="REGEX", help="the cells whose names match it")
    parser.add_argument("--cluster", help="of submitit (default: slurm where srun is, else debug: here, one by one)")
    parser.add_argument(
        "--job", action="append", default=[], metavar="KEY=VALUE", help="of each job, as gpus_per_node=8 nodes=2"
    )
    parser.add_argument("--dry-run", action="store_true", help="list and tabulate the runs, train nothing")
    options = parser.parse_args()
    console = plain_console()
    failures: list[str] = []
    try:
        study = read_study(options.grid, options.output.resolve(), changes=options.set)
        study = dataclasses.replace(
            study, cells=tuple(cell for cell in study.cells if re.search(options.only, cell.name))
        )
        table = options.csv or options.output / f"{study.name}.csv"
        if not options.dry_run:
            parameters = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in options.job)}
            failures = run_study(study, table, console, Jobs(options.output / "jobs", options.cluster, parameters))
        rows = all_rows(study, table)
    except (ValueError, OSError, re.error, yaml.YAMLError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on where it was\n")
        sys.exit(128 + signal.SIGINT)
    if options.dry_run:
        for cell in study.cells:
            state = "done" if cell.key in rows else "to do"
            console.print(f"{state}  {cell.name}, seed {cell.seed}")
    console.print(results_table(study, rows))
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
