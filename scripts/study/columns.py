"""A study's table as it is read: its rows, and which column of them tells the step time."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

_NUMBERS = ("step_ms", "mean_step_ms", "test_accuracy")


def read_table(path: Path, needed: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a CSV file of ``scripts.study``.

    Args:
        needed: columns that it must have.

    Raises:
        ValueError: naming the file, and the line that is cut off or damaged.
        OSError: if it cannot be read.
    """
    rows = []
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"{path}: not a table of scripts.study: the columns {missing} are missing")
            for row in reader:
                if problem := _problem_of(row):
                    raise ValueError(f"{path}, line {reader.line_num}: {problem}: correct or delete that row")
                rows.append(row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {reader.line_num + 1}: not a table of scripts.study: {error}") from error
    return rows


def _problem_of(row: Mapping[str | None, Any]) -> str | None:
    if None in row or None in row.values():
        return "another number of values than columns"
    for name in _NUMBERS:
        if row.get(name) and not _is_number(row[name]):
            return f"{name}={row[name]!r} is no number"
    return None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def step_time(rows: Collection[Mapping[str, Any]]) -> tuple[str, str]:
    """The column that tells the step time of all of ``rows`` alike, and what it is.

    The mean, which counts what an epoch takes. Rows of older runs know the median only: beside them it stands for all.
    """
    if all(row.get("mean_step_ms") or not row.get("step_ms") for row in rows):
        return "mean_step_ms", "mean step"
    return "step_ms", "median step"
