"""Folders of a run's checkpoints, named by how far it was: which are complete, which is the newest, which may go."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)


class CheckpointFolders:
    """Those called ``<unit>-<number>``; half-written ones are called otherwise.

    Args:
        unit: what the numbers count, such as "epoch".
    """

    def __init__(self, unit: str) -> None:
        self._unit, self._complete = unit, re.compile(rf"{unit}-(\d+)")

    def number_of(self, checkpoint: Path) -> int:
        """How far the run was when it was written."""
        return int(checkpoint.name.removeprefix(f"{self._unit}-"))

    def complete(self, folder: Path) -> list[Path]:
        """The complete ones under ``folder``, the oldest first."""
        found = (path for path in folder.glob(f"{self._unit}-*") if self._complete.fullmatch(path.name))
        return sorted((path for path in found if path.is_dir()), key=self.number_of)

    def newest(self, folder: Path) -> Path | None:
        """The complete one of the highest number under ``folder``."""
        return next(reversed(self.complete(folder)), None)

    def way_out(self, checkpoint: Path) -> str:
        """What to do about one that cannot be loaded."""
        others = [path for path in self.complete(checkpoint.parent) if path != checkpoint]
        then = f"goes on from {others[-1].name}" if others else "starts anew"
        return f"Delete {checkpoint}, and --resume {then}"

    def delete_but(self, folder: Path, keep: int) -> None:
        """Delete all but the ``keep`` newest."""
        for old in self.complete(folder)[:-keep]:
            self.delete(old)

    def delete(self, checkpoint: Path) -> None:
        """A kill on the way leaves no half that looks complete."""
        going = checkpoint.with_suffix(".tmp")
        shutil.rmtree(going, ignore_errors=True)
        try:
            checkpoint.rename(going)
        except OSError as error:
            logger.warning("the old checkpoint %s cannot be deleted: %s", checkpoint, error)
        shutil.rmtree(going, ignore_errors=True)
