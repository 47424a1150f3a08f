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


def chimera_bubble_ratio(num_stages: int, forward_s: float, backward_s: float, communication_s: float) -> float:
    """Return the bubble ratio of Chimera with two model replicas on equal stages (DynPipe's supplement, Eq. (1)).

    For as many micro-batches as stages P, although the supplement does not say so: without communication a device
    spends P T_F + (2P − 2) T_B on a step and idles (P − 2) T_B of it, which for T_F = T_B is the (P − 2) / (3P − 2) of
    Chimera's paper. The text calls T_B in the numerator "forward pass"; it is the backward's. The coefficients of T_C
    count communication in the numerator that the denominator's critical path, 3P − 2 messages long, does not explain:
    with slow communication the ratio is questionable.

    Args:
        num_stages: P, even.
        forward_s, backward_s: T_F and T_B, seconds of one stage for one micro-batch.
        communication_s: T_C, seconds of a message that computing does not hide.

    Raises:
        ValueError: if P is odd or below 2, or a time is negative or not finite, or all are 0.
    """
    if num_stages < 2 or num_stages % 2:
        raise ValueError(f"Chimera has an even number of stages, not {num_stages}")
    times = (forward_s, backward_s, communication_s)
    if not all(math.isfinite(seconds) and seconds >= 0.0 for seconds in times) or not any(times):
        raise ValueError(f"{times} are not allowed: times are finite and not negative, and not all 0")
    gaps = num_stages**2 / 2 - num_stages
    idle = (3 * gaps + 6 * num_stages - 2 * gaps / num_stages - 8) * communication_s + 2 * gaps * backward_s
    span = (3 * num_stages**2 - 2 * num_stages) * communication_s
    span += (2 * num_stages**2 - 2 * num_stages) * backward_s + num_stages**2 * forward_s
    return idle / span
