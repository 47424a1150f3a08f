"""What ``vit_examples.train`` wrote into a run's folder, read for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.report.files import files_of_ranks, read_columns, read_metrics, read_records, read_values, section_of
from vit_examples.balance_log import mean_of_plans, plan_begins
from vit_examples.config import OutputConfig
from vit_examples.harness.step_clock import num_settling
from vit_examples.step_times import TimedSteps, seconds_by_process, timed_steps, timing

#: What becomes of a rank's work, in parts of its products at even shares: computed of what its host gave it, lent,
#: dropped, owned by others by now; owned of others' by now, borrowed.
WORK = ("kept", "lent", "pruned", "moved", "taken", "borrowed")


@dataclass
class Moves:
    """Units that changed hands since the update before, by the records of all ranks.

    Attributes:
        step: of the update.
        changes: by rank, how many units of each kind it has more; a rank whose number is the same is left out.
        num_bytes: sent in all.
        seconds: that it took the slowest rank.
    """

    step: int
    changes: dict[int, dict[str, int]] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RunFolder:
    """What a run wrote.

    Attributes:
        timed: its steps, as they were timed.
        logged: seconds of the ``kind`` step lines of ``metrics.jsonl``, each the mean since the line before.
        records: of each rank, one an update; of ranks that have seen none yet nothing.
        columns: of each rank, by layer: in how many steps each column was pruned.
        summary: of a finished run, else empty; also where it is of fewer or more steps than the run has told, as before
            a run was resumed.
        config: its settings, by section.
        has_ended: whether there is such a summary, be it damaged.
        left_out: what could not be read, a sentence each.
    """

    path: Path
    timed: list[TimedSteps]
    logged: list[tuple[int, float]]
    records: dict[int, list[dict[str, Any]]]
    columns: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    has_ended: bool = False
    left_out: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read ``path``; files that only add to the page are left out where they are damaged.

        Raises:
            ValueError: if ``path`` is no folder of a run, or of one without any update yet; or naming the file that
                is damaged.
        """
        files = files_of_ranks(path, "balance", "jsonl")
        if not files:
            raise ValueError(f"{path}: no balance-rank*.jsonl there; give the output folder of vit_examples.train")
        records = {rank: found for rank, file in files.items() if (found := read_records(file))}
        if not records:
            raise ValueError(f"{path}: the balancer has made no update yet (one in balance.update_every steps)")
        lines = read_metrics(path / "metrics.jsonl")
        columns = {rank: read_columns(file) for rank, file in files_of_ranks(path, "columns", "npz").items()}
        summary, config = read_values(path / "summary.json"), read_values(path / "config.json")
        timed = timed_steps(lines)
        num_steps = _num_steps(timed, records)
        is_of_all = isinstance(summary, dict) and (not timed or summary.get("steps", num_steps) == num_steps)
        whole_summary = summary if isinstance(summary, dict) and is_of_all else {}
        return cls(
            path=path,
            timed=timed,
            logged=[(line["step"] + 1, _or_nan(line["step_s"])) for line in lines if line["kind"] == "step"],
            records=records,
            columns={rank: found for rank, found in columns.items() if not isinstance(found, str)},
            summary=whole_summary,
            config=section_of(whole_summary, "config") or (config if isinstance(config, dict) else {}),
            has_ended=bool(whole_summary) or isinstance(summary, str),
            left_out=tuple(found for found in (*columns.values(), summary, config) if isinstance(found, str)),
        )

    @property
    def mode(self) -> str:
        """``balance.mode``; empty where it is not told."""
        return str(section_of(self.config, "balance").get("mode", ""))

    @property
    def is_pinned(self) -> bool:
        """Whether ratios are pinned onto ranks, which changes plans between updates."""
        return section_of(self.config, "straggler").get("pin_ratio") is not None

    @property
    def settle_steps(self) -> int:
        """First steps of each start that do not count in the speed of the run, where it is long enough."""
        settle_steps = section_of(self.config, "output").get("settle_steps")
        return settle_steps if isinstance(settle_steps, int) else OutputConfig.settle_steps

    def left_out_steps(self) -> tuple[int, int]:
        """The fewest and the most first steps of a start that do not count in the speed: at most half of its steps."""
        of_starts = [num_settling(own, self.settle_steps) for own in seconds_by_process(self.timed) if own]
        return (min(of_starts), max(of_starts)) if of_starts else (0, self.settle_steps)

    def speed(self) -> dict[str, float]:
        """``step_ms``, the median, and ``mean_step_ms`` as ``summary.json`` has them; NaN where nothing was timed.

        Of a run that goes on they are of the steps that it has told so far.
        """
        names = ("step_ms", "mean_step_ms")
        speeds = {name: self.summary.get(name) for name in names}
        if all(isinstance(value, int | float) and value > 0 for value in speeds.values()):
            return {name: float(value) for name, value in speeds.items()}
        so_far = timing(seconds_by_process(self.timed), settle_steps=self.settle_steps, batch_size=1, steps_per_epoch=1)
        return {name: so_far[name] for name in names}

    def series(self, rank: int, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one number of a rank's records, NaN where there was none."""
        records = self.records[rank]
        return [record["step"] for record in records], [_or_nan(record[name]) for record in records]

    @property
    def num_steps(self) -> int:
        """Steps that the run has made, as far as it has told."""
        return _num_steps(self.timed, self.records)

    def slowest_at_full_work(self) -> np.ndarray:
        """Seconds, by step, that the slowest rank would have been busy with all of its work; NaN if not known."""
        by_rank = [dict(zip(*self.series(rank, "busy_s"), strict=True)) for rank in self.records]
        steps = sorted({step for busy_s in by_rank for step in busy_s})
        # A rank may be a record behind while the run goes on, or have lost one where the disk was full.
        slowest = np.max([[busy_s.get(step, np.nan) for step in steps] for busy_s in by_rank], axis=0)
        return np.append(slowest, np.nan)[np.searchsorted(steps, np.arange(1, self.num_steps + 1))]

    def plan_begins(self, rank: int) -> list[int]:
        """The step from which the plan of each of a rank's records is in force."""
        balance = section_of(self.config, "balance")
        is_forced = isinstance(balance.get("ratio"), int | float) and balance.get("ranks", "stragglers") != "stragglers"
        return plan_begins(self.records[rank], is_forced=is_forced and not self.is_pinned)

    def plans(self, rank: int, name: str) -> tuple[list[int], list[float]]:
        """One number of a rank's plans, and the step from which each is in force; NaN where there was none."""
        return self.plan_begins(rank), self.series(rank, name)[1]

    def work(self, rank: int, name: str) -> tuple[list[int], list[float]]:
        """What becomes of a rank's work by its plans, and the step from which each is in force.

        Args:
            name: one of ``WORK``.

        Returns:
            Steps, and parts of a rank's products at even shares.
        """
        return self.plan_begins(rank), [_part_of_work(record, name) for record in self.records[rank]]

    def mean_work(self, rank: int, name: str) -> float:
        """Such a part, mean over the steps of the run."""
        return mean_of_plans(*self.work(rank, name), self.num_steps)

    def most_by_a_rank(self, name: str) -> float:
        """The largest such mean of a rank."""
        return max(self.mean_work(rank, name) for rank in self.records)

    def mean_lent(self, owner: int, receiver: int) -> float:
        """What ``owner`` lent to ``receiver``, in the same units, mean over the steps of the run."""
        return mean_of_plans(*self.lent_over_time(owner, receiver), self.num_steps)

    def lent_over_time(self, owner: int, receiver: int) -> tuple[list[int], list[float]]:
        """Steps, and what ``owner`` lends to ``receiver`` from each of them to the next, in the same units."""
        shares = [record["owned"] * record["lent_to"].get(str(receiver), 0.0) for record in self.records[owner]]
        return self.plan_begins(owner), shares

    @property
    def has_moved(self) -> bool:
        """Whether a rank ever owned something else than its host gave it, or units changed hands."""
        return any(record["owned"] != 1.0 or record["moved_bytes"] for own in self.records.values() for record in own)

    def units_over_time(self, rank: int, kind: str) -> tuple[list[int], list[float]]:
        """How many units of a kind a rank owns, and the step from which on."""
        return self.plan_begins(rank), [record["units"].get(kind, np.nan) for record in self.records[rank]]

    @property
    def kinds_of_units(self) -> list[str]:
        """What units there are, in the order of the model."""
        return list(dict.fromkeys(kind for own in self.records.values() for one in own for kind in one["units"]))

    def moves(self) -> list[Moves]:
        """What changed hands by each update at which something did."""
        by_step: dict[int, Moves] = {}
        for rank, records in self.records.items():
            for before, record in zip([None, *records], records, strict=False):
                if not record["moved_bytes"]:
                    continue
                moves = by_step.setdefault(record["step"], Moves(record["step"]))
                moves.num_bytes += record["moved_bytes"] // 2  # a transfer counts on the rank that sends and receives
                moves.seconds = max(moves.seconds, record["moving_s"])
                had = before["units"] if before is not None else {}
                change = {kind: now - had[kind] for kind, now in record["units"].items() if now != had.get(kind, now)}
                if change:
                    moves.changes[rank] = change
        return [by_step[step] for step in sorted(by_step)]

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


def _num_steps(timed: Sequence[TimedSteps], records: Mapping[int, Sequence[Mapping[str, Any]]]) -> int:
    return max([*(one.end for one in timed), *(own[-1]["step"] for own in records.values())])


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _part_of_work(record: Mapping[str, Any], name: str) -> float:
    owned: float = record["owned"]
    computed = 1.0 - record["lent"] - record["pruned"]
    parts = {
        "kept": min(owned, 1.0) * computed,
        "lent": owned * record["lent"],
        "pruned": owned * record["pruned"],
        "moved": max(1.0 - owned, 0.0),
        "taken": max(owned - 1.0, 0.0) * computed,
        "borrowed": record["borrowed"],
    }
    return float(parts[name])
