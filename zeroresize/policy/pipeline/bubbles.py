"""How long a step of a pipeline takes, and how much of it devices wait.

``S`` stages, ``M`` micro-batches. Times are seconds. The schedules are those of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b"]


class Operation(NamedTuple):
    """Describe a forward or a backward of one micro-batch."""

    is_forward: bool
    microbatch: int


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


def order_of(schedule: Schedule, stage: int, num_stages: int, num_microbatches: int) -> list[Operation]:
    """Return what a stage does in a step, in the order of ``ScheduleGPipe`` or ``Schedule1F1B``.

    GPipe: all forwards, then all backwards. 1F1B: S − stage forwards, then a backward and a forward in turn, then the
    backwards that are left; a stage so never keeps activations of more than S − stage micro-batches.

    Raises:
        ValueError: for another schedule, no micro-batch, or 1F1B with fewer micro-batches than stages, as in torch.
    """
    if schedule not in ("gpipe", "1f1b"):
        raise ValueError(f"schedule={schedule!r} is not allowed: there are 'gpipe' and '1f1b'")
    if num_microbatches < (num_stages if schedule == "1f1b" else 1):
        raise ValueError(
            f"{num_microbatches} micro-batches are too few for {num_stages} stages and schedule {schedule!r}"
        )
    ahead = num_microbatches if schedule == "gpipe" else num_stages - stage
    order = [Operation(True, microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        order.append(Operation(False, microbatch))
        if ahead + microbatch < num_microbatches:
            order.append(Operation(True, ahead + microbatch))
    return order


def simulated_step(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    *,
    schedule: Schedule = "1f1b",
    communication_s: float | Sequence[float] = 0.0,
) -> PipelineStep:
    """Simulate a step, operation by operation.

    An operation starts when the stage has done what comes before it in its order and the activation or gradient that
    it needs has arrived. Each direction of a boundary carries one message after the other. As in torch a stage waits
    until its messages are sent when it turns from forwards to backwards or back. A send does not wait for its receiver,
    as with buffers.

    Args:
        forward_s, backward_s: [S] seconds of one micro-batch on every stage.
        communication_s: seconds of a message between neighbours, in each direction: one number or [S − 1].

    Raises:
        ValueError: for numbers that are negative or not finite, or not as many as stages, and as :func:`order_of`.
    """
    num_stages = len(forward_s)
    wires = [communication_s] * (num_stages - 1) if isinstance(communication_s, int | float) else list(communication_s)
    if not num_stages or len(backward_s) != num_stages or len(wires) != num_stages - 1:
        raise ValueError(
            f"{num_stages} forward times, {len(backward_s)} backward times and {len(wires)} communication times do not "
            "belong to one pipeline"
        )
    if not all(math.isfinite(seconds) and seconds >= 0.0 for seconds in (*forward_s, *backward_s, *wires)):
        raise ValueError("times of stages and of communication are finite and not negative")
    orders = [order_of(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    # Of every stage: when each input arrives, None while that is not known; what begins the pipeline is there.
    activations: list[list[float | None]] = [[None if stage else 0.0] * num_microbatches for stage in range(num_stages)]
    gradients: list[list[float | None]] = [
        [None if stage < num_stages - 1 else 0.0] * num_microbatches for stage in range(num_stages)
    ]
    sent_s = {(stage, is_forward): 0.0 for stage in range(num_stages) for is_forward in (True, False)}
    free_s, done, step_s = [0.0] * num_stages, [0] * num_stages, 0.0
    ready = deque(range(num_stages))
    while ready:
        stage = ready.popleft()
        order = orders[stage]
        while done[stage] < len(order):
            operation = order[done[stage]]
            inputs, durations = (activations, forward_s) if operation.is_forward else (gradients, backward_s)
            arrived_s = inputs[stage][operation.microbatch]
            if arrived_s is None:
                break
            done[stage] += 1
            end_s = max(free_s[stage], arrived_s) + durations[stage]
            step_s, free_s[stage] = max(step_s, end_s), end_s
            receiver = stage + 1 if operation.is_forward else stage - 1
            if not 0 <= receiver < num_stages:
                continue
            begin_s = max(end_s, sent_s[stage, operation.is_forward])
            sent_s[stage, operation.is_forward] = begin_s + wires[min(stage, receiver)]
            inputs[receiver][operation.microbatch] = sent_s[stage, operation.is_forward]
            ready.append(receiver)
            turns = done[stage] < len(order) and order[done[stage]].is_forward != operation.is_forward
            if turns:
                free_s[stage] = sent_s[stage, operation.is_forward]
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
