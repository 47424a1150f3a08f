"""What ``vit_examples.train`` wrote into a run's folder, read for the report; and which runs it is compared with."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit_examples.config import OutputConfig
from vit_examples.step_times import TimedSteps, seconds_by_process, timed_steps, timing
from zeroresize.utils.files import read_json_lines

#: What may become of a rank's products besides that it computes them.
PARTS = ("moved", "lent", "dropped")
#: Settings in which runs may differ that are compared: how they balance, how long they are, and where they write.
_MAY_DIFFER = ("balance", "output", "timeout_s", "total_steps", "training.epochs", "training.seed")


@dataclass(frozen=True)
class Run:
    """What a run wrote.

    Attributes:
        name: in the folder of runs.
        timed: its steps, as they were timed.
        records: of each rank, one an update.
        summary: of a finished run, else empty; also where it is of fewer or more steps than the run has told, as before
            a run was resumed.
        config: its settings, by section.
    """

    name: str
    timed: list[TimedSteps]
    records: dict[int, list[dict[str, Any]]]
    summary: Mapping[str, Any]
    config: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, name: str) -> Run:
        """Read a folder.

        Raises:
            ValueError: if it is no run's, or naming the file that is damaged.
        """
        records = {}
        for file in path.glob("balance-rank*.jsonl"):
            rank = file.stem.removeprefix("balance-rank")
            if rank.isdecimal() and (lines := read_json_lines(file)):
                records[int(rank)] = lines
        if not records:
            raise ValueError(f"{path}: no run with an update there: give the output folder of vit_examples.train")
        try:
            timed = timed_steps(read_json_lines(path / "metrics.jsonl"))
            run = cls(name, timed, dict(sorted(records.items())), {}, _values(path / "config.json"))
            summary = _values(path / "summary.json")
            is_of_all = not timed or summary.get("steps", run.num_steps) == run.num_steps
            config = summary.get("config", run.config)
            run = cls(name, timed, run.records, summary if is_of_all else {}, config)
            run.parts(), run.speed()
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
        return run

    @property
    def num_steps(self) -> int:
        """Steps that the run has made, as far as it has told."""
        return max([*(timed.end for timed in self.timed), *(own[-1]["step"] for own in self.records.values())])

    def setting(self, section: str, key: str) -> Any:
        return self.config.get(section, {}).get(key)

    def speed(self) -> dict[str, float]:
        """``step_ms``, the median, and ``mean_step_ms`` as ``summary.json`` has them, or of the steps so far."""
        settle_steps = self.setting("output", "settle_steps")
        settle_steps = OutputConfig.settle_steps if settle_steps is None else settle_steps
        so_far = timing(seconds_by_process(self.timed), settle_steps=settle_steps)
        return {name: self.summary.get(name) or so_far[name] for name in ("step_ms", "mean_step_ms")}

    def plans(self, rank: int, part: str) -> tuple[list[int], list[float]]:
        """The step from which each of a rank's plans is in force, and what share of its even share it takes away."""
        records = self.records[rank]
        shares = [
            {
                "moved": max(1.0 - record.get("owned", 1.0), 0.0),
                "lent": record.get("owned", 1.0) * record["lent"],
                "dropped": record.get("owned", 1.0) * record["pruned"],
            }[part]
            for record in records
        ]
        # A record is of the plan after its step. Of the first update, which has heard of no other rank, or where a
        # ratio is forced on ranks, that is also the plan before.
        is_forced = self.setting("balance", "ratio") is not None and (
            self.setting("balance", "ranks") not in (None, "stragglers")
        )
        begins = [record["step"] for record in records]
        if is_forced or records[0].get("update") == 1:
            begins[0] = 0
        return begins, shares

    def mean_part(self, rank: int, part: str) -> float:
        """The same, mean over the steps of the run; 0 before the first plan that is known."""
        begins, shares = self.plans(rank, part)
        bounds = [*(min(begin, self.num_steps) for begin in begins), self.num_steps]
        held = zip(itertools.pairwise(bounds), shares, strict=True)
        return sum((end - begin) * share for (begin, end), share in held) / max(self.num_steps, 1)

    def parts(self) -> dict[str, float]:
        """The largest such mean of a rank, of each part."""
        return {part: max(self.mean_part(rank, part) for rank in self.records) for part in PARTS}

    def most_relieved(self) -> int:
        """The rank of which most was taken away."""
        return max(self.records, key=lambda rank: math.fsum(self.mean_part(rank, part) for part in PARTS))


def references_of(runs: Sequence[Run], run: Run) -> list[Run]:
    """Those in mode "off" that differ from ``run`` in nothing but how it balances, of its seed where there are any."""
    alike = [one for one in runs if one.setting("balance", "mode") == "off" and _settings(one) == _settings(run)]
    return [one for one in alike if one.setting("training", "seed") == run.setting("training", "seed")] or alike


def runs_at(path: Path) -> tuple[list[Run], list[str]]:
    """The run in a folder, or all runs in the folders below it, unbalanced ones first; and why others are left out."""
    runs, left_out = [], []
    for folder in sorted({file.parent for file in path.rglob("balance-rank*.jsonl")}):
        try:
            name = path.resolve().name if folder == path else folder.relative_to(path).as_posix()
            runs.append(Run.read(folder, name))
        except (ValueError, OSError) as error:
            left_out.append(str(error))
    return sorted(runs, key=lambda run: (run.setting("balance", "mode") != "off", run.name)), left_out


def _settings(run: Run) -> str:
    """What a step takes its time by, but for balancing."""
    flat = {
        f"{section}.{key}" if isinstance(values, Mapping) else section: value
        for section, values in run.config.items()
        if section not in _MAY_DIFFER
        for key, value in (values.items() if isinstance(values, Mapping) else [("", values)])
    }
    return repr((sorted((key, repr(flat[key])) for key in flat if key not in _MAY_DIFFER), len(run.records)))


def _values(file: Path) -> dict[str, Any]:
    """A JSON file's mapping, empty where there is none."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: damaged: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: damaged: expected a mapping")
    return values
