"""What a run writes and shows on rank 0: ``metrics.jsonl``, ``summary.json``, a table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lm_examples.microbatches.config import RunConfig
from lm_examples.microbatches.config_file import READER
from vit_examples.harness.run_record import RunRecord
from zeroresize.strategy.straggler_balancing import ChangeRecord


class Recorder(RunRecord):
    """Writes and shows a run's steps; see :class:`vit_examples.harness.run_record.RunRecord`."""

    def __init__(self, config: RunConfig, *, from_step: int, console: Console | None = None) -> None:
        parallel = config.parallel
        super().__init__(
            READER.to_dict(config),
            f"{config.model.kind}, {parallel.dp} × {parallel.tp} × {parallel.pp} ranks, {config.microbatches.method}",
            folder=Path(config.output.folder),
            files={"metrics": ("step", from_step), "changes": ("step", from_step)},
            num_steps=config.training.steps,
            num_done=from_step,
            is_shown=config.output.progress,
            console=console,
        )

    def metrics(self, step: int, numbers: Mapping[str, Any]) -> None:
        """What the steps since the last line were."""
        self.write("metrics", {"step": step, **numbers})
        text = f"loss {numbers['loss']:.4f}, {1e3 * numbers['step_s']:.0f} ms/step"
        self.tell(step, text, f", {numbers['micro_batches']:.0f} micro-batches")

    def change(self, record: ChangeRecord) -> None:
        """What became of samples and layers, as ranks were slow."""
        self.write("changes", record.to_dict())
        milliseconds = f"{1e3 * record.step_s:.0f} -> {1e3 * record.expected_step_s:.0f} ms expected"
        self.tell(record.step, record.what, f", {milliseconds}, in {record.change_s:.2f} s")


def summary_table(title: str, summary: Mapping[str, Any]) -> Table:
    """What a run has come to."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_row("steps", str(summary["steps"]))
    table.add_row("step", f"{1e3 * summary['step_s']:.1f} ms")
    table.add_row(
        "  in the pipeline", f"{1e3 * summary['work_s']:.1f} ms, planned {1e3 * summary['expected_s']:.1f} ms"
    )
    table.add_row("  waiting for the plan", f"{1e3 * summary['wait_s']:.1f} ms")
    table.add_row("planning, by one process", f"{1e3 * summary['planning_s']:.1f} ms")
    table.add_row("tokens/s", f"{summary['tokens_per_s']:,.0f}")
    table.add_row("padding", f"{100 * summary['padding']:.1f} %")
    table.add_row("micro-batches", f"{summary['micro_batches']:.1f}")
    table.add_row("computed again", f"{100 * summary['recomputed']:.0f} % of the steps", end_section=True)
    table.add_row("loss", f"{summary['loss']:.4f}")
    table.add_row("validation loss", f"{summary['validation_loss']:.4f}")
    return table
