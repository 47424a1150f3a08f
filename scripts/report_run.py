"""What ``vit_examples.train`` wrote into a run's folder, read for the report."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vit_examples.balance_log import mean_in_force
from zeroresize.json_lines import read_json_lines


@dataclass(frozen=True)
class RunFolder:
    """What a run wrote.

    Attributes:
        steps: the ``kind`` step lines of ``metrics.jsonl``.
        records: of each rank, one an update; of ranks that have seen none yet nothing.
        columns: of each rank, by layer: in how many steps each column was pruned.
        summary: of a finished run, else empty.
    """

    path: Path
    steps: list[dict[str, Any]]
    records: dict[int, list[dict[str, Any]]]
    columns: dict[int, dict[str, np.ndarray]]
    summary: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Raises ValueError if ``path`` is no folder of a run, or of one without any update yet."""
        files = list(path.glob("balance-rank*.jsonl"))
        if not files:
            raise ValueError(f"{path}: no balance-rank*.jsonl there; give the output folder of vit_examples.train")
        records = {rank_of(file): found for file in files if (found := read_json_lines(file))}
        if not records:
            raise ValueError(f"{path}: the balancer has made no update yet (one in balance.update_every steps)")
        columns = {rank_of(file): dict(np.load(file)) for file in path.glob("columns-rank*.npz")}
        summary, metrics = path / "summary.json", path / "metrics.jsonl"
        return cls(
            path=path,
            steps=[line for line in read_json_lines(metrics) if line["kind"] == "step"],
            records=dict(sorted(records.items())),
            columns=dict(sorted(columns.items())),
            summary=json.loads(summary.read_text(encoding="utf-8")) if summary.is_file() else {},
        )

    def series(self, rank: int, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one number of a rank's records, NaN where there was none."""
        records = self.records[rank]
        values = [np.nan if record[name] is None else record[name] for record in records]
        return [record["step"] for record in records], values

    @property
    def num_steps(self) -> int:
        """Steps that the run has made, as far as it has told."""
        logged = max((line["step"] + 1 for line in self.steps), default=0)
        return max(logged, *(records[-1]["step"] for records in self.records.values()))

    def step_times(self) -> tuple[list[int], list[float]]:
        """Steps over and seconds: the mean step since the line before, NaN where none was timed."""
        seconds = [np.nan if line["step_s"] is None else line["step_s"] for line in self.steps]
        return [line["step"] + 1 for line in self.steps], seconds

    def mean_step_s(self) -> float:
        """Seconds of a step, mean over all that were timed; NaN for none."""
        by_step = self._of_every_step(*self.step_times())
        return float(np.nanmean(by_step)) if np.isfinite(by_step).any() else np.nan

    def slowest_at_full_work(self) -> tuple[list[int], list[float]]:
        """Steps and seconds: the busy time of the slowest rank, if every rank computed all of its own work."""
        by_rank = [self.series(rank, "busy_s") for rank in self.records]
        steps = min((steps for steps, _ in by_rank), key=len)  # a rank may be a record behind while the run goes on
        slowest = np.max([values[: len(steps)] for _, values in by_rank], axis=0)
        return steps, slowest.tolist()

    def measured_and_at_full_work(self) -> tuple[float, float]:
        """Seconds of a step, means over the same steps, those of which both are known; NaN for none.

        The first is measured. The second is what the slowest rank would have been busy with all of its own work, by the
        ranks' records: an estimate of the least that the step would have taken unbalanced, without its collectives.
        """
        measured = self._of_every_step(*self.step_times())
        at_full_work = self._of_every_step(*self.slowest_at_full_work())
        known = np.isfinite(measured) & np.isfinite(at_full_work)
        if not known.any():
            return np.nan, np.nan
        return float(measured[known].mean()), float(at_full_work[known].mean())

    def mean_share(self, rank: int, name: str) -> float:
        """A share that a rank's plans name, mean over the steps of the run."""
        return mean_in_force(self.records[rank], name, self.num_steps)

    def mean_lent(self, owner: int, receiver: int) -> float:
        """The share of its products that ``owner`` lent to ``receiver``, mean over the steps of the run."""
        plans = [
            {"step": step, "lent": share} for step, share in zip(*self.lent_over_time(owner, receiver), strict=True)
        ]
        return mean_in_force(plans, "lent", self.num_steps)

    def lent_over_time(self, owner: int, receiver: int) -> tuple[list[int], list[float]]:
        """Steps, and the share of its products that ``owner`` lends to ``receiver`` from each of them to the next."""
        records = self.records[owner]
        return [record["step"] for record in records], [record["lent_to"].get(str(receiver), 0.0) for record in records]

    def loans(self) -> list[tuple[int, int]]:
        """Owner and receiver of all that was ever lent."""
        return sorted(
            {
                (owner, int(receiver))
                for owner, records in self.records.items()
                for record in records
                for receiver, share in record["lent_to"].items()
                if share > 0
            }
        )

    def _of_every_step(self, ends: Sequence[int], values: Sequence[float]) -> np.ndarray:
        """By step, what ``values`` tell of the steps up to each of ``ends``; NaN after the last."""
        return np.append(values, np.nan)[np.searchsorted(ends, np.arange(1, self.num_steps + 1))]


def rank_of(file: Path) -> int:
    return int(re.search(r"rank(\d+)", file.name)[1])  # type: ignore[index]
