"""What a run's checkpoint holds besides tensors; see :mod:`vit_examples.harness.checkpoint_files`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lm_examples.checkpoint import SavedSteps
from lm_examples.microbatches.step_sums import StepSums


@dataclass(frozen=True)
class SavedState(SavedSteps):
    """What of a run is no tensor of its model.

    Attributes:
        unwritten: the steps since the last line of ``metrics.jsonl``, as
            :meth:`~lm_examples.microbatches.step_sums.StepSums.to_dict` has them.
        balancer: what it has learned; None where there was none.
    """

    unwritten: dict[str, Any] = field(default_factory=lambda: StepSums().to_dict())

    balancer: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        StepSums.from_dict(self.unwritten)
        if self.balancer is not None and not isinstance(self.balancer, dict):
            raise ValueError("balancer is no mapping")
