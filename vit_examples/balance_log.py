"""What balancing did in a run, every rank for itself: ``balance-rank<r>.jsonl``, TensorBoard events, pruned columns.

``scripts.report`` compares runs by them.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zeroresize as zr
from vit_examples.harness.run_folder import writable
from zeroresize.utils.files import BestEffort


class BalanceLog:
    """One rank's files in a run's folder; pass it to the Balancer as ``on_update``.

    Args:
        from_step: records of later optimizer steps, left by an interrupted run, are dropped; 0 starts anew.
    """

    def __init__(self, folder: Path, rank: int, *, from_step: int) -> None:
        self._columns_file = folder / f"columns-rank{rank}.npz"
        self._columns = BestEffort(f"{self._columns_file}")
        with writable(folder):
            self._writers = (
                zr.JsonLinesTelemetry(folder / f"balance-rank{rank}.jsonl", from_step=from_step),
                zr.TensorBoardTelemetry(folder / "tensorboard" / f"rank{rank}", from_step=from_step),
            )

    def __call__(self, record: zr.UpdateRecord) -> None:
        for writer in self._writers:
            writer(record)

    def epoch(self, balancer: zr.Balancer) -> None:
        """Write in how many steps each column was pruned so far: one array a layer.

        What cannot be written stays as it was, with one warning; training goes on.
        """
        content = io.BytesIO()
        np.savez_compressed(content, **balancer.pruned_steps())
        unfinished = self._columns_file.with_name(f"unfinished-{self._columns_file.name}")
        with self._columns.writing("this epoch"):
            try:
                unfinished.write_bytes(content.getvalue())
                unfinished.replace(self._columns_file)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def plan_begins(records: Sequence[Mapping[str, Any]], *, is_forced: bool = False) -> list[int]:
    """The step from which the plan of each of a rank's records is in force, until that of the next one is.

    A record is of the plan after its step. The first update of a run changes nothing, as nothing was heard of other
    ranks until then: its plan is in force from step 0 on.

    Args:
        is_forced: whether a ratio is forced on named ranks: the plan never changes, so the first record tells of all
            steps before it, whichever update it is of.
    """
    begins = [record["step"] for record in records]
    if records and (is_forced or records[0].get("update") == 1):
        begins[0] = 0
    return begins


def mean_of_plans(begins: Sequence[int], shares: Sequence[float], num_steps: int) -> float:
    """Mean over a run's steps of shares that are in force from their step to the next one's; 0 before the first."""
    bounds = [*(min(begin, num_steps) for begin in begins), num_steps]
    held = sum((end - begin) * share for (begin, end), share in zip(itertools.pairwise(bounds), shares, strict=True))
    return held / max(num_steps, 1)


def mean_in_force(records: Sequence[Mapping[str, Any]], name: str, num_steps: int) -> float:
    """One number of a rank's records, mean over a run's steps; before the first plan that is known it is 0."""
    return mean_of_plans(plan_begins(records), [record[name] for record in records], num_steps)
