"""Files that survive their writer: whole ones, and lines of JSON and numbers for TensorBoard, which grow."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from zeroresize.utils.extras import need

logger = logging.getLogger(__name__)

#: Of the files of this process for TensorBoard.
_numbers = itertools.count()


class BestEffort:
    """Lets the caller go on where something cannot be written: it is lost, with one warning that names ``what``."""

    def __init__(self, what: str, failures: type[Exception] = OSError) -> None:
        self._what, self._failures, self._has_failed = what, failures, False

    @contextmanager
    def writing(self, since: str) -> Iterator[None]:
        """Run a block that writes; ``since`` says what is lost first, as in "step 20"."""
        try:
            yield
        except self._failures as error:
            if not self._has_failed:
                logger.warning("%s is incomplete from %s on: %s", self._what, since, error)
            self._has_failed = True


class GrowingFile:
    """Appends whole pieces to a file, without a buffer."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._num_bytes = self._file.tell()

    def write(self, piece: bytes) -> None:
        """Append all of ``piece``."""
        rest = memoryview(piece)
        try:
            while rest:  # of a full disk the first part of a piece may still be taken
                rest = rest[self._file.write(rest) :]
        except OSError:
            with suppress(OSError):
                self._file.truncate(self._num_bytes)
            raise
        self._num_bytes += len(piece)

    def flush(self) -> None:
        """Do nothing: no piece waits to be written."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_whole(path: str | Path, content: bytes | str) -> None:
    """Write a file that is there whole or, where it cannot be written, as it was before; its folder is there."""
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class JsonLines:
    """Appends to a file. A line is complete once written, so the file can be read at any time.

    ``until``: the key of a number that every line has, and the largest number of the lines that stay; None keeps all.
    The old file stays whole until the new one is.
    """

    def __init__(self, path: str | Path, until: tuple[str, int] | None = None) -> None:
        path = Path(path)
        lines = [line for line, number, values in _read(path) if _stays(path, number, values, until)]
        write_whole(path, "".join(f"{line}\n" for line in lines))
        self._file = GrowingFile(path)

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one object; NaN and infinity become null."""
        self._file.write(json.dumps(without_nan(values)).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def require_json_lines(path: Path, until: tuple[str, int] | None = None) -> None:
    """Check that :class:`JsonLines` can append to this file; it is made, and what is in it stays.

    Raises:
        ValueError: naming the file and the line, if what is there are no objects, or lack the number of ``until``.
        OSError: if the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()
    for _, number, values in _read(path):
        _stays(path, number, values, until)


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the objects of a file; an unfinished last line is left out, a missing file is empty."""
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


class EventBoard:
    """Writes scalars where TensorBoard finds them; needs the package ``tensorboard``, and a folder for each process.

    What cannot be written is lost, with one warning. (The thread of ``torch.utils.tensorboard.SummaryWriter`` would end
    with a traceback, and all later numbers with it.) Events of ``from_step`` and later ones that an interrupted run has
    left are hidden.
    """

    def __init__(self, folder: str | Path, *, from_step: int | None) -> None:
        events = need("tensorboard.compat.proto.event_pb2", "tensorboard")
        writer = need("tensorboard.summary.writer.record_writer", "tensorboard")
        self._event = events.Event
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = GrowingFile(Path(folder) / name)
        self._records = writer.RecordWriter(self._file)
        self._best_effort = BestEffort(f"TensorBoard's {folder}")
        self._write(file_version="brain.Event:2")
        if from_step is not None:
            self._write(step=from_step, session_log=events.SessionLog(status=events.SessionLog.START))

    def add(self, name: str, value: float, step: int) -> None:
        """Show one number."""
        from torch.utils.tensorboard.summary import scalar

        with self._best_effort.writing(f"step {step}"):
            self._write(step=step, summary=scalar(name, value))

    def close(self) -> None:
        """Write all that can be written, and end the file."""
        with self._best_effort.writing("its last numbers"):
            self._records.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
