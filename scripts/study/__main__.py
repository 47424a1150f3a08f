"""Runs a grid of trainings and tabulates them: python -m scripts.study scripts/study/grids/fig10.yaml

A grid is a YAML file: a configuration of vit_examples, seeds, and named cells, each with overrides of it. Every
(cell, seed) is one run of ``vit_examples.train`` in a folder of its own, and one row of a CSV file. What has a finished
folder or a row never runs again (delete both to repeat it), so a study that was stopped goes on where it was, also on
another machine; a killed study loses at most the run that was under way, and where runs write checkpoints
(``output.save_every``) no more than what came after the newest (a run that has failed after its last one begins anew).
What is finished with other settings, the grid's or its configuration's, or has checkpoints of such, is an error, before
anything runs. Where a run fails the others go on, and the end tells why.
Grids called ``…_8gpu`` are at the paper's scale; ``scripts.study.plot`` draws the table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from scripts.study.grid import Cell, Study, read_study
from scripts.study.progress import StudyProgress
from scripts.study.table import (
    all_rows,
    known_rows,
    only_writer,
    require_checkpoints_of_cells,
    results_table,
    write_csv,
)
from vit_examples.harness.run_folder import empty
from vit_examples.launch import started, train_command


def run_cell(study: Study, cell: Cell) -> None:
    """Train one cell, from its newest checkpoint if it can go on from there, or else in an emptied folder.

    Its output is at the end of ``train.log``. Checkpoints are deleted when it is finished.

    Raises:
        RuntimeError: if training fails, with what its log says of the reason, or another run is at that folder.
    """
    command = train_command(study.config, (*cell.overrides, "output.progress=false"), cell.ranks)
    goes_on = cell.can_go_on(study.base)
    if goes_on:
        command.append("--resume")
    else:
        try:
            empty(cell.folder)
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        cell.settings_file.write_text(cell.settings, encoding="utf-8")
        cell.base_file.write_text(study.base, encoding="utf-8")
    log = cell.folder / "train.log"
    size_before = log.stat().st_size if log.exists() else 0
    with started(command, log, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}) as process:
        code = process.wait()
    if code:
        cell.summary_file.unlink(missing_ok=True)  # where only the end of a run failed: it is not finished
        said = log.read_bytes()[size_before:].decode("utf-8", errors="replace")
        hint = f" (if its checkpoint no longer loads, delete {cell.folder})" if goes_on else ""
        raise RuntimeError(
            f"cell {cell.name!r}, seed {cell.seed} failed with code {code}{hint}; from {log}:\n"
            f"{reason_in(said.splitlines())}"
        )
    shutil.rmtree(cell.checkpoint_folder, ignore_errors=True)


def reason_in(lines: list[str]) -> str:
    """The mistakes that ranks name (several ranks name the same one: once), or else the end of the log."""
    mistakes: dict[str, str] = {}
    for line in lines:
        if line.startswith("error (rank"):
            mistakes.setdefault(line.partition("): ")[2], line)
    return "\n".join(mistakes.values() or lines[-30:])


def run_study(study: Study, table: Path, console: Console) -> list[str]:
    """Run what is not finished yet, writing the table after every run; returns what failed.

    Raises:
        ValueError: if a finished run or a checkpoint is of other settings, or another study writes this table or runs
            this grid.
    """
    failures = []
    with ExitStack() as held:
        for path in (table, *{cell.folder.parent.parent for cell in study.cells}):
            held.enter_context(only_writer(path))
        rows = known_rows(study, table)
        require_checkpoints_of_cells(study, rows)
        for cell in study.cells:
            if cell.row() is not None:  # and the study was killed before it deleted them
                shutil.rmtree(cell.checkpoint_folder, ignore_errors=True)
        write_csv(all_rows(study, table), table)
        to_run = [cell for cell in study.cells if cell.key not in rows]
        progress = held.enter_context(StudyProgress(len(study.cells), len(study.cells) - len(to_run), console))
        for cell in to_run:
            progress.begin(f"{cell.name}, seed {cell.seed}")
            has_failed = False
            try:
                run_cell(study, cell)
            except RuntimeError as error:
                failures.append(str(error))
                has_failed = True
            write_csv(all_rows(study, table), table)
            progress.end(has_failed=has_failed)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path, help="a YAML file, such as those in scripts/study/grids")
    parser.add_argument("--config", help="of vit_examples, instead of the grid's")
    parser.add_argument("--ranks", type=int, help="instead of the grid's, and of its cells'")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="in every cell, as vit_examples.train"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/studies"), help="where the runs go")
    parser.add_argument("--csv", type=Path, help="where the table goes (default: beside the runs)")
    parser.add_argument("--dry-run", action="store_true", help="check the grid, list the runs, train nothing")
    parser.add_argument("--report", action="store_true", help="tabulate what is finished, train nothing")
    arguments = parser.parse_args()
    console = Console()
    try:
        study = read_study(
            arguments.grid,
            arguments.output.resolve(),
            config=arguments.config,
            ranks=arguments.ranks,
            changes=arguments.set,
        )
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    table = arguments.csv or arguments.output / f"{study.name}.csv"
    failures: list[str] = []
    try:
        rows = known_rows(study, table)
        if arguments.dry_run:
            require_checkpoints_of_cells(study, rows)
            for cell in study.cells:
                state = "done" if cell.key in rows else "to do"
                console.print(f"{state}  {cell.name}, seed {cell.seed}", highlight=False)
            return
        if not arguments.report:
            failures = run_study(study, table, console)
            rows = known_rows(study, table)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on where it was\n")
        sys.exit(128 + signal.SIGINT)
    console.print(results_table(study, rows))
    if failures:
        sys.exit("\n".join(f"error: {failure}" for failure in failures))


if __name__ == "__main__":
    main()
