"""How long a step of a pipeline takes, and how much of it devices wait.

``S`` stages, ``M`` micro-batches. Times are seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.policy.pipeline.simulated_steps import simulated_steps
from zeroresize.runtime.schedules import Schedule


@dataclass(frozen=True)
class PipelineStep:
    """Describe a step of a pipeline.

    Attributes:
        step_s: seconds from the first forward to the last backward.
        idle_s: [S] of these the seconds in which a stage computes nothing.
    """

    step_s: float
    idle_s: tuple[float, ...]

    @property
    def bubble_ratio(self) -> float:
        """Return the share of the devices' time that is idle, 0 to 1."""
        return math.fsum(self.idle_s) / (len(self.idle_s) * self.step_s) if self.step_s else 0.0


def imbalance(loads: Sequence[float]) -> float:
    """Return (L_max − L_min) / mean L (DynMo, section 2); 0 where there is no load at all."""
    mean = math.fsum(loads) / len(loads)
    return (max(loads) - min(loads)) / mean if mean else 0.0


def simulated_step(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    *,
    schedule: Schedule = "1f1b",
    communication_s: float | Sequence[float] = 0.0,
) -> PipelineStep:
    """Simulate a step as :func:`~zeroresize.policy.pipeline.simulated_steps.simulated_steps` does.

    Args:
        forward_s, backward_s: [S] seconds of one micro-batch on every stage.
        communication_s: seconds of a message between neighbours, in each direction: one number or [S − 1].

    Raises:
        ValueError: as :func:`~zeroresize.policy.pipeline.simulated_steps.simulated_steps`.
    """
    steps_s = simulated_steps(
        [forward_s], [backward_s], num_microbatches, schedule=schedule, communication_s=communication_s
    )
    step_s = float(steps_s[0])
    idle_s = (
        max(step_s - num_microbatches * (forward + backward), 0.0)
        for forward, backward in zip(forward_s, backward_s, strict=True)
    )
    return PipelineStep(step_s, tuple(idle_s))
