"""A file of JSON objects, one a line, that grows while a run goes on and survives its being killed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroresize.utils.growing_file import GrowingFile


class JsonLines:
    """Appends to a file. A line is complete once written, so the file can be read at any time.

    Args:
        path: the file; its folder is made.
        until: the key of a number that every line has, and the largest number of the lines that stay; None keeps all
            lines. The old file stays whole until the new one is.

    Raises:
        ValueError: naming the file and the line that is no JSON object or has no such number.
        OSError: if the file cannot be made.
    """

    def __init__(self, path: str | Path, until: tuple[str, int] | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line, number, values in _read(path) if _stays(path, number, values, until)]
        kept = path.with_name(f"{path.name}.tmp")
        try:
            kept.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            kept.replace(path)
        except OSError:
            kept.unlink(missing_ok=True)
            raise
        self._file = GrowingFile(path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one object; NaN and infinity become null.

        Raises:
            OSError: if it cannot be written; then nothing of it is left in the file.
        """
        self._file.write(json.dumps(without_nan(values)).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects of a file; an unfinished last line is left out, a missing file is empty.

    Raises:
        ValueError: naming the file and the line that is no JSON object.
    """
    return [values for *_, values in _read(Path(path))]


def without_nan(value: Any) -> Any:
    """Return ``value`` with None for NaN and infinity, at any depth: JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: Path) -> list[tuple[str, int, dict[str, Any]]]:
    """Every complete line, its number from 1, and what it says."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].split("\n")[:-1], 1):
        try:
            values = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, found {line[:40]!r}")
        lines.append((line, number, values))
    return lines


def _stays(path: Path, number: int, values: Mapping[str, Any], until: tuple[str, int] | None) -> bool:
    if until is None:
        return True
    key, most = until
    value = values.get(key)
    if not isinstance(value, int):
        raise ValueError(f"{path}, line {number}: expected a number {key!r}: delete the line, or move the file away")
    return value <= most
