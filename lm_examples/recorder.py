"""What a run of a pipeline writes and shows on rank 0 besides: ``pipeline.jsonl``, moves, layers of stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lm_examples.config import RunConfig
from lm_examples.config_file import READER
from vit_examples.harness.run_record import RunRecord
from zeroresize.pipeline import ProfileRecord, RebalancingRecord
from zeroresize.plan.partition import Partition
from zeroresize.utils.json_lines import read_json_lines


class Recorder(RunRecord):
    """Writes and shows a run's steps; see :class:`vit_examples.harness.run_record.RunRecord`.

    Attributes:
        num_moves: how often layers have moved.
        bubble_ratio: in the last profile of this process; NaN before there was one.
    """

    def __init__(self, config: RunConfig, *, num_stages: int, from_step: int, console: Console | None = None) -> None:
        folder = Path(config.output.folder)
        super().__init__(
            READER.to_dict(config),
            f"{config.case.name}, {num_stages} stages, balance {config.balance.mode}",
            folder=folder,
            files={"metrics": ("step", from_step), "pipeline": ("step", from_step)},
            num_steps=config.training.steps,
            num_done=from_step,
            is_shown=config.output.progress,
            console=console,
        )
        self.bubble_ratio = math.nan
        self.num_moves = sum(line.get("kind") == "move" for line in read_json_lines(folder / "pipeline.jsonl"))

    def metrics(self, step: int, numbers: Mapping[str, Any]) -> None:
        """One logged step."""
        self.write("metrics", {"step": step, **numbers})
        if "loss" in numbers:
            layers = " ".join(map(str, Partition(tuple(numbers["boundaries"])).counts))
            text = f"loss {numbers['loss']:.4f}, {1e3 * numbers['step_s']:.0f} ms/step"
            self.tell(step, text, f", layers {layers}")

    def balance(self, step: int, record: RebalancingRecord | ProfileRecord) -> None:
        """Layers have moved, or were measured."""
        if isinstance(record, ProfileRecord):
            self.bubble_ratio = record.bubble_ratio
        else:
            self.num_moves += 1
        self.write("pipeline", {**record.to_dict(), "step": step})


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
