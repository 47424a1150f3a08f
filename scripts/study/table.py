"""The table of a study: one CSV row a finished run, kept through kills and beside other grids' rows."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from scripts.study.columns import read_table, step_time
from scripts.study.grid import Cell, Study
from vit_examples.harness.file_lock import locked

NEEDED_COLUMNS = ("cell", "seed", "test_accuracy")

Rows = dict[tuple[str, str], dict[str, Any]]


def known_rows(study: Study, table: Path) -> Rows:
    """The rows of the study's finished runs by (cell, seed), from their folders or else from ``table``.

    Raises:
        ValueError: if one of them ran with other settings than this study's, or changed another base; rows that tell
            no base count.
    """
    rows = all_rows(study, table)
    known = {cell.key: rows[cell.key] for cell in study.cells if cell.key in rows}
    for cell in study.cells:
        if cell.key not in known:
            continue
        row = known[cell.key]
        if other := _difference(study, cell, row.get("settings") or "not told", row.get("base") or study.base):
            raise ValueError(
                f"cell {cell.name!r}, seed {cell.seed} is finished with other {other[0]}, in {table} or {cell.folder}:"
                f"\n{other[1]}\ngive another --csv and --output, or delete that row and that folder"
            )
    return known


def require_checkpoints_of_cells(study: Study, rows: Rows) -> None:
    """Check that no cell that is still to run (is not in ``rows``) would delete what a run of other settings left.

    Raises:
        ValueError: naming all folders with a checkpoint of other settings or of another base, and what differs.
    """
    others = {}
    for cell in study.cells:
        if cell.key not in rows and cell.checkpoint is not None:
            settings, base = cell.settings_and_base
            if other := _difference(study, cell, settings or "not told", base or "not told"):
                others[cell.folder] = other
    if others:
        what, then_and_now = next(iter(others.values()))
        folders = "\n".join(f"  {folder}" for folder in others)
        raise ValueError(
            f"these folders hold checkpoints of other settings, which would be deleted:\n{folders}\n"
            f"the first are of other {what}:\n{then_and_now}\ngive another --output, or delete these folders"
        )


def _difference(study: Study, cell: Cell, settings: str, base: str) -> tuple[str, str] | None:
    """What of a run is not as ``cell`` has it, and both, a line each; None if nothing."""
    for what, then, now in (("settings", settings, cell.settings), (f"settings in {study.config}", base, study.base)):
        if then != now:
            return what, f"  then {then}\n  now  {now}"
    return None


def all_rows(study: Study, table: Path) -> Rows:
    """The study's rows in the order of its cells, and after them those that ``table`` holds of other runs.

    Raises:
        ValueError: naming the file, the table or of a run, that is damaged or something else.
    """
    rows: Rows = {}
    if table.is_dir():
        raise ValueError(f"{table}: a folder, not a table of scripts.study: give another --csv")
    if table.exists():
        rows = {(row["cell"], row["seed"]): row for row in read_table(table, NEEDED_COLUMNS)}
    rows |= {cell.key: row for cell in study.cells if (row := cell.row()) is not None}
    finished = {cell.key: rows.pop(cell.key) for cell in study.cells if cell.key in rows}
    return finished | rows


def write_csv(rows: Mapping[tuple[str, str], dict[str, Any]], path: Path) -> None:
    """Write the table at once, so that a killed study never leaves half of it; without rows there is none."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    with unfinished.open("x", newline="", encoding="utf-8") as stream:  # a file of its own, whatever was there
        writer = csv.DictWriter(stream, fieldnames=list(dict.fromkeys(key for row in rows.values() for key in row)))
        writer.writeheader()
        writer.writerows(rows.values())
    unfinished.replace(path)


@contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Nobody else is within such a block of the same path; the lock lies beside it.

    Raises:
        ValueError: if somebody is, or there can be no lock.
    """
    whole = path.resolve()
    try:
        whole.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error}") from error
    with locked(whole.with_name(f".{whole.name}.lock"), f"{path}: another study is at it"):
        yield


def results_table(study: Study, rows: Mapping[tuple[str, str], dict[str, Any]]) -> Table:
    """Step time and test accuracy a cell: means and standard deviations over the seeds, accuracy against the first."""
    table = Table(title=study.name, title_justify="left")
    step_column, step_label = step_time(rows.values())
    for heading in ("cell", "seeds", f"{step_label}, ms", "accuracy, %", "against the first"):
        table.add_column(heading, justify="left" if heading == "cell" else "right")
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for row in rows.values():
        by_cell.setdefault(row["cell"], []).append(row)
    first = None
    for name, rows in by_cell.items():
        step_ms = [float(row[step_column]) for row in rows if row.get(step_column)]
        accuracy = [100 * float(row["test_accuracy"]) for row in rows if row.get("test_accuracy") not in ("", None)]
        mean = statistics.mean(accuracy) if accuracy else None
        first = mean if first is None else first
        difference = f"{mean - first:+.1f}" if mean is not None and first is not None else "-"
        table.add_row(name, str(len(rows)), _with_spread(step_ms, 0), _with_spread(accuracy, 1), difference)
    return table


def _with_spread(values: list[float], digits: int) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"
