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
        for heading in ("epoch", "loss", "ms/step", "test accuracy", "γ", "slow ranks"):
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
        """One row, or line of at most 80 columns; epochs are counted from 1 here, ranks from 0."""
        row = (str(epoch), f"{loss:.3f}", f"{step_ms:.0f}", f"{accuracy:.1%}", _short_ratios(ratios), _names(slow))
        if self._live is not None:
            self._table.add_row(*row)
        elif self._enabled:
            self._line("epoch {}: loss {}, {} ms/step, accuracy {}, γ {}, slow {}".format(*row))

    def _line(self, text: str) -> None:
        with self._shown.writing("here"):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _short_ratios(ratios: list[float]) -> str:
    """Of two ranks each γ, of one pruning rank its γ and name, of more the range."""
    pruning = [rank for rank, ratio in enumerate(ratios) if ratio > 0]
    if len(ratios) <= 2:
        return " ".join(f"{ratio:.2f}" for ratio in ratios) or "–"
    if len(pruning) > 1:
        return f"{min(ratios):.2f}–{max(ratios):.2f}"
    return f"{ratios[pruning[0]]:.2f} on {pruning[0]}" if pruning else "0.00"


def _names(ranks: list[int]) -> str:
    return f"{len(ranks)} ranks" if len(ranks) > 3 else " ".join(map(str, ranks)) or "–"
