"""What balancing saw and decided, one record an update: as JSON lines, and for TensorBoard."""

from __future__ import annotations

import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroresize.json_lines import JsonLines, without_nan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateRecord:
    """One rank's view of one update. Times are seconds an iteration; NaN where nothing was measured yet.

    Attributes:
        update, step, epoch: how many of each are over.
        rank: within the tensor-parallel group.
        busy_s: T̂, busy time at full work.
        products_s: M̂, the part of it spent multiplying.
        is_straggler: whether the rank was found to be one.
        ratio: γ in force from now on, pruned and lent, also where the next step is at full work to be measured.
        pruned_share: share of this rank's product FLOPs that it drops.
        lent_share, borrowed_share: what others compute for it and it for others, in units of its own product FLOPs.
        lent_to: what each other rank computes of ``lent_share``, by its number as text (as JSON has it).
        layer_shares: share of every layer's columns that is pruned, by layer name.
        predicted_step_s: of the group under the plan: its slowest rank's busy time and the collectives.
        begins_at_full_work: whether the next step prunes and lends nothing nevertheless, to be measured.
        balancing_s: what balancing cost this rank since the last update, in all.
        would: in mode "off", what each mode would do: γ and predicted step time of the group by mode.
    """

    update: int
    step: int
    epoch: int
    rank: int
    busy_s: float
    products_s: float
    is_straggler: bool
    ratio: float
    pruned_share: float
    lent_share: float
    borrowed_share: float
    lent_to: Mapping[str, float]
    layer_shares: Mapping[str, float]
    predicted_step_s: float
    begins_at_full_work: bool
    balancing_s: float
    would: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, None for NaN and infinity, as JSON has no such numbers."""
        return without_nan(dataclasses.asdict(self))


class Telemetry(ABC):
    """Writes records down. What cannot be written is lost, with one warning: training goes on."""

    def __init__(self) -> None:
        self._has_failed = False

    def __call__(self, record: UpdateRecord) -> None:
        try:
            self._write(record)
        except OSError as error:
            if not self._has_failed:
                logger.warning("telemetry is incomplete from step %d on: %s", record.step, error)
            self._has_failed = True

    @abstractmethod
    def _write(self, record: UpdateRecord) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """All is written."""


class JsonLinesTelemetry(Telemetry):
    """Appends every record to a file, one JSON object a line; each rank needs a file of its own.

    Pass it as ``Balancer(..., on_update=JsonLinesTelemetry(path))``. A line is complete once written, so the file can
    be read while training runs and after it was killed.

    Args:
        path: the file; its folder is made.
        from_step: lines of later steps, left by an interrupted run, are dropped first; 0 starts anew, None keeps all.
    """

    def __init__(self, path: str | Path, *, from_step: int | None = None) -> None:
        super().__init__()
        self._lines = JsonLines(path, None if from_step is None else lambda line: line["step"] <= from_step)

    def _write(self, record: UpdateRecord) -> None:
        self._lines.write(record.to_dict())

    def close(self) -> None:
        self._lines.close()


_SCALARS = (
    "busy_s",
    "products_s",
    "ratio",
    "pruned_share",
    "lent_share",
    "borrowed_share",
    "predicted_step_s",
    "balancing_s",
)


class TensorBoardTelemetry(Telemetry):
    """Shows records in TensorBoard, numbers under ``balance/``, layers' shares under ``balance_layers/``.

    Needs the package ``tensorboard``; each rank needs a folder of its own.

    Args:
        folder: where the events go.
        from_step: events of later steps, left by an interrupted run, are hidden; 0 starts anew, None keeps all.
    """

    def __init__(self, folder: str | Path, *, from_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__()
        self._board = SummaryWriter(str(folder), purge_step=from_step + 1 if from_step is not None else None)

    def _write(self, record: UpdateRecord) -> None:
        for name in _SCALARS:
            value = getattr(record, name)
            if not math.isnan(value):
                self._board.add_scalar(f"balance/{name}", value, record.step)
        for layer, share in record.layer_shares.items():
            self._board.add_scalar(f"balance_layers/{layer}", share, record.step)

    def close(self) -> None:
        self._board.close()
