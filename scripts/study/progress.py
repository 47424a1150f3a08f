"""How far a study is: on a terminal a bar, elsewhere a line a cell; both with the time that is left.

A cell takes minutes, so what is left is told by all cells that have finished.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class CellTimes:
    """Seconds that cells took, and from them what is left; failed cells say nothing of how long one takes.

    Args:
        num_left: cells that are still to run.
        clock: seconds since anything.
    """

    def __init__(self, num_left: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_left, self._clock = num_left, clock
        self._finished_s: list[float] = []
        self._began: float | None = None

    def begin(self) -> None:
        """The next cell runs."""
        self._began = self._clock()

    def end(self, *, has_failed: bool) -> float:
        """It has ended; returns the seconds it took."""
        took_s = self._elapsed_s()
        self._began = None
        self._num_left -= 1
        if not has_failed:
            self._finished_s.append(took_s)
        return took_s

    def left_s(self) -> float | None:
        """Seconds until no cell is left, the one that runs included; None where none has finished yet."""
        if self._num_left == 0:
            return 0.0
        if not self._finished_s:
            return None
        mean_s = sum(self._finished_s) / len(self._finished_s)
        return self._num_left * mean_s - min(self._elapsed_s(), mean_s)

    def _elapsed_s(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began


class StudyProgress:
    """A context that shows the cells of a study as they begin and end.

    Args:
        num_cells, num_done: of the whole study, and of those how many had finished before.
    """

    def __init__(
        self, num_cells: int, num_done: int, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._num_cells, self._num_done = console, num_cells, num_done
        self._times = CellTimes(num_cells - num_done, clock)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = _LeftColumn(self._times)
        self._bar = Progress(*columns, left, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=num_cells, completed=num_done)
        self._cell = ""

    def __enter__(self) -> StudyProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, cell: str) -> None:
        """That cell runs now."""
        self._cell = cell
        self._times.begin()
        self._bar.update(self._task, description=cell)

    def end(self, *, has_failed: bool) -> None:
        """It has ended; that it failed is said on a terminal, too."""
        took_s = self._times.end(has_failed=has_failed)
        self._num_done += 1
        self._bar.advance(self._task)
        if self._console.is_terminal and not has_failed:
            return
        state = "failed" if has_failed else "finished"
        line = f"{self._num_done}/{self._num_cells} {state}: {self._cell}, {duration(took_s)}; "
        line += left_text(self._times.left_s())
        self._console.print(line, style="red" if has_failed else "", markup=False, highlight=False, soft_wrap=True)


class _LeftColumn(ProgressColumn):
    """What is left, running down while a cell runs."""

    def __init__(self, times: CellTimes) -> None:
        super().__init__()
        self._times = times

    def render(self, task: Task) -> Text:
        return Text(left_text(self._times.left_s()))


def left_text(seconds: float | None) -> str:
    """As ``left 1:02:30``; a question mark where it is not known."""
    return f"left {'?' if seconds is None else duration(seconds)}"


def duration(seconds: float) -> str:
    """As ``0:04:10``."""
    return str(datetime.timedelta(seconds=round(seconds)))
