"""What a run shows on rank 0's terminal: a progress bar, and a table with a row for each epoch."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


class Display:
    """A context in which steps and epochs are shown; shows nothing if not ``enabled``."""

    def __init__(self, title: str, total_steps: int, *, done_steps: int, enabled: bool) -> None:
        self._console = Console()
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("epoch", total=total_steps, completed=done_steps)
        self._table = Table(title=title, title_justify="left")
        for heading in ("epoch", "loss", "step, ms", "test accuracy", "γ per rank", "stragglers"):
            self._table.add_column(heading, justify="right")
        self._live = None
        if enabled:
            self._live = Live(Group(self._table, self._progress), console=self._console, refresh_per_second=2)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
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
        """One row; epochs are counted from 1 here, ranks from 0."""
        gammas = " ".join(f"{ratio:.2f}" for ratio in ratios)
        row = (str(epoch), f"{loss:.3f}", f"{step_ms:.0f}", f"{accuracy:.1%}", gammas, _names(slow))
        self._table.add_row(*row)
        if self._live is not None and not self._console.is_terminal:  # a log file: a live table shows at the end only
            self._console.print(
                f"epoch {row[0]}: loss {row[1]}, step {row[2]} ms, test accuracy {row[3]}, "
                f"γ {row[4]}, stragglers {row[5]}"
            )


def _names(ranks: list[int]) -> str:
    return " ".join(map(str, ranks)) or "–"
