"""A run's output folder: it is the run's alone, and holds lines of JSON, TensorBoard's events and a summary."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
from rich import progress
from rich.table import Table
from torch.distributed import ProcessGroup

from vit_examples.harness.checkpoints import checkpoint_folder, done_at, in_words, newest, read_state
from vit_examples.harness.config_reader import plain
from vit_examples.harness.folders import claimed, writable
from vit_examples.harness.program import TERMINATED, agreed, of_all_ranks
from zeroresize.utils.console import plain_console
from zeroresize.utils.files import BestEffort, EventBoard, JsonLines, without_nan, write_whole
from zeroresize.utils.progress import Progress

logger = logging.getLogger(__name__)

_PACKAGES = ("torch", "colossalai", "transformers", "numpy")


def begin_run(
    config: Any,
    layout: Mapping[str, Any],
    process_group: ProcessGroup | None,
    held: ExitStack,
    *,
    resume: bool,
    digest: str = "",
) -> tuple[Path, dict[str, Any]] | None:
    """Take the output folder, and find what to go on from; collective.

    Args:
        layout: what a checkpoint's tensors depend on, as JSON has it.
        held: keeps other runs out of the folder until it is closed.
        digest: of what else must be the same on all ranks, such as the data.

    Returns:
        The newest checkpoint and what of it is no tensor; None where the run begins anew.
    """
    folder = Path(config.output.folder)
    for what, value in (("the configuration", json.dumps(plain(config), default=str)), ("the data", digest)):
        if len(set(of_all_ranks(value, process_group))) > 1:
            raise ValueError(f"the ranks do not agree on {what}")
    agreed(lambda: held.enter_context(claimed(folder)), process_group, first_only=True)
    checkpoint = of_all_ranks(newest(checkpoint_folder(config)), process_group)[0]

    def saved() -> tuple[Path, dict[str, Any]] | None:
        if not resume and (checkpoint is not None or (folder / "metrics.jsonl").exists()):
            raise ValueError(f"{folder} holds an earlier run: add --resume, or choose another --output")
        return None if checkpoint is None or not resume else (checkpoint, read_state(checkpoint, layout))

    checkpoint = agreed(saved, process_group)
    if resume and checkpoint is None and dist.get_rank(process_group) == 0:
        print(f"no checkpoint in {checkpoint_folder(config)}: starting anew", flush=True)
    return checkpoint


def how_to_go_on(config: Any) -> str:
    """Say what goes on from where, by what is in the run's output folder now."""
    checkpoint = newest(checkpoint_folder(config))
    if checkpoint is None:
        return "no checkpoint is written yet (output.save_every); the same command with --resume begins anew"
    return f"the same command with --resume goes on after {in_words(done_at(checkpoint))}, from {checkpoint}"


def say_end(config: Any, step: int, *, is_saved: bool) -> None:
    """Say on the first rank that SIGTERM has ended a run, and how to go on; SystemExit on all if it is not saved."""
    if dist.get_rank() == 0:
        logger.warning("SIGTERM: ended after step %d%s; %s", step, ", not saved" * (not is_saved), how_to_go_on(config))
    if not is_saved:
        raise SystemExit(TERMINATED)


class RunRecord:
    """A context in which the first rank writes and shows a run's numbers.

    What cannot be written while training runs is lost, with one warning a file.

    Args:
        num_steps, num_done: of the whole run, and those that were done before.
        files: of lines, by name, each with a key and its largest number of the lines that stay of an interrupted run.
        first_event: the step from which TensorBoard hides what an interrupted run has left; None for no TensorBoard.
    """

    def __init__(
        self,
        config: Any,
        title: str,
        *,
        num_steps: int,
        num_done: int,
        files: Mapping[str, tuple[str, int]],
        first_event: int | None = None,
    ) -> None:
        self.title, self._config = title, plain(config)
        folder, self._is_shown = Path(config.output.folder), config.output.progress
        self._summary, self._console = folder / "summary.json", plain_console()
        columns = (progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeRemainingColumn())
        is_hidden = not (self._is_shown and self._console.is_terminal)
        self._bar = progress.Progress("{task.description}", *columns, console=self._console, disable=is_hidden)
        self._task = self._bar.add_task(title, total=num_steps, completed=num_done)
        is_logged = self._is_shown and not self._console.is_terminal
        self._lines = Progress("steps", num_steps, tell=self.tell, is_shown=is_logged)
        self._lines.num_done = num_done
        self._written = {name: BestEffort(str(folder / f"{name}.jsonl")) for name in files}
        with writable(folder):
            self._files = {name: JsonLines(folder / f"{name}.jsonl", until) for name, until in files.items()}
            self._board = None if first_event is None else EventBoard(folder / "tensorboard", from_step=first_event)
            if num_done < num_steps:
                self._summary.unlink(missing_ok=True)
            described = {**without_nan(self._config), "total_steps": num_steps}
            write_whole(folder / "config.json", json.dumps(described, indent=1, default=str))

    def __enter__(self) -> Self:
        self._bar.start()
        self.tell(self.title)
        self._lines.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.__exit__()
        self._bar.stop()
        if self._board is not None:
            self._board.close()
        for name, file in self._files.items():
            with self._written[name].writing("its end"):
                file.close()

    def step(self) -> None:
        """Advance the bar by an optimizer step."""
        self._bar.advance(self._task)
        self._lines.advance()

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Append a line to a file, with the ``step`` that it is of."""
        with self._written[name].writing(f"step {values['step']}"):
            self._files[name].write(values)

    def plot(self, numbers: Mapping[str, float], prefix: str, step: int) -> None:
        """Show numbers on TensorBoard, those without a room of their own in the room ``prefix``; NaN is left out."""
        for name, value in numbers.items() if self._board is not None else ():
            if not math.isnan(value):
                self._board.add(name if "/" in name else prefix + name, value, step)

    def tell(self, what: str | Table) -> None:
        """Show a line or a table."""
        if self._is_shown:
            self._console.print(what, markup=False, soft_wrap=isinstance(what, str))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all, with versions and configuration added.

        Where it cannot be written, it is shown.
        """
        whole = without_nan({**summary, "versions": versions(), "config": self._config})
        try:
            write_whole(self._summary, json.dumps(whole, indent=1, default=str))
        except OSError as error:
            said = json.dumps(without_nan(summary), default=str)
            logger.warning("%s: cannot be written: %s; it would say %s", self._summary, error.strerror, said)


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
