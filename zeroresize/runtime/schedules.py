"""What each stage of a pipeline computes in a step, in which order.

``S`` stages, ``M`` micro-batches. An order is the list of a stage's forwards and backwards; those of all stages make a
schedule that :mod:`zeroresize.runtime.communication` completes with messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Schedule = Literal["gpipe", "1f1b"]


class Operation(NamedTuple):
    """Describe a forward or a backward of one micro-batch."""

    is_forward: bool
    microbatch: int


#: What one stage computes.
Order = Sequence[Operation]


def order_of(schedule: Schedule, stage: int, num_stages: int, num_microbatches: int) -> list[Operation]:
    """Return what a stage does in a step.

    GPipe: all forwards, then all backwards. 1F1B: S − stage forwards, or all if there are fewer, then a backward and a
    forward in turn, then the backwards that are left; a stage so never keeps activations of more than S − stage
    micro-batches (PipeDream-Flush).

    Raises:
        ValueError: for another schedule, or no micro-batch.
    """
    if schedule not in ("gpipe", "1f1b"):
        raise ValueError(f"schedule={schedule!r} is not allowed: there are 'gpipe' and '1f1b'")
    if num_microbatches < 1:
        raise ValueError(f"{num_microbatches} micro-batches are too few: a step has at least one")
    ahead = num_microbatches if schedule == "gpipe" else min(num_stages - stage, num_microbatches)
    order = [Operation(True, microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        order.append(Operation(False, microbatch))
        if ahead + microbatch < num_microbatches:
            order.append(Operation(True, ahead + microbatch))
    return order


def orders_of(schedule: Schedule, num_stages: int, num_microbatches: int) -> list[list[Operation]]:
    """Return [S] the orders of all stages, see :func:`order_of`."""
    return [order_of(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
