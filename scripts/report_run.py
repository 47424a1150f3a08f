"""What ``vit_examples.train`` wrote into a run's folder, read for the report."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
        return max((line["step"] + 1 for line in self.steps), default=0)

    def slowest_at_full_work(self) -> tuple[list[int], list[float]]:
        """Steps and seconds: the busy time of the slowest rank, if every rank computed all of its own work."""
        by_rank = [self.series(rank, "busy_s") for rank in self.records]
        steps = min((steps for steps, _ in by_rank), key=len)  # a rank may be a record behind while the run goes on
        slowest = [max(seconds) for seconds in zip(*(values[: len(steps)] for _, values in by_rank), strict=True)]
        return steps, slowest

    def mean_lent(self, owner: int, receiver: int) -> float:
        """The share of its products that ``owner`` lent to ``receiver``, mean over its updates."""
        records = self.records[owner]
        return sum(record["lent_to"].get(str(receiver), 0.0) for record in records) / len(records)


def rank_of(file: Path) -> int:
    return int(re.search(r"rank(\d+)", file.name)[1])  # type: ignore[index]
