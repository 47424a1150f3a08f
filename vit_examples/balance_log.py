"""What balancing did in a run, every rank for itself: ``balance-rank<r>.jsonl``, TensorBoard events, pruned columns.

``status.jsonl`` is the group's, for ``zeroresize live`` and ``report``.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

import zeroresize as zr
from vit_examples.harness.folders import writable
from zeroresize.utils.files import BestEffort, write_whole


class BalanceLog:
    """One rank's files in a run's folder; pass it to the Balancer as ``on_update``.

    Attributes:
        status: pass it as ``on_status``.

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
            self.status = zr.JsonLinesTelemetry(folder / "status.jsonl", from_step=from_step)

    def __call__(self, record: zr.UpdateRecord) -> None:
        for writer in self._writers:
            writer(record)

    def epoch(self, balancer: zr.Balancer) -> None:
        """Write in how many steps each column was pruned so far: one array a layer.

        What cannot be written stays as it was, with one warning; training goes on.
        """
        content = io.BytesIO()
        np.savez_compressed(content, **balancer.pruned_steps())
        with self._columns.writing("this epoch"):
            write_whole(self._columns_file, content.getvalue())

    def close(self) -> None:
        for writer in (*self._writers, self.status):
            writer.close()
