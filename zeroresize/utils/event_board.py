"""Numbers for TensorBoard."""

from __future__ import annotations

import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from zeroresize.utils.best_effort import BestEffort
from zeroresize.utils.growing_file import GrowingFile

_numbers = itertools.count()


class EventBoard:
    """Writes scalars where TensorBoard finds them; needs the package ``tensorboard``.

    What cannot be written is lost, with one warning. (The thread of ``torch.utils.tensorboard.SummaryWriter`` would end
    with a traceback, and all later numbers with it.)

    Args:
        folder: the folder that the events go to; each process needs one of its own.
        from_step: the first step of this run: events of it and of later ones that an interrupted run has left are
            hidden; None keeps all.

    Raises:
        OSError: if the file cannot be made.
    """

    def __init__(self, folder: str | Path, *, from_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = GrowingFile(Path(folder) / name)
        self._records = RecordWriter(self._file)
        self._best_effort = BestEffort(f"TensorBoard's {folder}")
        self._write(file_version="brain.Event:2")
        if from_step is not None:
            self._write(step=from_step, session_log=SessionLog(status=SessionLog.START))

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
