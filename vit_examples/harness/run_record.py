"""What every run writes and shows on rank 0: lines of JSON, TensorBoard, ``summary.json``, a progress bar, tables."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typing_extensions import Self

from vit_examples.harness.run_folder import writable
from zeroresize.utils.best_effort import BestEffort
from zeroresize.utils.event_board import EventBoard
from zeroresize.utils.json_lines import JsonLines, without_nan

_PACKAGES = ("torch", "colossalai", "transformers", "numpy")


class SummaryNotWrittenError(OSError):
    """What a run has come to could not be written; the message has it."""


class RunRecord:
    """A context in which a run's numbers are written and shown.

    On a terminal there is a progress bar, below a table of rows where the program has one; in a log file each row is a
    line. What cannot be written or shown while training runs is lost, with one warning a file. The ``summary.json`` of
    an earlier process is deleted, unless nothing is left to train.

    Args:
        settings: plain values of the run's configuration, for ``config.json`` and ``summary.json``.
        files: names of those of lines, without their endings, each with what :class:`JsonLines` keeps of the lines that
            an interrupted run has left.
        num_steps: of the whole run; goes into ``config.json`` for those who watch.
        num_done: steps that were done before.
        first_event: the step from which TensorBoard hides what an interrupted run has left; None for no TensorBoard.
        headings: of the table of rows; none for no such table.
        is_shown: whether anything is shown.

    Raises:
        ValueError: naming the file, if it cannot be made, or what is there is damaged.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        title: str,
        *,
        folder: Path,
        files: Mapping[str, tuple[str, int]],
        num_steps: int,
        num_done: int,
        first_event: int | None = None,
        headings: Sequence[str] = (),
        is_shown: bool,
        console: Console | None = None,
    ) -> None:
        self.title, self._settings, self._is_shown = title, settings, is_shown
        self._summary = folder / "summary.json"
        self._console = console or Console()
        self._shown = BestEffort("what is shown of this run")
        self._rows = Table(*headings, title=title, title_justify="left")
        for column in self._rows.columns:
            column.justify, column.no_wrap = "right", True
        self._bar = _BarBelowRows(self._rows, self._console, is_shown=is_shown)
        self._task = self._bar.add_task(headings[0] if headings else title, total=num_steps, completed=num_done)
        self._written = {name: BestEffort(str(folder / f"{name}.jsonl")) for name in files}
        with writable(folder):
            self._files = {name: JsonLines(folder / f"{name}.jsonl", kept) for name, kept in files.items()}
            self._board = None
            if first_event is not None:
                self._board = EventBoard(folder / "tensorboard", from_step=first_event)
            if num_done < num_steps:
                self._summary.unlink(missing_ok=True)
            described = json.dumps({**settings, "total_steps": num_steps}, indent=1)
            (folder / "config.json").write_text(described, encoding="utf-8")
        self._open = ExitStack()
        self._open.callback(self._close_files)
        self._open.callback(self._bar.stop)

    def __enter__(self) -> Self:
        self._bar.start()
        if self._bar.disable:
            self._line(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def step(self, description: str | None = None) -> None:
        """Advance the bar by an optimizer step, and describe it anew if ``description`` is given."""
        self._bar.update(self._task, advance=1, description=description)

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Append a line to a file, with the ``step`` that it is of."""
        with self._written[name].writing(f"step {values['step']}"):
            self._files[name].write(values)

    def plot(self, numbers: Mapping[str, float], prefix: str, step: int) -> None:
        """Show numbers on TensorBoard, those without a room of their own in the room ``prefix``; NaN is left out."""
        for name, value in numbers.items() if self._board is not None else ():
            if not math.isnan(value):
                self._board.add(name if "/" in name else prefix + name, value, step)

    def tell(self, step: int, text: str, more: str = "") -> None:
        """Say how it goes, behind the bar; where there is none, as a line, with ``more``."""
        self._bar.update(self._task, description=f"{self.title}: {text}")
        if self._bar.disable:
            self._line(f"step {step}: {text}{more}")

    def row(self, cells: Sequence[str], line: str) -> None:
        """Add a row to the table; where there is no terminal, say ``line`` instead."""
        if self._bar.disable:
            self._line(line)
        else:
            self._rows.add_row(*cells)

    def show(self, table: Table) -> None:
        """Show a table, beside the bar."""
        if self._is_shown:
            with self._shown.writing("here"):
                self._console.print(table)

    def close(self, summary: Mapping[str, Any], table: Table | None = None) -> None:
        """End the files, show the table, and write ``summary.json``, with versions and configuration added.

        Raises:
            SummaryNotWrittenError: if it cannot be written; other than telemetry it is what the run was for.
        """
        self._open.close()
        if table is not None:
            self.show(table)
        self._write_summary({**summary, "versions": versions(), "config": self._settings})

    def _close_files(self) -> None:
        if self._board is not None:
            self._board.close()
        for name, file in self._files.items():
            with self._written[name].writing("its end"):
                file.close()

    def _line(self, text: str) -> None:
        if self._is_shown:
            with self._shown.writing("here"):
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write what the run has come to, whole or not at all."""
        unfinished = self._summary.with_name(f"unfinished-{self._summary.name}")
        try:
            unfinished.write_text(json.dumps(without_nan(summary), indent=1), encoding="utf-8")
            unfinished.replace(self._summary)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            plain = {key: value for key, value in without_nan(summary).items() if not isinstance(value, dict)}
            raise SummaryNotWrittenError(
                f"the run is complete, but {self._summary}: cannot be written: {error.strerror}; "
                f"it would say {json.dumps(plain)}"
            ) from error


class _BarBelowRows(Progress):
    """A progress bar on terminals, below a table of rows if that has columns."""

    def __init__(self, rows: Table, console: Console, *, is_shown: bool) -> None:
        self._rows = rows
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=2,
            disable=not (is_shown and console.is_terminal),
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        if self._rows.columns:
            yield self._rows
        yield from super().get_renderables()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a run's numbers depend on."""
    from zeroresize import __version__

    by_package = {"python": platform.python_version(), "zeroresize": __version__}
    for package in _PACKAGES:
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_package[package] = "not installed"
    return by_package
