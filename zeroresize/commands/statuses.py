"""Reads what a job tells of itself: files of lines of JSON that grow, of which those with a status count."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from zeroresize.commands.errors import CommandError
from zeroresize.status import Status

#: Shares that differ by less are told as the same.
_ALIKE = 0.02


def files_of(paths: Sequence[str], suffixes: tuple[str, ...] = (".jsonl",)) -> list[Path]:
    """Return these files, and of folders all with such names, at any depth.

    Raises:
        CommandError: naming what is not there, or a folder without any.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(each for each in path.rglob("*") if each.name.endswith(suffixes) and each.is_file())
        if not (inside or path.is_file()):
            raise CommandError(
                f"{path}: no file is there whose name ends in {' or '.join(suffixes)}: a job writes its status by "
                "Balancer(…, on_status=zr.JsonLinesTelemetry(path)), zr.watch or DataBalancer"
            )
        files += inside or [path]
    return list(dict.fromkeys(files))


class StatusReader:
    """Reads a file's statuses once each, also while it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._number = path, 0, 0

    def new(self) -> Iterator[Status]:
        """Yield what was written since the last call; an unfinished line waits for its end.

        Raises:
            CommandError: naming the file, where it cannot be read, and the line, where it is no JSON.
        """
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # it was begun anew
                    self._offset = self._number = 0
                file.seek(self._offset)
                content = file.read()
        except OSError as error:
            raise CommandError(f"{self.path}: cannot be read: {error.strerror}") from error
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._number += 1
            try:
                values = json.loads(line)
                is_status = isinstance(values, dict) and "ranks" in values and "expected_step_s" in values
                status = Status.from_dict(values) if is_status else None
            except (TypeError, ValueError) as error:
                raise CommandError(
                    f"{self.path}, line {self._number}: no line of JSON, or no status: {error}"
                ) from error
            if status is not None:
                yield status


def statuses_of(paths: Sequence[str]) -> dict[Path, list[Status]]:
    """Return all statuses of each file that has any.

    Raises:
        CommandError: where none has, and as :func:`files_of`.
    """
    files = files_of(paths)
    of_file = {path: list(StatusReader(path).new()) for path in files}
    if not any(of_file.values()):
        names = ", ".join(map(str, files[:4]))
        raise CommandError(f"{names}: no status is in there yet; on_status= of a balancer or a watch writes them")
    return {path: statuses for path, statuses in of_file.items() if statuses}


def changes_of(statuses: Iterable[Status]) -> Iterator[tuple[Status, Status]]:
    """Yield each status by which work is divided otherwise, after the one before it."""
    for before, after in itertools.pairwise(statuses):
        shares = zip(before.ranks, after.ranks, strict=False)
        if any(abs(now.share - then.share) > _ALIKE for then, now in shares):
            yield before, after


def starts_of(statuses: Sequence[Status]) -> list[list[Status]]:
    """Return the statuses of each start of a job: one that ended, or goes back by steps, was started again."""
    starts = [list(statuses[:1])]
    for before, after in itertools.pairwise(statuses):
        if after.step < before.step or before.state == "ended":
            starts.append([])
        starts[-1].append(after)
    return starts


def of_all_ranks(statuses: Sequence[Status]) -> list[Status]:
    """Return those that tell of as many ranks as the last one does, of which there are any."""
    return [status for status in statuses if status.ranks and len(status.ranks) == len(statuses[-1].ranks)]
