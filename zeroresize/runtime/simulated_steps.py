"""How long steps of a pipeline take, with their messages, for many divisions of its layers at once.

``C`` cases, such as divisions of layers or steps of a training, ``L`` layers, ``S`` stages, ``M`` micro-batches. Times
are seconds. What waits for what is told by :func:`~zeroresize.runtime.timeline.timeline`: operations that would end
together if each took equally long wait for none of each other, and are simulated together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zeroresize.runtime.schedules import Operation, Order, Schedule, orders_of
from zeroresize.runtime.timeline import Floats, timeline

Indices = NDArray[np.int64]

#: Cases that are simulated together: their times then fit into a core's cache.
_TOGETHER = 256


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


def simulated_step(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    *,
    schedule: Schedule = "1f1b",
    communication_s: float | Sequence[float] = 0.0,
) -> PipelineStep:
    """Simulate one step as :func:`simulated_steps` does; arguments and errors are the same, for a single case."""
    steps_s = simulated_steps(
        [forward_s], [backward_s], num_microbatches, schedule=schedule, communication_s=communication_s
    )
    step_s = float(steps_s[0])
    busy_s = (num_microbatches * (forward + backward) for forward, backward in zip(forward_s, backward_s, strict=True))
    return PipelineStep(step_s, tuple(max(step_s - seconds, 0.0) for seconds in busy_s))


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
    it needs has arrived. Each direction of a boundary carries one message after the other. A stage waits until its
    messages are sent when it turns from forwards to backwards or back. A send does not wait for its receiver, as with
    buffers.

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
    orders = orders_of(schedule, num_stages, num_microbatches)
    equal_s = np.ones((num_microbatches, num_stages))
    line = timeline(orders, equal_s, equal_s)
    rows: list[list[tuple[int, ...]]] = [[] for _ in range(round(line.step_s))]
    num_done = [0] * num_stages
    for (stage, operation), end_s in zip(line.operations, line.ends_s, strict=True):
        num_done[stage] += 1
        is_turn = _is_turn(orders[stage], num_done[stage])
        rows[round(end_s) - 1].append(_row(stage, operation, num_stages, num_microbatches, is_turn=is_turn))
    return tuple(_level_of(np.array(row, dtype=np.int64)) for row in rows)


def _is_turn(order: Order, num_done: int) -> bool:
    """Whether the stage turns behind so many operations."""
    return num_done < len(order) and order[num_done].is_forward != order[num_done - 1].is_forward


def _row(
    stage: int, operation: Operation, num_stages: int, num_microbatches: int, *, is_turn: bool
) -> tuple[int, int, int, int, int, int]:
    """What :class:`_Level` has of one operation."""

    def place(at: int) -> int:
        return kind(at) * num_microbatches + operation.microbatch

    def kind(at: int) -> int:
        return at if operation.is_forward else num_stages + at

    receiver = stage + 1 if operation.is_forward else stage - 1
    if not 0 <= receiver < num_stages:
        return stage, kind(stage), place(stage), 2 * num_stages * num_microbatches, num_stages - 1, 0
    return stage, kind(stage), place(stage), place(receiver), min(stage, receiver), int(is_turn)


def _level_of(operations: Indices) -> _Level:
    """Of operations, [K, 6]."""
    stages, kinds, inputs, outputs, wires, turns = operations.T
    return _Level(stages, kinds, inputs, outputs, wires, turns.astype(np.bool_))
