"""What a run's checkpoint holds besides tensors; see :mod:`vit_examples.harness.checkpoint_files`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import zeroresize as zr
from vit_examples.config import RunConfig
from vit_examples.harness import checkpoint_files
from vit_examples.harness.checkpoint_files import load_checkpoint
from vit_examples.harness.checkpoint_folders import CheckpointFolders, way_out
from vit_examples.host import Host
from zeroresize.utils.value_checks import at_least, is_number, known_keys

EPOCHS = CheckpointFolders("epoch", 4)


@dataclass(frozen=True)
class Progress:
    """How far a run is, and what its summary has to tell of the time before a checkpoint.

    Attributes:
        epochs: completed.
        steps: optimizer steps over all of them.
        step_seconds: of every iteration, one sequence a process that trained.
        timed_settings: what they were timed with (:func:`vit_examples.run.timed_settings`).
        commits: of the code that trained, in order.

    Raises:
        ValueError: for a value of another kind.
    """

    epochs: int = 0
    steps: int = 0
    step_seconds: Sequence[Sequence[float]] = ()
    timed_settings: Mapping[str, Any] = field(default_factory=dict)
    commits: Sequence[str] = ()

    def __post_init__(self) -> None:
        at_least("epochs", self.epochs, 0)
        at_least("steps", self.steps, 0)
        is_of_these_kinds = (
            _is_list(self.step_seconds, lambda seconds: _is_list(seconds, is_number))
            and isinstance(self.timed_settings, Mapping)
            and _is_list(self.commits, lambda commit: isinstance(commit, str))
        )
        if not is_of_these_kinds:
            raise ValueError("step_seconds must be lists of numbers, timed_settings a mapping, commits a list of texts")


@dataclass(frozen=True)
class SavedState(checkpoint_files.SavedState):
    """What of a run is no tensor of its model.

    Attributes:
        progress: how far it is.
        loss_scale: numbers of a dynamic loss scale, by name; empty where there is none.
    """

    folders: ClassVar[CheckpointFolders] = EPOCHS
    progress: Progress
    loss_scale: Mapping[str, float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.progress, Progress):
            names = [field.name for field in fields(Progress)]
            values = known_keys("key of progress", self.progress, names)
            if missing := [name for name in names if name not in values]:
                raise ValueError(f"{missing} of progress are missing")
            object.__setattr__(self, "progress", Progress(**values))
        if not isinstance(self.loss_scale, Mapping) or not all(map(is_number, self.loss_scale.values())):
            raise ValueError("loss_scale must be numbers by name")

    @property
    def number(self) -> int:
        return self.progress.epochs

    def go_on(self, checkpoint: Path, host: Host, balancer: zr.Balancer) -> None:
        """Load the rest of ``checkpoint``, of which this is a part; collective.

        Raises:
            ValueError: on every rank, naming what is missing, damaged, or of another kind; nothing has changed then.
        """
        if self.loss_scale.keys() != host.loss_scale().keys():
            raise ValueError(
                f"{checkpoint}: its loss scale has {sorted(self.loss_scale)}, {sorted(host.loss_scale())} are needed\n"
                f"{way_out(checkpoint)}"
            )
        load_checkpoint(checkpoint, host.model, host.optimizer, balancer=balancer)
        host.set_loss_scale(self.loss_scale)


def layout_of(config: RunConfig, num_ranks: int) -> dict[str, Any]:
    """Return what a checkpoint's tensors and balancers depend on."""
    return {
        "host": config.host,
        "tp_size": num_ranks,
        "precision": config.training.precision,
        "model": dataclasses.asdict(config.model),
    }


def _is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(holds, value))
