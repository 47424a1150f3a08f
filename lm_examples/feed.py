"""What differs between the runs of ``lm_examples.train``: what is trained, what it is fed with, what is measured."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from vit_examples.harness.config_reader import plain
from vit_examples.harness.dry_run import Needs
from vit_examples.harness.run_folder import RunRecord


class Feed(ABC):
    """A model in training; unless said otherwise methods are collective.

    Args:
        config: of the run.
        data: as :meth:`load_data` returned it.
        state: of the checkpoint that the run goes on from, whose tensors are loaded afterwards; None for a new run.

    Attributes:
        model, optimizer: as ``zr.sharded_state_dict`` takes them.
        balancer: what goes into a checkpoint beside them; None for nothing.
        step: how many are done.
        record: on the first rank, once there is one; None on the others.
        files: of lines that the run writes besides ``metrics``.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    files: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, data: Any, process_group: ProcessGroup, state: dict[str, Any] | None) -> None:
        self.config, self.data, self._group = config, data, process_group
        self.balancer: Any = None
        self.step = 0 if state is None else int(state["step"])
        self.record: RunRecord | None = None
        self.loss = self.validation_loss = math.nan

    @staticmethod
    @abstractmethod
    def load_data(config: Any) -> tuple[Any, str]:
        """Read what a run is trained on, and tell what differs where that does; not collective.

        Raises:
            ValueError: naming the folder, if there is too little text in it.
        """

    @staticmethod
    def layout_of(config: Any) -> dict[str, Any]:
        """What a checkpoint's tensors depend on, as JSON has it: not how the model is spread; not collective."""
        return json.loads(json.dumps({"model": plain(config)["model"], "dtype": config.training.dtype}))

    @staticmethod
    @abstractmethod
    def needs_of(config: Any, num_ranks: int) -> tuple[dict[str, list[Needs]], list[str]]:
        """What ranks need, by heading, and lines that are to be said of it; not collective.

        Raises:
            ValueError: naming what does not fit.
        """

    @property
    @abstractmethod
    def title(self) -> str:
        """What the run is, in a few words; not collective."""

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that train; not collective."""
        return self._group

    @property
    def is_released(self) -> bool:
        """Whether this rank trains no more; not collective."""
        return False

    def begin(self) -> None:  # noqa: B027 - most feeds have nothing to say
        """Say on the first rank what is known before the first step; not collective."""

    @abstractmethod
    def train_step(self) -> None:
        """One more step of the optimizer."""

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """What the steps since the last call were, at least their mean ``loss`` and ``step_s``."""

    @abstractmethod
    def validate(self) -> float:
        """Mean loss of held-out text."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, as JSON has it."""
        return {"layout": self.layout_of(self.config), "step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most feeds know all by their step
        """Go on from :meth:`state`, once the tensors are loaded."""

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """What the run has come to; seconds are those of this process, without its first step."""

    def leave(self) -> None:  # noqa: B027 - most feeds hold nothing
        """Close what is held besides process groups."""


class StepMeans:
    """Means of steps' numbers by name; what a step does not tell counts as 0."""

    def __init__(self) -> None:
        self._since: list[dict[str, float]] = []
        self._settled: list[dict[str, float]] = []
        self._is_first = True

    def add(self, numbers: dict[str, float], *, is_last: bool) -> None:
        """One more step; where it is the first and the last one, it counts as settled."""
        self._since.append(numbers)
        if is_last or not self._is_first:
            self._settled.append(numbers)
        self._is_first = False

    def since(self) -> dict[str, float]:
        """Over the steps since this was last asked for."""
        steps, self._since = self._since, []
        return _means(steps)

    def settled(self) -> dict[str, float]:
        """Over all steps of this process but its first."""
        return _means(self._settled)


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for numbers in steps for name in numbers)
    return {name: sum(numbers.get(name, 0.0) for numbers in steps) / len(steps) for name in names}
