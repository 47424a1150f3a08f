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
    num_stages = len(orders)
    seconds = {True: np.asarray(forward_s).tolist(), False: np.asarray(backward_s).tolist()}
    free_s, done = [0.0] * num_stages, [0] * num_stages
    end_of: dict[tuple[int, bool, int], float] = {}
    operations: list[tuple[int, Operation]] = []
    ready = list(range(num_stages))
    while ready:
        stage = ready.pop()
        order = orders[stage]
        while done[stage] < len(order):
            operation = order[done[stage]]
            is_forward, microbatch = operation
            begin_s = free_s[stage]
            needed = _needed_by(stage, operation, num_stages)
            if needed is not None:
                if needed not in end_of:
                    break
                begin_s = max(begin_s, end_of[needed])
            free_s[stage] = end_s = begin_s + seconds[is_forward][microbatch][stage]
            end_of[stage, is_forward, microbatch] = end_s
            operations.append((stage, operation))
            done[stage] += 1
            receiver = stage + 1 if is_forward else stage - 1
            if 0 <= receiver < num_stages:
                ready.append(receiver)
    if any(number < len(order) for number, order in zip(done, orders, strict=True)):
        waiting = {stage: order[done[stage]] for stage, order in enumerate(orders) if done[stage] < len(order)}
        raise ValueError(f"stages wait for each other in these orders: {waiting}")
    ends_s = [end_of[stage, is_forward, microbatch] for stage, (is_forward, microbatch) in operations]
    by_end = sorted(range(len(operations)), key=ends_s.__getitem__)  # stable: what is needed comes first
    return Timeline(tuple(operations[place] for place in by_end), tuple(ends_s[place] for place in by_end))


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


def _needed_by(stage: int, operation: Operation, num_stages: int) -> tuple[int, bool, int] | None:
    """The operation, with its stage, whose result it needs; None for the first stage's forwards."""
    is_forward, microbatch = operation
    if is_forward:
        return (stage - 1, True, microbatch) if stage else None
    return (stage + 1, False, microbatch) if stage + 1 < num_stages else (stage, True, microbatch)
