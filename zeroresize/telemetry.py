"""What balancing saw and decided, one record an update or profile: as JSON lines, and for TensorBoard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from zeroresize.utils.checked import checked, integer
from zeroresize.utils.codec import FORMAT
from zeroresize.utils.files import BestEffort, EventBoard, JsonLines, require_json_lines, without_nan


class Record(Protocol):
    """Is what telemetry can write: an :class:`UpdateRecord`, a :class:`ChangeRecord`, a status, a pipeline's profile.

    Attributes:
        step: how many steps are over.
    """

    @property
    def step(self) -> int: ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""

    def scalars(self) -> Mapping[str, float]:
        """Return numbers by the names that TensorBoard shows them under; NaN where there is none."""


@dataclass(frozen=True)
class UpdateRecord:
    """One rank's view of one update. Times are seconds an iteration; NaN where nothing was measured yet.

    Attributes:
        update, step, epoch: how many of each are over.
        rank: within the tensor-parallel group.
        busy_s: T̂, busy time at full work.
        gemm_s: M̂, the part of it spent multiplying.
        is_straggler: whether the rank was found to be one.
        ratio: γ of the plan that is in force from now on, pruned and lent, also where calibration steps come first. So
            are the shares that follow.
        pruned, lent: γ's two parts once they are columns, as shares of the product FLOPs that this rank owns: what
            nobody computes, and what other ranks do.
        borrowed: what it computes for others, in units of its product FLOPs at even shares.
        owned: what it owns of the products, in the same units; 1 is what its host gave it.
        units: how many neurons, heads, … it owns, of all segments together, by what they are: 1.5 where it computes
            half of one; empty in a group of one.
        lent_to: what each other rank computes of ``lent``, by its number as text (as JSON has it).
        layer_shares: share of every layer's columns that is pruned, by layer name.
        predicted_step_s: of the group under the plan: its slowest rank's busy time and the collectives.
        bound_s: T*, below which no exact division can bring a step, what moves along with units counted as far as is
            known; NaN before all ranks were measured.
        products_bound_s: the same if products could be handed over alone.
        moving_rest: ρ, the share of this rank's step outside its products that moves along with units, as far as known.
        calibration_steps: in so many of the next steps all ranks compute all of their products nevertheless, to be
            measured.
        balancing_since_update_s: what balancing cost this rank since the last update, in all.
        moved_bytes: that this rank sent and received of units that changed hands since the last update, also to go
            home for a checkpoint and back.
        moving_s: how long that took the slowest rank.
        would: in mode "off" what each mode would do with the group, while balancing is paused to advice what this mode
            would do, by mode: ``predicted_step_s``, ``gain`` (the share of the step that it saves), and ``most_ratio``,
            the most that any rank is relieved of; ``Balancer.what_if`` tells every rank's.
        verdict: why units moved at this update, or stayed; empty where decisions move none.
    """

    update: int
    step: int
    epoch: int
    rank: int
    busy_s: float
    gemm_s: float
    is_straggler: bool
    ratio: float
    pruned: float
    lent: float
    borrowed: float
    lent_to: Mapping[str, float]
    layer_shares: Mapping[str, float]
    predicted_step_s: float
    calibration_steps: int
    balancing_since_update_s: float
    bound_s: float = math.nan
    products_bound_s: float = math.nan
    moving_rest: float = math.nan
    owned: float = 1.0
    units: Mapping[str, float] = dataclasses.field(default_factory=dict)
    moved_bytes: int = 0
    moving_s: float = 0.0
    would: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    verdict: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, None for NaN and infinity, as JSON has no such numbers."""
        return without_nan(dataclasses.asdict(self))

    def scalars(self) -> dict[str, float]:
        """Return numbers under ``balance/``, layers' shares under ``balance_layers/``."""
        return {f"balance/{name}": getattr(self, name) for name in _SCALARS} | {
            f"balance_layers/{layer}": share for layer, share in self.layer_shares.items()
        }


#: What the balancers' changes are called in TensorBoard, by kind.
_CHANGES = {
    "layers": "pipeline_changes",
    "strategies": "strategy_changes",
    "micro-batches": "microbatch_changes",
    "samples": "data_changes",
}


@dataclass(frozen=True)
class ChangeRecord:
    """What a balancer of layers, strategies, micro-batches or samples changed; plain numbers, the same on every rank.

    Attributes:
        kind: what is balanced: "layers", "strategies", "micro-batches" or "samples".
        step: how many steps were over.
        what: what was done, such as "layer 3 moves from stage 1 to 0", "shares", "leave out" or "replan".
        left_out: ranks that have no part any more.
        speeds: of all stages or ranks, as they were believed to be.
        before, after: [S + 1] boundaries of a pipeline's stages, the strategies of the ranges as plain values, or [R]
            samples of the ranks.
        step_s, expected_step_s: seconds of a step before and after, by the model of costs.
        change_s: seconds that the change took the rank that came last to it, or was to take where ``is_made`` is
            false; without those for which the next step waits for its plan, where steps are planned ahead.
        moved_bytes: that all ranks together received.
        is_made: false where memory did not suffice, or by advice only: then everything is as it was.
        reason: why it was due.
    """

    kind: Literal["layers", "strategies", "micro-batches", "samples"]
    step: int
    what: str
    left_out: tuple[int, ...]
    speeds: tuple[float, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    step_s: float
    expected_step_s: float
    change_s: float
    moved_bytes: int
    is_made: bool
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return dataclasses.asdict(self)

    def scalars(self) -> dict[str, float]:
        """Return numbers by name, under ``pipeline_changes/``, ``data_changes/`` and so on."""
        names = ("step_s", "expected_step_s", "change_s", "moved_bytes")
        numbers = {"left_out": len(self.left_out), **{name: getattr(self, name) for name in names}}
        return {f"{_CHANGES[self.kind]}/{name}": float(value) for name, value in numbers.items()}


@checked(from_step=integer(0))
class JsonLinesTelemetry:
    """Appends every record to a file, one JSON object a line; each rank needs a file of its own.

    Pass it as ``Balancer(..., on_update=JsonLinesTelemetry(path))``, or as ``on_status``, which one rank alone calls. A
    pipeline's balancer takes one as ``on_profile`` and ``on_change``; its records are the same on all ranks, so one
    rank suffices. A line is complete once written, so the file can be read while training runs and after it was killed;
    ``format`` in it is the number of the format. What cannot be written is lost, with one warning: training goes on.

    Args:
        path: the file; its folder is made.
        from_step: lines of later steps, left by an interrupted run, are dropped with the first record; 0 starts anew,
            None keeps all.

    Raises:
        ValueError: naming the file and the line, if what is there are no records.
        OSError: if the file cannot be made.
    """

    def __init__(self, path: str | Path, *, from_step: int | None = None) -> None:
        self._path, self._until = Path(path), None if from_step is None else ("step", from_step)
        require_json_lines(self._path, self._until)
        self._lines: JsonLines | None = None  # which ranks make that are given no record would take each other's away
        self._best_effort = BestEffort(f"telemetry in {path}")

    def __call__(self, record: Record) -> None:
        with self._best_effort.writing(f"step {record.step}"):
            self._lines = self._lines or JsonLines(self._path, self._until)
            self._lines.write({"format": FORMAT, **record.to_dict()})

    def close(self) -> None:
        """Write all that can be written, and close the file."""
        if self._lines is not None:
            with self._best_effort.writing("its end"):
                self._lines.close()


#: Numbers of an update that TensorBoard shows.
_SCALARS = (
    *("busy_s", "gemm_s", "ratio", "pruned", "lent", "borrowed", "owned", "moved_bytes", "moving_s"),
    *("predicted_step_s", "balancing_since_update_s"),
)


@checked(from_step=integer(0))
class TensorBoardTelemetry:
    """Shows records in TensorBoard, under the names of their ``scalars()``.

    Needs the package ``tensorboard``; each rank needs a folder of its own. What cannot be written is lost, with one
    warning: training goes on.

    Args:
        folder: where the events go.
        from_step: events of later steps, left by an interrupted run, are hidden; 0 starts anew, None keeps all.
    """

    def __init__(self, folder: str | Path, *, from_step: int | None = None) -> None:
        self._board = EventBoard(folder, from_step=from_step + 1 if from_step is not None else None)

    def __call__(self, record: Record) -> None:
        for name, value in record.scalars().items():
            if not math.isnan(value):
                self._board.add(name, value, record.step)

    def close(self) -> None:
        """Write all that can be written, and close the writer."""
        self._board.close()
