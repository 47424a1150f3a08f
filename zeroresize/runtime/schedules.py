"""What each stage of a pipeline computes in a step, in which order, and how much it keeps meanwhile.

``S`` stages, ``M`` micro-batches. An order is the list of a stage's forwards and backwards; those of all stages make a
schedule that :func:`~zeroresize.runtime.instructions.planned_instructions` completes with messages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
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


def adaptive_orders(
    activation_bytes: Floats,
    limits: Sequence[float] | Floats,
    num_ahead: int | None = None,
    workspace_bytes: Floats | None = None,
) -> list[list[Operation]]:
    """Return [S] orders that leave stages something to do when a micro-batch is late, as far as memory allows.

    That is memory-aware cyclic scheduling (DynaPipe, section 5, Algorithm 1): in each cycle a stage does one backward
    and one forward of those that were ready when the cycle began, in the order in which they became so. A forward waits
    while its activations do not fit beside those that are kept. Micro-batches enter by their numbers.

    Args:
        activation_bytes: [M, S] that each micro-batch keeps on each stage from its forward to its backward.
        limits: [S] bytes at most; ``math.inf`` for no limit.
        num_ahead: micro-batches that are under way at once, at most; None for as many as fit.
        workspace_bytes: [M, S] that each needs beside what is kept while it runs, forward and backward; None for none.

    Raises:
        ValueError: for a micro-batch that alone does not fit, naming it, its stage and the limit.
    """
    activation_bytes = np.asarray(activation_bytes, dtype=np.float64)
    num_microbatches, num_stages = activation_bytes.shape
    limits_S = np.asarray(limits, dtype=np.float64)
    workspace = np.zeros_like(activation_bytes) if workspace_bytes is None else np.asarray(workspace_bytes)
    too_large = np.argwhere(activation_bytes + workspace > limits_S)
    if len(too_large):
        microbatch, stage = too_large[0].tolist()
        raise ValueError(
            f"micro-batch {microbatch} keeps {activation_bytes[microbatch, stage]:.0f} bytes of activations on stage "
            f"{stage} and needs {workspace[microbatch, stage]:.0f} more while it runs: at most "
            f"{limits_S[stage]:.0f} are allowed"
        )
    needed, besides, most = activation_bytes.tolist(), workspace.tolist(), limits_S.tolist()
    orders: list[list[Operation]] = [[] for _ in range(num_stages)]
    ready: dict[bool, list[deque[int]]] = {
        is_forward: [deque() for _ in range(num_stages)] for is_forward in (True, False)
    }
    ready[True][0].extend(range(num_microbatches))
    kept = [0.0] * num_stages
    kept_besides: list[list[float]] = [[] for _ in range(num_stages)]  # of those that still have to run their backward
    under_way, num_operations = 0, 2 * num_stages * num_microbatches
    most_under_way = math.inf if num_ahead is None else num_ahead
    while sum(map(len, orders)) < num_operations:
        become_ready: list[tuple[bool, int, int]] = []
        for stage in range(num_stages):
            if ready[False][stage]:
                microbatch = ready[False][stage].popleft()
                kept[stage] -= needed[microbatch][stage]
                kept_besides[stage].remove(besides[microbatch][stage])
                orders[stage].append(Operation(False, microbatch))
                if stage:
                    become_ready.append((False, stage - 1, microbatch))
                else:
                    under_way -= 1
            if not ready[True][stage] or (not stage and under_way >= most_under_way):
                continue
            microbatch = ready[True][stage][0]
            largest = max(besides[microbatch][stage], max(kept_besides[stage], default=0.0))
            if kept[stage] + needed[microbatch][stage] + largest > most[stage] * (1.0 + 1e-12):
                continue
            ready[True][stage].popleft()
            kept_besides[stage].append(besides[microbatch][stage])
            kept[stage] += needed[microbatch][stage]
            orders[stage].append(Operation(True, microbatch))
            under_way += not stage
            is_last = stage + 1 == num_stages
            become_ready.append((not is_last, stage if is_last else stage + 1, microbatch))
        for is_forward, stage, microbatch in become_ready:
            ready[is_forward][stage].append(microbatch)
    return orders


def peak_bytes(orders: Sequence[Order], activation_bytes: Floats, workspace_bytes: Floats | None = None) -> Floats:
    """Return [S] the most bytes that each stage holds at once; bytes [M, S] as of :func:`adaptive_orders`."""
    workspace = np.zeros_like(activation_bytes) if workspace_bytes is None else workspace_bytes
    peaks = np.zeros(len(orders))
    for stage, order in enumerate(orders):
        is_forward = np.array([each.is_forward for each in order], dtype=bool)
        microbatches = np.array([each.microbatch for each in order], dtype=np.int64)
        of_each = activation_bytes[microbatches, stage]
        kept = np.cumsum(np.where(is_forward, of_each, -of_each))
        held = kept + np.where(is_forward, 0.0, of_each) + workspace[microbatches, stage]
        peaks[stage] = held.max(initial=0.0)
    return peaks
