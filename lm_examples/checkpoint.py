"""What a run's checkpoint holds besides layers; see :mod:`vit_examples.harness.checkpoint_files`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from vit_examples.harness import checkpoint_files
from vit_examples.harness.checkpoint_folders import CheckpointFolders
from zeroresize.utils.value_checks import at_least, known_keys

STEPS = CheckpointFolders("step", 8)


@dataclass(frozen=True)
class SavedSteps(checkpoint_files.SavedState):
    """What of a run that counts steps is no tensor of its model.

    Attributes:
        step: how many are done.
    """

    folders: ClassVar[CheckpointFolders] = STEPS
    step: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("step", self.step, 1)

    @property
    def number(self) -> int:
        return self.step


@dataclass(frozen=True)
class Unwritten:
    """What the next line of ``metrics.jsonl`` needs of steps before a checkpoint.

    Attributes:
        losses: of each step.
        seconds: of each step, on the first stage.
        slept_s: mean seconds over the stages, of all of them.

    Raises:
        ValueError: for anything else than numbers.
    """

    losses: Sequence[float] = ()
    seconds: Sequence[float] = ()
    slept_s: float = 0.0

    def __post_init__(self) -> None:
        lists = all(isinstance(one, list | tuple) for one in (self.losses, self.seconds))
        if not lists or not all(isinstance(one, int | float) for one in (*self.losses, *self.seconds, self.slept_s)):
            raise ValueError("unwritten holds something else than numbers")


@dataclass(frozen=True)
class SavedState(SavedSteps):
    """What of a run is no tensor of its layers.

    Attributes:
        chosen: ``pipeline.boundaries`` of the run that wrote it.
        unwritten: of the steps since the last line of ``metrics.jsonl``.
        boundaries: in force.
        balancer: None where there was none.
    """

    chosen: Any
    boundaries: tuple[int, ...]
    balancer: dict[str, Any] | None
    case: dict[str, Any]
    unwritten: Unwritten = field(default_factory=Unwritten)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.case, dict):
            raise ValueError("case is no mapping")
        if self.balancer is not None and not isinstance(self.balancer, dict):
            raise ValueError("balancer is no mapping")
        if not isinstance(self.boundaries, list | tuple):
            raise ValueError("boundaries are no list")
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        if not isinstance(self.unwritten, Unwritten):
            names = [one.name for one in fields(Unwritten)]
            object.__setattr__(self, "unwritten", Unwritten(**known_keys("key of unwritten", self.unwritten, names)))
