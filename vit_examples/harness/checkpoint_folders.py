"""Folders of a run's checkpoints, named by how far it was: which are complete, which is the newest, which may go."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

from vit_examples.harness.manifest import sync_names

logger = logging.getLogger(__name__)


class CheckpointFolders:
    """Those called ``<unit>-<number>``; what is half written, or half deleted, ends with ``.tmp``.

    Args:
        unit: what the numbers count, such as "epoch"; an attribute, too.
        num_digits: of a number in a name that is written, at least.
    """

    def __init__(self, unit: str, num_digits: int = 1) -> None:
        self.unit, self._num_digits = unit, num_digits
        self._complete, self._unfinished = re.compile(rf"{unit}-(\d+)"), re.compile(rf"{unit}-\d+\.tmp")

    def number_of(self, checkpoint: Path) -> int:
        """How far the run was when it was written."""
        return int(checkpoint.name.removeprefix(f"{self.unit}-"))

    def complete(self, folder: Path) -> list[Path]:
        """The complete ones under ``folder``, the oldest first; of one number that which was put aside comes first."""
        named = (path for path in folder.glob(f"{self.unit}-*") if self._complete.fullmatch(path.name))
        return sorted(
            (path for path in named if path.is_dir()), key=lambda path: (self.number_of(path), -len(path.name))
        )

    def begin(self, folder: Path, number: int) -> Path:
        """An empty folder to write a checkpoint into, under the name of an unfinished one.

        What earlier processes left unfinished is deleted, whether they were killed while they wrote or deleted it.

        Raises:
            OSError: if it cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if self._unfinished.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        unfinished = self.unfinished(folder, number)
        unfinished.mkdir()
        return unfinished

    def unfinished(self, folder: Path, number: int) -> Path:
        """What a checkpoint is called while it is written."""
        return self._path(folder, number).with_suffix(".tmp")

    def complete_with(self, folder: Path, number: int) -> None:
        """Give a checkpoint that is written its name on the disk, in place of one that had it before.

        That one is put aside under a name with one more zero, which counts as complete, until the other has its name.

        Raises:
            OSError: if that cannot be done.
        """
        final = self._path(folder, number)
        aside = folder / f"{self.unit}-0{final.name.removeprefix(f'{self.unit}-')}"
        if final.is_dir():
            if aside.is_dir():
                self.delete(aside)
            final.rename(aside)
        self.unfinished(folder, number).rename(final)
        sync_names(folder)
        if aside.is_dir():
            self.delete(aside)

    def abandon(self, folder: Path, number: int, reason: object) -> None:
        """Delete what was begun of a checkpoint that cannot be written, and warn of it."""
        shutil.rmtree(self.unfinished(folder, number), ignore_errors=True)
        newest = self.newest(folder)
        logger.warning(
            "no checkpoint of %s %d, training goes on without (the newest is %s): %s",
            self.unit,
            number,
            newest.name if newest is not None else "none",
            reason,
        )

    def newest(self, folder: Path) -> Path | None:
        """The complete one of the highest number under ``folder``."""
        return next(reversed(self.complete(folder)), None)

    def delete_but(self, folder: Path, keep: int) -> None:
        """Delete all but the ``keep`` newest."""
        for old in self.complete(folder)[:-keep]:
            self.delete(old)

    def delete(self, checkpoint: Path) -> None:
        """Delete a checkpoint; a kill on the way leaves no half that looks complete, and :meth:`begin` deletes it."""
        going = checkpoint.with_suffix(".tmp")
        shutil.rmtree(going, ignore_errors=True)
        try:
            checkpoint.rename(going)
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be deleted: %s", checkpoint, error)
        shutil.rmtree(going, ignore_errors=True)

    def _path(self, folder: Path, number: int) -> Path:
        return folder / f"{self.unit}-{number:0{self._num_digits}}"


def way_out(checkpoint: Path) -> str:
    """Say what to do about a checkpoint that cannot be loaded."""
    folders = CheckpointFolders(checkpoint.name.rpartition("-")[0])
    others = [path for path in folders.complete(checkpoint.parent) if path != checkpoint]
    then = f"goes on from {others[-1].name}" if others else "starts anew"
    return f"Delete {checkpoint}, and --resume {then}"
