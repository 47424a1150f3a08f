"""How long steps of a pipeline take, operation by operation, of many divisions of its layers at once.

``C`` cases, such as divisions of layers or steps of a training, ``L`` layers, ``S`` stages, ``M`` micro-batches. Times
are seconds.

Operations that wait for none of each other make a level. A step has about 2 (M + S) levels, so thousands of operations
take hundreds of array operations, each over all cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.pipeline.pipeline_load import Floats, Indices
from zeroresize.runtime.schedules import Operation, Schedule, order_of

#: Cases that are simulated together: their times then fit into a core's cache.
_TOGETHER = 256


def simulated_steps(
    forward_s: Sequence[Sequence[float]] | Floats,
    backward_s: Sequence[Sequence[float]] | Floats,
    num_microbatches: int,
    *,
    schedule: Schedule = "1f1b",
    communication_s: float | Sequence[float] | Floats = 0.0,
) -> Floats:
    """Return [C] seconds from the first forward of a step to its last backward.

    An operation starts when the stage has done what comes before it in its order and the activation or gradient that
    it needs has arrived. Each direction of a boundary carries one message after the other. As in torch a stage waits
    until its messages are sent when it turns from forwards to backwards or back. A send does not wait for its receiver,
    as with buffers.

    Args:
        forward_s, backward_s: [C, S] seconds of one micro-batch on every stage.
        communication_s: seconds of a message between neighbours, in each direction: one number, [S − 1] or [C, S − 1].

    Raises:
        ValueError: for numbers that are negative or not finite, or not as many as stages, and as
            :func:`~zeroresize.runtime.schedules.order_of`.
    """
    forward, backward = (np.asarray(seconds, dtype=np.float64) for seconds in (forward_s, backward_s))
    if forward.ndim != 2 or not forward.shape[1] or backward.shape != forward.shape:
        raise ValueError(
            f"forward times {forward.shape} and backward times {backward.shape} do not belong to one pipeline: needed "
            "are those of the same stages, [cases, stages] twice"
        )
    num_cases, num_stages = forward.shape
    wires = np.asarray(communication_s, dtype=np.float64)
    if wires.ndim and wires.shape[-1] != num_stages - 1:
        raise ValueError(
            f"{wires.shape[-1]} communication times do not belong to {num_stages} stages: one is between two"
        )
    wires = np.broadcast_to(wires, (num_cases, num_stages - 1))
    if not all((np.isfinite(seconds) & (seconds >= 0.0)).all() for seconds in (forward, backward, wires)):
        raise ValueError("times of stages and of communication are finite and not negative")
    levels = _levels_of(schedule, num_stages, num_microbatches)
    steps_s = np.empty(num_cases)
    for begin in range(0, num_cases, _TOGETHER):
        part = slice(begin, begin + _TOGETHER)
        durations = np.concatenate([forward[part].T, backward[part].T])
        # The last one is that of operations whose results nobody waits for.
        of_wires = np.concatenate([wires[part].T, np.zeros((1, durations.shape[1]))]) if wires.any() else None
        steps_s[part] = _simulate(levels, durations, of_wires, num_stages, num_microbatches)
    return steps_s


def stage_sums(seconds: Floats, boundaries: Indices) -> Floats:
    """Return [C, S] what the layers of each stage take together.

    Args:
        seconds: [C, L] of each layer, or [L] where they are the same in all cases.
        boundaries: [C, S + 1].
    """
    sums = np.concatenate([np.zeros((*seconds.shape[:-1], 1)), np.cumsum(seconds, axis=-1)], axis=-1)
    return np.diff(sums[boundaries] if sums.ndim == 1 else np.take_along_axis(sums, boundaries, axis=1))


@dataclass(frozen=True, eq=False)
class _Level:
    """Operations, ``K`` of them, that wait for earlier levels only; all are [K].

    Attributes:
        stages: which do them, each once.
        kinds: which of the durations [2 S] they take.
        inputs, outputs: the places of what they wait for and of what they make.
        wires: of their messages; S − 1 for none.
        turns: whether the stage turns from forwards to backwards behind it, or back.
    """

    stages: Indices
    kinds: Indices
    inputs: Indices
    outputs: Indices
    wires: Indices
    turns: NDArray[np.bool_]


def _simulate(
    levels: Sequence[_Level], durations: Floats, wires: Floats | None, num_stages: int, num_microbatches: int
) -> Floats:
    """[C] seconds, of durations [2 S, C] and wires [S, C]; None where messages take no time."""
    num_cases = durations.shape[1]
    free_s = np.zeros((num_stages, num_cases))
    sent_s = np.zeros((2 * num_stages, num_cases))
    arrived_s = np.zeros((2 * num_stages * num_microbatches + 1, num_cases))
    for level in levels:
        end_s = np.maximum(free_s[level.stages], arrived_s[level.inputs])
        end_s += durations[level.kinds]
        if wires is None:
            arrived_s[level.outputs] = free_s[level.stages] = end_s
            continue
        sent = np.maximum(end_s, sent_s[level.kinds])
        sent += wires[level.wires]
        sent_s[level.kinds] = arrived_s[level.outputs] = sent
        free_s[level.stages] = np.where(level.turns[:, None], sent, end_s)
    return free_s.max(axis=0)


@lru_cache(maxsize=64)
def _levels_of(schedule: Schedule, num_stages: int, num_microbatches: int) -> tuple[_Level, ...]:
    orders = [order_of(schedule, stage, num_stages, num_microbatches) for stage in range(num_stages)]
    nobody = 2 * num_stages * num_microbatches
    rows: list[list[tuple[int, ...]]] = []
    level_of: dict[tuple[int, Operation], int] = {}
    next_level, done = [0] * num_stages, [0] * num_stages
    ready = list(range(num_stages))
    while ready:
        stage = ready.pop()
        order = orders[stage]
        while done[stage] < len(order):
            operation = order[done[stage]]
            sender, receiver = (stage - 1, stage + 1) if operation.is_forward else (stage + 1, stage - 1)
            level = next_level[stage]
            if 0 <= sender < num_stages:
                if (sender, operation) not in level_of:
                    break
                level = max(level, level_of[sender, operation] + 1)
            done[stage] += 1
            level_of[stage, operation], next_level[stage] = level, level + 1
            has_receiver = 0 <= receiver < num_stages
            turns = done[stage] < len(order) and order[done[stage]].is_forward != operation.is_forward
            rows += [[] for _ in range(level + 1 - len(rows))]
            rows[level].append(
                (
                    stage,
                    stage if operation.is_forward else num_stages + stage,
                    _place(stage, operation, num_stages, num_microbatches),
                    _place(receiver, operation, num_stages, num_microbatches) if has_receiver else nobody,
                    min(stage, receiver) if has_receiver else num_stages - 1,
                    int(turns and has_receiver),
                )
            )
            if has_receiver:
                ready.append(receiver)
    return tuple(_level_of(np.array(row, dtype=np.int64)) for row in rows)


def _level_of(operations: Indices) -> _Level:
    """Of operations, [K, 6]."""
    stages, kinds, inputs, outputs, wires, turns = operations.T
    return _Level(stages, kinds, inputs, outputs, wires, turns.astype(np.bool_))


def _place(stage: int, operation: Operation, num_stages: int, num_microbatches: int) -> int:
    """Of what the operation needs on the stage."""
    return (stage if operation.is_forward else num_stages + stage) * num_microbatches + operation.microbatch
