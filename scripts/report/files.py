"""The files of a run, each checked: what is damaged is named, and nothing else is lost by it."""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zeroresize.telemetry import UpdateRecord
from zeroresize.utils.json_lines import read_json_lines

#: No run has more steps: a larger number is a damage, and would be asked of memory.
MOST_STEPS = 10**7
_MAPPINGS = ("lent_to", "layer_shares", "units")
#: What older records lack.
_LACKING: Mapping[str, Any] = {
    **{"owned": 1.0, "units": {}, "moved_bytes": 0, "moving_s": 0.0},
    **dict.fromkeys(("bound_s", "products_bound_s", "moving_rest")),
}
#: Of what a rank owns, which is a sum over layers: 1 but for the last bits is 1.
_DECIMALS = 6
_MAY_BE_UNKNOWN = ("busy_s", "gemm_s", "predicted_step_s", "bound_s", "products_bound_s", "moving_rest")
_NUMBERS = tuple(
    field.name
    for field in dataclasses.fields(UpdateRecord)
    if field.name not in (*_MAPPINGS, *_MAY_BE_UNKNOWN, "would")
)
_DAMAGES = (
    OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError,
)  # fmt: skip


def files_of_ranks(folder: Path, kind: str, ending: str) -> dict[int, Path]:
    """``<kind>-rank<r>.<ending>`` in a folder, by rank; what is called otherwise, as a copy, is none of them."""
    files = {
        int(match[1]): file
        for file in folder.glob(f"{kind}-rank*.{ending}")
        if (match := re.fullmatch(rf"{kind}-rank([0-9]{{1,6}})\.{ending}", file.name))
    }
    return dict(sorted(files.items()))


def read_records(file: Path) -> list[dict[str, Any]]:
    """One rank's updates; where they do not tell who owns what, every rank owns what its host gave it.

    Raises:
        ValueError: naming the file, the line, and what it lacks.
    """
    records = [{**_LACKING, **record} for record in read_json_lines(file)]
    least = 0
    for number, record in enumerate(records, 1):
        wrong = [name for name in _NUMBERS if not _is_number(record.get(name))]
        wrong += [name for name in ("update", "step") if isinstance(record.get(name), float)]
        wrong += [name for name in _MAY_BE_UNKNOWN if name not in record or not _is_unknown_or_number(record[name])]
        wrong += [name for name in _MAPPINGS if not _is_of_numbers(record.get(name))]
        if wrong:
            raise ValueError(
                f"{file}, line {number}: expected what zeroresize.UpdateRecord has; missing, or no numbers, are: "
                f"{', '.join(wrong)}"
            )
        if not all(re.fullmatch("[0-9]{1,6}", receiver) for receiver in record["lent_to"]):
            receivers = reprlib.repr(list(record["lent_to"]))
            raise ValueError(f"{file}, line {number}: expected ranks in lent_to, found {receivers}")
        _check_step(file, number, record["step"], least)
        least = record["step"] + 1
        record["owned"] = round(record["owned"], _DECIMALS)
    return records


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``; none where there is no file.

    Raises:
        ValueError: naming the file and the line that is none of them.
    """
    lines = read_json_lines(file)
    least = {"step": 0, "epoch": 0}
    for number, line in enumerate(lines, 1):
        seconds = line.get("seconds", [])
        is_step = line.get("kind") == "step" and "step_s" in line and _is_unknown_or_number(line["step_s"])
        is_epoch = line.get("kind") == "epoch" and isinstance(seconds, list) and all(map(_is_number, seconds))
        has_steps = all(isinstance(one, int) for one in (line.get("step"), line.get("from_step", 0)))
        if not (is_step or is_epoch) or not has_steps:
            raise ValueError(f"{file}, line {number}: expected a step's or an epoch's numbers, found {str(line)[:60]}")
        _check_step(file, number, line["step"], max(least[line["kind"]], len(seconds) - 1 if is_epoch else 0))
        # An epoch's line is of its last step, as is that step's own line before it.
        least = {"step": line["step"] + 1, "epoch": line["step"] + is_epoch}
    return lines


def read_columns(file: Path) -> dict[str, np.ndarray] | str:
    """Read, for each layer, in how many steps each column was pruned; or return why the file cannot be read."""
    try:
        with np.load(file) as arrays:
            columns = dict(arrays)
    except _DAMAGES as error:
        return f"{file.name} is damaged: {error}"
    if any(steps.ndim != 1 or not np.issubdtype(steps.dtype, np.integer) for steps in columns.values()):
        return f"{file.name} is damaged: expected whole numbers, one a column"
    return columns


def read_values(file: Path) -> dict[str, Any] | str:
    """A JSON file's mapping, empty where there is none; or why that cannot be told."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"{file.name} is damaged: {error}"
    return values if isinstance(values, dict) else f"{file.name} is damaged: expected a mapping"


def section_of(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping in a mapping, empty where it is none."""
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_unknown_or_number(value: Any) -> bool:
    return value is None or _is_number(value)


def _check_step(file: Path, number: int, step: int, least: int) -> None:
    if not least <= step <= MOST_STEPS:
        raise ValueError(
            f"{file}, line {number}: step is {reprlib.repr(step)}, expected {least} to {MOST_STEPS}: steps rise from "
            "line to line"
        )


def _is_of_numbers(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))
