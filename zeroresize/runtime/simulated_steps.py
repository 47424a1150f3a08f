"""When the stages of a pipeline compute what, and how long steps take: one by one, or many divisions of layers at once.

``C`` cases, such as divisions of layers or steps of a training, ``L`` layers, ``S`` stages, ``M`` micro-batches. Times
are seconds. :func:`timeline` goes through operations one by one, each micro-batch of its own length. What it says of
operations that all take equally long tells which of them wait for none of each other: these :func:`simulated_steps`
simulates together, for all cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from zeroresize.runtime.schedules import Floats, Operation, Order, Schedule, orders_of

Indices = NDArray[np.int64]

#: Cases that are simulated together: their times then fit into a core's cache.
_TOGETHER = 256


@dataclass(frozen=True, eq=False)
class Timeline:
    """Describe a step: forwards and backwards with their stages, and when they end, as they end.

    Of those that end at once the one that others wait for comes first.
    """

    operations: tuple[tuple[int, Operation], ...]
    ends_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Seconds from the first forward to the last backward."""
        return max(self.ends_s, default=0.0)


def timeline(orders: Sequence[Order], forward_s: Floats, backward_s: Floats) -> Timeline:
    """Return when the stages compute in these orders: each as soon as it is free and has what it needs.

    Forwards and backwards take seconds [M, S], messages none.

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
    num_stages, num_microbatches = len(orders), len(forward_s)
    last = num_stages - 1
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
    waiting = {stage: order[done[stage]] for stage, order in enumerate(orders) if done[stage] < len(order)}
    if waiting:
        raise ValueError(f"stages wait for each other in these orders: {waiting}")
    return operations, ends_s


@dataclass(frozen=True)
class PipelineStep:
    """Describe a step of so many seconds, and [S] of these in which a stage computes nothing."""

    step_s: float
    idle_s: tuple[float, ...]

    @property
    def bubble_ratio(self) -> float:
        """The share of the devices' time that is idle, 0 to 1."""
        return math.fsum(self.idle_s) / (len(self.idle_s) * self.step_s) if self.step_s else 0.0


def simulated_step(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    *,
    schedule: Schedule = "1f1b",
    communication_s: float | Sequence[float] = 0.0,
) -> PipelineStep:
    """Simulate one step as :func:`simulated_steps` does, for a single case."""
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
    """Return [C, S] what the layers of each stage take together, of boundaries [C, S + 1].

    The seconds are [C, L], or [L] where they are the same in all cases.
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
    turns: Indices


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
    levels: list[list[tuple[int, ...]]] = [[] for _ in range(round(line.step_s))]
    num_done = [0] * num_stages
    for (stage, (is_forward, microbatch)), end_s in zip(line.operations, line.ends_s, strict=True):
        num_done[stage] += 1
        following = orders[stage][num_done[stage] : num_done[stage] + 1]
        is_turn = any(operation.is_forward != is_forward for operation in following)
        # Of [2 S] durations, and [2 S, M] places, those of forwards come first.
        kind, receiver = (stage, stage + 1) if is_forward else (num_stages + stage, stage - 1)
        place, output, wire = kind * num_microbatches + microbatch, 2 * num_stages * num_microbatches, num_stages - 1
        if 0 <= receiver < num_stages:
            output, wire = place + (receiver - stage) * num_microbatches, min(stage, receiver)
        levels[round(end_s) - 1].append((stage, kind, place, output, wire, is_turn and wire < num_stages - 1))
    return tuple(_Level(*np.array(level, dtype=np.int64).T) for level in levels)
