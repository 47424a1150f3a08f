"""What a run writes and shows on rank 0: ``metrics.jsonl``, ``pipeline.jsonl``, ``summary.json``, a bar and a table."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lm_examples.config import RunConfig
from lm_examples.config_file import config_to_dict
from vit_examples.run_folder import writable
from zeroresize.pipeline import ProfileRecord, RebalancingRecord
from zeroresize.pipeline.partition import Partition
from zeroresize.utils.best_effort import BestEffort
from zeroresize.utils.json_lines import JsonLines, read_json_lines, without_nan


class Recorder:
    """A context in which a run's numbers are written and shown.

    What cannot be written while training runs is lost, with one warning a file.

    Args:
        from_step: steps that were done before; lines of later ones, left by an interrupted run, are dropped.

    Attributes:
        num_moves: how often layers have moved.
        bubble_ratio: in the last profile of this process; NaN before there was one.

    Raises:
        ValueError: naming the file, if it cannot be made, or what is there is damaged.
    """

    def __init__(self, config: RunConfig, *, num_stages: int, from_step: int, console: Console | None = None) -> None:
        self._config, self._console = config, console or Console()
        self._folder = Path(config.output.folder)
        self._title = f"{config.case.name}, {num_stages} stages, balance {config.balance.mode}"
        self._shown = BestEffort("what is shown of this run")
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (config.output.progress and self._console.is_terminal),
        )
        self._task = self._progress.add_task(self._title, total=config.training.steps, completed=from_step)
        with writable(self._folder):
            until = ("step", from_step)
            self._files = {name: JsonLines(self._folder / f"{name}.jsonl", until) for name in ("metrics", "pipeline")}
            self._written = {name: BestEffort(str(self._folder / f"{name}.jsonl")) for name in self._files}
            (self._folder / "summary.json").unlink(missing_ok=True)
            (self._folder / "config.json").write_text(json.dumps(config_to_dict(config), indent=1), encoding="utf-8")
        lines = read_json_lines(self._folder / "pipeline.jsonl")
        self.bubble_ratio = math.nan
        self.num_moves = sum(line.get("kind") == "move" for line in lines)

    def __enter__(self) -> Recorder:
        self._progress.start()
        if self._progress.disable:
            self._line(self._title)
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

    def metrics(self, step: int, numbers: Mapping[str, Any]) -> None:
        """One logged step."""
        self._write("metrics", {"step": step, **numbers})
        if "loss" in numbers:
            text = f"loss {numbers['loss']:.4f}, {1e3 * numbers['step_s']:.0f} ms/step"
            self._progress.update(self._task, description=f"{self._title}: {text}")
            if self._progress.disable:
                layers = " ".join(map(str, Partition(tuple(numbers["boundaries"])).counts))
                self._line(f"step {step}: {text}, layers {layers}")

    def balance(self, step: int, record: RebalancingRecord | ProfileRecord) -> None:
        """Layers have moved, or were measured."""
        if isinstance(record, ProfileRecord):
            self.bubble_ratio = record.bubble_ratio
        else:
            self.num_moves += 1
        self._write("pipeline", {**record.to_dict(), "step": step})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``, whole or not at all, and show the table.

        Raises:
            OSError: if it cannot be written: what a run has found is no telemetry.
        """
        self._progress.stop()
        unfinished = self._folder / "unfinished-summary.json"
        told = {**summary, "config": config_to_dict(self._config)}
        unfinished.write_text(json.dumps(without_nan(told), indent=1), encoding="utf-8")
        unfinished.replace(self._folder / "summary.json")
        if self._config.output.progress:
            with self._shown.writing("here"):
                self._console.print(summary_table(self._title, summary))

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        with self._written[name].writing(f"step {values['step']}"):
            self._files[name].write(values)

    def _line(self, text: str) -> None:
        if self._config.output.progress:
            with self._shown.writing("here"):
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def summary_table(title: str, summary: Mapping[str, Any]) -> Table:
    """What a run has come to."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("steps", str(summary["steps"]))
    table.add_row("step, median", f"{1e3 * summary['step_s']:.1f} ms")
    table.add_row("tokens/s", f"{summary['tokens_per_s']:,.0f}")
    table.add_row("loss", f"{summary['loss']:.4f}")
    table.add_row("validation loss", f"{summary['validation_loss']:.4f}")
    if math.isfinite(summary["bubble_ratio"]):
        table.add_row("bubbles, last profile", f"{100 * summary['bubble_ratio']:.0f} %")
    table.add_row("moves", str(summary["moves"]), end_section=not summary["figures"])
    for number, (name, value) in enumerate(summary["figures"].items(), 1):
        table.add_row(name, f"{value:.4g}", end_section=number == len(summary["figures"]))
    for stage, layers in enumerate(stage_names(summary["boundaries"])):
        table.add_row(f"stage {stage}", layers)
    return table


def stage_names(boundaries: Sequence[int]) -> list[str]:
    """[S] which layers a stage has, in words: of embedding, blocks and head."""
    last = boundaries[-1] - 1
    names = []
    for begin, end in itertools.pairwise(boundaries):
        blocks = range(max(begin, 1), min(end, last))
        parts = ["embedding"] if begin == 0 else []
        if blocks:
            one_or_more = f"{blocks[0] - 1}" if len(blocks) == 1 else f"{blocks[0] - 1} to {blocks[-1] - 1}"
            parts.append(f"block{'s' if len(blocks) > 1 else ''} {one_or_more}")
        names.append(", ".join(parts + (["head"] if end == last + 1 else [])))
    return names
