"""When the stages of a pipeline compute what, if messages took no time.

``S`` stages, ``M`` micro-batches. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeroresize.runtime.schedules import Operation, Order

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """Describe a step.

    Attributes:
        operations: all forwards and backwards with their stages, as they end; of those that end at once the one that
            others wait for comes first.
        ends_s: of each of them.
    """

    operations: tuple[tuple[int, Operation], ...]
    ends_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Return the seconds from the first forward to the last backward."""
        return max(self.ends_s, default=0.0)


def timeline(orders: Sequence[Order], forward_s: Floats, backward_s: Floats) -> Timeline:
    """Return when the stages compute in these orders: each as soon as it is free and has what it needs.

    Args:
        orders: [S].
        forward_s, backward_s: [M, S] of each micro-batch on each stage.

    Raises:
        ValueError: for orders by which stages wait for each other, naming what each of them waits for.
    """
    operations, ends_s = _ends_of(orders, forward_s, backward_s)
    by_end = sorted(range(len(operations)), key=ends_s.__getitem__)  # stable: what is needed comes first
    return Timeline(tuple(operations[place] for place in by_end), tuple(ends_s[place] for place in by_end))


def step_seconds(orders: Sequence[Order], forward_s: Floats, backward_s: Floats) -> float:
    """Return the seconds from the first forward to the last backward; as :func:`timeline`, in less time."""
    return max(_ends_of(orders, forward_s, backward_s)[1], default=0.0)


def _ends_of(
    orders: Sequence[Order], forward_s: Floats, backward_s: Floats
) -> tuple[list[tuple[int, Operation]], list[float]]:
    """All operations with their stages, each behind those that it needs, and when they end."""
    num_stages = len(orders)
    last = num_stages - 1
    num_microbatches = len(forward_s)
    seconds = {True: np.asarray(forward_s).tolist(), False: np.asarray(backward_s).tolist()}
    free_s, done = [0.0] * num_stages, [0] * num_stages
    end_of: dict[bool, list[list[float | None]]] = {
        which: [[None] * num_microbatches for _ in range(num_stages)] for which in (True, False)
    }
    operations: list[tuple[int, Operation]] = []
    ends_s: list[float] = []
    ready = list(range(num_stages))
    while ready:
        stage = ready.pop()
        order, begin_s, number = orders[stage], free_s[stage], done[stage]
        while number < len(order):
            operation = order[number]
            is_forward, microbatch = operation
            if not is_forward or stage:
                if is_forward:
                    needed_s = end_of[True][stage - 1][microbatch]
                else:
                    needed_s = end_of[stage == last][min(stage + 1, last)][microbatch]
                if needed_s is None:
                    break
                begin_s = max(begin_s, needed_s)
            begin_s += seconds[is_forward][microbatch][stage]
            end_of[is_forward][stage][microbatch] = begin_s
            operations.append((stage, operation))
            ends_s.append(begin_s)
            number += 1
            receiver = stage + 1 if is_forward else stage - 1
            if 0 <= receiver < num_stages:
                ready.append(receiver)
        free_s[stage], done[stage] = begin_s, number
    if any(number < len(order) for number, order in zip(done, orders, strict=True)):
        waiting = {stage: order[done[stage]] for stage, order in enumerate(orders) if done[stage] < len(order)}
        raise ValueError(f"stages wait for each other in these orders: {waiting}")
    return operations, ends_s


def peak_bytes(orders: Sequence[Order], activation_bytes: Floats, workspace_bytes: Floats | None = None) -> Floats:
    """Return [S] the most bytes that each stage holds at once.

    Args:
        orders: [S].
        activation_bytes: [M, S] that each micro-batch keeps on each stage, from its forward to its backward.
        workspace_bytes: [M, S] that it needs beside what is kept while it runs, forward and backward; None for none.
    """
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
