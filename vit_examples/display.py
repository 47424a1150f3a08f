"""What a run shows on rank 0: on a terminal a table of epochs and a progress bar, in a log file a line an epoch."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from zeroresize.utils.best_effort import BestEffort


class Display:
    """A context in which steps and epochs are shown; shows nothing if not ``enabled``.

    Lines that a full disk does not take are lost, with one warning.

    Args:
        total_steps: of the whole run, with the ``done_steps`` that it had before.
    """

    def __init__(
        self, title: str, total_steps: int, *, done_steps: int, enabled: bool, console: Console | None = None
    ) -> None:
        self._console, self._title, self._enabled = console or Console(), title, enabled
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("epoch", total=total_steps, completed=done_steps)
        self._table = Table(title=title, title_justify="left")
        for heading in ("epoch", "loss", "ms/step", "test accuracy", "work", "slow ranks"):
            self._table.add_column(heading, justify="right", no_wrap=True)
        self._shown = BestEffort("what is shown of this run")
        self._live: Live | None = None
        if enabled and self._console.is_terminal:
            self._live = Live(Group(self._table, self._progress), console=self._console, refresh_per_second=2)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        elif self._enabled:
            self._line(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, epoch: int) -> None:
        """One more optimizer step."""
        self._progress.update(self._task, advance=1, description=f"epoch {epoch}")

    def epoch(
        self, epoch: int, loss: float, step_ms: float, accuracy: float, ratios: list[float], slow: list[int]
    ) -> None:
        """One row, or line of at most 80 columns; epochs are counted from 1 here, ranks from 0.

        Args:
            ratios: which share of what its host gave it each rank does not compute; negative for one that owns more.
                Shown is what is left: its work.
        """
        work = _short([1.0 - ratio for ratio in ratios])
        row = (str(epoch), f"{loss:.3f}", f"{step_ms:.0f}", f"{accuracy:.1%}", work, _names(slow))
        if self._live is not None:
            self._table.add_row(*row)
        elif self._enabled:
            self._line("epoch {}: loss {}, {} ms/step, acc. {}, work {}, slow {}".format(*row))

    def _line(self, text: str) -> None:
        with self._shown.writing("here"):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _short(work: list[float]) -> str:
    """Of two ranks each one's, of more that of the only one that has another than 1, or the range."""
    others = [rank for rank, own in enumerate(work) if own != 1.0]
    if len(work) <= 2:
        return " ".join(f"{own:.2f}" for own in work) or "–"
    if len(others) > 1:
        return f"{min(work):.2f}–{max(work):.2f}"
    return f"{work[others[0]]:.2f} on {others[0]}" if others else "1.00"


def _names(ranks: list[int]) -> str:
    return f"{len(ranks)} ranks" if len(ranks) > 3 else " ".join(map(str, ranks)) or "–"
