"""How far something is that a person waits for: a bar on a terminal, or a line each 15 seconds in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from zeroresize.utils.texts import duration_text

#: What takes less seconds than this is not told, and so many lie between two lines.
_QUIET_S, LINE_EVERY_S = 2.0, 15.0


class Progress:
    """A context that tells, beginning after two seconds, by a thread of its own, how far its block is.

    Args:
        what: is done or waited for, as a line begins.
        total: how many parts it has; None where nobody knows.
        tell: takes a line, such as a logger's ``info``; None for a bar on stderr, and where that is no terminal, or
            rich is not installed, lines there.
        is_shown: whether this rank is the one that tells.
    """

    def __init__(
        self, what: str, total: int | None = None, *, tell: Callable[[str], object] | None = None, is_shown: bool = True
    ) -> None:
        self._what, self.total, self._tell = what, total, tell
        self.num_done, self._note = 0, ""
        self._bar: Any = None
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if not is_shown:
            self._has_ended.set()

    def advance(self, note: str = "") -> None:
        """Count a part as done; ``note`` says what comes, or how it is."""
        self.num_done, self._note = self.num_done + 1, note
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self.num_done, note=note)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()

    def _run(self) -> None:
        began = time.monotonic()
        if self._has_ended.wait(_QUIET_S):
            return
        self._bar = self._started_bar() if self._tell is None and sys.stderr.isatty() else None
        while self._bar is None:
            of_all = "" if self.total is None else f" of {self.total}"
            done = f": {self.num_done}{of_all}" if self.num_done or of_all else ""
            line = f"{self._what}{done}{self._note and f' ({self._note})'}, {duration_text(time.monotonic() - began)}"
            print(line, file=sys.stderr, flush=True) if self._tell is None else self._tell(line)
            if self._has_ended.wait(LINE_EVERY_S):
                return

    def _started_bar(self) -> Any:
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

            from zeroresize.utils.console import plain_console
        except ModuleNotFoundError:
            return None
        counted = () if self.total is None else (MofNCompleteColumn(),)
        columns = ("{task.description}", BarColumn(), *counted, TimeElapsedColumn(), "{task.fields[note]}")
        bar = Progress(
            *columns, console=plain_console(stderr=True), redirect_stdout=sys.stdout.isatty(), transient=True
        )
        bar.add_task(self._what, total=self.total, completed=self.num_done, note=self._note)
        bar.start()
        return bar
