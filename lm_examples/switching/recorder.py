"""What a run writes and shows on rank 0: ``metrics.jsonl``, ``summary.json``, tables of lengths and of ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lm_examples.switching.config import RunConfig
from lm_examples.switching.config_file import READER
from lm_examples.switching.search import Choice
from vit_examples.harness.run_record import RunRecord
from zeroresize.plan.length_range import LengthRange
from zeroresize.policy.strategy.costs.search import SearchResult


class Recorder(RunRecord):
    """Writes and shows a run's steps; see :class:`vit_examples.harness.run_record.RunRecord`."""

    def __init__(
        self, config: RunConfig, choice: Choice, *, num_ranks: int, from_step: int, console: Console | None = None
    ) -> None:
        num_strategies = len({one.strategy for one in choice.ranges})
        words = "one strategy" if num_strategies == 1 else f"{num_strategies} strategies"
        super().__init__(
            READER.to_dict(config),
            f"{num_ranks} ranks, {words}, the optimizer's strategy {choice.optimizer_strategy}",
            folder=Path(config.output.folder),
            files={"metrics": ("step", from_step)},
            num_steps=config.training.steps,
            num_done=from_step,
            is_shown=config.output.progress,
            console=console,
        )

    def metrics(self, step: int, numbers: Mapping[str, Any]) -> None:
        """What the steps since the last line were."""
        self.write("metrics", {"step": step, **numbers})
        switches = f"{1e3 * numbers['switch_s']:.0f} ms of them switches and gradient sums"
        self.tell(step, f"loss {numbers['loss']:.4f}, {1e3 * numbers['step_s']:.0f} ms/step, {switches}")


def lengths_table(ranges: Sequence[LengthRange], lengths: NDArray[np.int64]) -> Table:
    """How many sequences and tokens each range has, of a sample."""
    table = Table(title=f"{len(lengths)} sequences, {lengths.sum():,} tokens", title_justify="left")
    table.add_column("length")
    for heading in ("strategy", "sequences", "tokens"):
        table.add_column(heading, justify="right")
    for begin, length_range in zip([0, *(one.up_to for one in ranges)], ranges, strict=False):
        is_inside = (lengths > begin) & (lengths <= length_range.up_to)
        shares = is_inside.mean(), lengths[is_inside].sum() / lengths.sum()
        table.add_row(
            _span(begin, length_range.up_to), str(length_range.strategy), *(f"{100 * one:.1f} %" for one in shares)
        )
    return table


def summary_table(title: str, summary: Mapping[str, Any]) -> Table:
    """What a run has come to: seconds of a step by range, the rest of it, and the losses."""
    table = Table(title=title, title_justify="left")
    for heading in ("", "strategy", "sequences", "tokens", "ms/step"):
        table.add_column(heading, justify="left" if heading in ("", "strategy") else "right")
    spent_s = summary["switch_s"]
    for of_range in summary["ranges"]:
        spent_s += of_range["seconds"]
        lengths = "up to " + ", ".join(map(str, of_range["up_to"]))
        counts = f"{of_range['sequences']:.1f}", f"{of_range['tokens']:,.0f}"
        table.add_row(lengths, of_range["strategy"], *counts, f"{1e3 * of_range['seconds']:.1f}")
    table.add_row("switches and gradient sums", "", "", "", f"{1e3 * summary['switch_s']:.1f}")
    table.add_row("optimizer and rest", "", "", "", f"{1e3 * max(summary['step_s'] - spent_s, 0.0):.1f}")
    table.add_row("step", "", "", "", f"{1e3 * summary['step_s']:.1f}", end_section=True)
    table.add_row("tokens/s", "", "", "", f"{summary['tokens_per_s']:,.0f}")
    table.add_row("loss", "", "", "", f"{summary['loss']:.4f}")
    table.add_row("validation loss", "", "", "", f"{summary['validation_loss']:.4f}")
    table.add_row("steps", "", "", "", str(summary["steps"]))
    return table


def choice_table(result: SearchResult) -> Table:
    """What a search has found, beside the best strategy for all lengths."""
    table = Table(title=f"expected: {result.speedup:.2f} times as fast as one strategy", title_justify="left")
    for heading in ("length", "strategy", "ms/step"):
        table.add_column(heading, justify="right" if heading == "ms/step" else "left")
    best, static = result.best, result.static
    begins = [0, *(one.up_to for one in best.ranges)]
    for begin, length_range, seconds in zip(begins, best.ranges, best.range_s, strict=False):
        table.add_row(_span(begin, length_range.up_to), str(length_range.strategy), f"{1e3 * seconds:.1f}")
    others_s = best.switch_s + best.reduction_s
    table.add_row(
        "switches and gradient sums",
        f"optimizer in {best.optimizer_strategy}",
        f"{1e3 * others_s:.1f}",
        end_section=True,
    )
    table.add_row("step", "", f"{1e3 * best.step_s:.1f}")
    table.add_row("step, one strategy", str(static.optimizer_strategy), f"{1e3 * static.step_s:.1f}")
    return table


def _span(begin: int, end: int) -> str:
    return f"{begin + 1} to {end}"
