"""What each stage of a pipeline does in a step, in which order: the schedules of ``torch.distributed.pipelining``.

``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b"]


class Operation(NamedTuple):
    """Describe a forward or a backward of one micro-batch."""

    is_forward: bool
    microbatch: int


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
