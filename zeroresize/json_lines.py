"""A file of JSON objects, one a line, that grows while a run goes on and survives its being killed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends to a file. A line is complete once written, so the file can be read at any time.

    Args:
        path: the file; its folder is made.
        keep: which of the lines that are there stay, told by their contents; None keeps all. The old file is whole
            until the new one is.
    """

    def __init__(self, path: str | Path, keep: Callable[[dict[str, Any]], bool] | None = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [line for line, values in _read(path) if keep is None or keep(values)]
        kept = path.with_name(f"{path.name}.tmp")
        kept.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        kept.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one object; NaN and infinity become null."""
        self._file.write(json.dumps(without_nan(values)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file; an unfinished last line is left out, a missing file is empty.

    Raises:
        ValueError: naming the file and the line that is no JSON object.
    """
    return [values for _, values in _read(Path(path))]


def without_nan(value: Any) -> Any:
    """``value`` with None for NaN and infinity, at any depth: JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every complete line, with what it says."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = []
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), 1):
        try:
            values = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: expected a JSON object: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path}, line {number}: expected a JSON object, found {line[:40]!r}")
        lines.append((line, values))
    return lines
