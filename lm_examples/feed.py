"""What differs between the runs of ``lm_examples.train``: what is trained, what it is fed with, what is measured."""

from __future__ import annotations

import json
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from lm_examples.data import Files
from vit_examples.harness.config_reader import plain
from vit_examples.harness.dry_run import Needs
from vit_examples.harness.run_folder import RunRecord


class Feed(ABC):
    """A model in training; unless said otherwise methods are collective.

    Args:
        config: of the run.
        batches: as :meth:`batches_of` returned them.
        state: of the checkpoint that the run goes on from, whose tensors are loaded afterwards; None for a new run.

    Attributes:
        model, optimizer: as ``zr.sharded_state_dict`` takes them.
        balancer: what goes into a checkpoint beside them; None for nothing.
        step: how many are done.
        record: on the first rank, once there is one; None on the others.
        section: of the configuration that has ``timeout_s``, seconds after which a message that does not come fails.
        files: of lines that the run writes besides ``metrics``.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    section: ClassVar[str]
    files: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, batches: Any, process_group: ProcessGroup, state: dict[str, Any] | None) -> None:
        self.config, self.batches, self._group = config, batches, process_group
        self.balancer: Any = None
        self.step = 0 if state is None else int(state["step"])
        self.record: RunRecord | None = None
        self.loss = self.validation_loss = math.nan
        self._steps: list[dict[str, float]] = []
        self._num_shown = 0

    @staticmethod
    @abstractmethod
    def batches_of(config: Any, files: Files) -> Any:
        """What a run is trained on; not collective. ValueError, naming the folder, if there is too little text."""

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

    def begin(self) -> None:  # noqa: B027 - most feeds have nothing to say
        """Say on the first rank what is known before the first step; not collective."""

    @abstractmethod
    def train_step(self) -> dict[str, float] | None:
        """One more step of the optimizer; returns its numbers, ``loss`` and ``step_s`` among them.

        None where this rank trains no more.
        """

    def count(self, numbers: dict[str, float]) -> None:
        """Keep the numbers of a step; what a step does not tell counts as 0; not collective."""
        self._steps.append(numbers)

    def numbers(self) -> dict[str, Any]:
        """What the steps since the last call were, at least their mean ``loss`` and ``step_s``."""
        since, self._num_shown = self._steps[self._num_shown :], len(self._steps)
        return self.shown(_means(since))

    def shown(self, means: dict[str, float]) -> dict[str, Any]:
        """What is to be said of several steps, whose means are given."""
        return means

    def validate(self) -> float:
        """Mean loss of held-out text."""
        return statistics.fmean(map(self.held_out_loss, range(self.config.training.validation_batches)))

    def settled(self) -> dict[str, float]:
        """Means of all steps of this process but its first; not collective."""
        return _means(self._steps[1:] or self._steps)

    @abstractmethod
    def held_out_loss(self, number: int) -> float:
        """Of a mini-batch of held-out text."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, as JSON has it."""
        return {"layout": self.layout_of(self.config), "step": self.step}

    def load_state(self, state: dict[str, Any]) -> None:  # noqa: B027 - most feeds know all by their step
        """Go on from :meth:`state`, once the tensors are loaded."""

    def summary(self) -> dict[str, Any]:
        """What the run has come to; seconds are those of this process, without its first step."""
        return self.shown(self.settled())

    def leave(self) -> None:  # noqa: B027 - most feeds hold nothing
        """Close what is held besides process groups."""

    def adamw(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
        """The optimizer that the configuration asks for; not collective.

        Its parameters are a group, which may be empty: a strategy of the optimizer may leave ranks out.
        """
        training = self.config.training
        return torch.optim.AdamW([{"params": list(parameters)}], lr=training.lr, weight_decay=training.weight_decay)


def _means(steps: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for numbers in steps for name in numbers)
    return {name: sum(numbers.get(name, 0.0) for numbers in steps) / len(steps) for name in names}
