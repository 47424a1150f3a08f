"""What every run writes and shows on rank 0: lines of JSON, ``summary.json``, a progress bar and a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typing_extensions import Self

from vit_examples.harness.run_folder import writable
from vit_examples.recorder import write_summary
from zeroresize.utils.best_effort import BestEffort
from zeroresize.utils.json_lines import JsonLines


class RunRecord:
    """A context in which a run's numbers are written and shown.

    What cannot be written while training runs is lost, with one warning a file.

    Args:
        settings: plain values of the run's configuration, for ``config.json``.
        files: names of those of lines, without their endings.
        num_steps: of the whole run.
        from_step: steps that were done before; lines of later ones, left by an interrupted run, are dropped.

    Raises:
        ValueError: naming the file, if it cannot be made, or what is there is damaged.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        title: str,
        *,
        folder: Path,
        files: Sequence[str],
        num_steps: int,
        from_step: int,
        is_shown: bool,
        console: Console | None = None,
    ) -> None:
        self.title, self._settings, self._folder, self._is_shown = title, settings, folder, is_shown
        self._console = console or Console()
        self._shown = BestEffort("what is shown of this run")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (is_shown and self._console.is_terminal),
        )
        self._task = self._progress.add_task(title, total=num_steps, completed=from_step)
        with writable(folder):
            self._files = {name: JsonLines(folder / f"{name}.jsonl", ("step", from_step)) for name in files}
            self._written = {name: BestEffort(str(folder / f"{name}.jsonl")) for name in files}
            (folder / "summary.json").unlink(missing_ok=True)
            (folder / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")

    def __enter__(self) -> Self:
        self._progress.start()
        if self._progress.disable:
            self._line(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        for name, file in self._files.items():
            with self._written[name].writing("its end"):
                file.close()

    def step(self) -> None:
        """One more optimizer step."""
        self._progress.advance(self._task)

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """A line of a file, with the ``step`` that it is of."""
        with self._written[name].writing(f"step {values['step']}"):
            self._files[name].write(values)

    def tell(self, step: int, text: str, more: str = "") -> None:
        """How it goes, behind the bar; where there is none, as a line, with ``more``."""
        self._progress.update(self._task, description=f"{self.title}: {text}")
        if self._progress.disable:
            self._line(f"step {step}: {text}{more}")

    def show(self, table: Table) -> None:
        """A table, beside the bar."""
        if self._is_shown:
            with self._shown.writing("here"):
                self._console.print(table)

    def close(self, summary: Mapping[str, Any], table: Table) -> None:
        """Write ``summary.json``, whole or not at all, and show the table.

        Raises:
            SummaryNotWrittenError: if it cannot be written.
        """
        self._progress.stop()
        self.show(table)
        write_summary(self._folder / "summary.json", {**summary, "config": self._settings})

    def _line(self, text: str) -> None:
        if self._is_shown:
            with self._shown.writing("here"):
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
