"""How long a pipeline's step takes, from the very instructions that its stages carry out.

``S`` stages, ``M`` micro-batches. Times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.runtime.check import DeadlockError
from zeroresize.runtime.instructions import Instruction, Kind
from zeroresize.runtime.precedence import Message, Queues, precedence_of
from zeroresize.runtime.timeline import Floats


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """Describe a step.

    Attributes:
        step_s: from its begin to its last instruction's end.
        idle_s: [S] of these the seconds in which a stage computes nothing.
        ends_s: [S] of each stage's instructions.
    """

    step_s: float
    idle_s: Floats
    ends_s: tuple[Floats, ...]


def simulate(
    stages: Sequence[Sequence[Instruction]],
    forward_s: Floats,
    backward_s: Floats,
    *,
    activation_s: Floats | float = 0.0,
    gradient_s: Floats | float = 0.0,
    queues: Queues = "pair",
) -> SimulatedStep:
    """Simulate a step: each stage one instruction after another, messages as they are started.

    Noise is the caller's: seconds that vary by micro-batch and stage.

    Args:
        stages: [S] instructions.
        forward_s, backward_s: [M, S] of each micro-batch on each stage.
        activation_s, gradient_s: seconds of the messages from each stage to the next one, and back: [M, S − 1], or what
            can be broadcast to that.
        queues: as of :func:`~zeroresize.runtime.precedence.precedence_of`.

    Raises:
        DeadlockError: for instructions by which stages wait for each other.
        PlanError: as :func:`~zeroresize.runtime.precedence.precedence_of`.
    """
    graph = precedence_of(stages, queues=queues)
    order, circle = graph.sorted_or_circle()
    if circle:
        raise DeadlockError([str(graph.nodes[number]) for number in circle])
    shape = len(forward_s), max(len(stages) - 1, 0)
    seconds = {
        Kind.FORWARD: np.asarray(forward_s).tolist(),
        Kind.BACKWARD: np.asarray(backward_s).tolist(),
        Kind.SEND_ACT_START: np.broadcast_to(np.asarray(activation_s, dtype=np.float64), shape).tolist(),
        Kind.SEND_GRAD_START: np.broadcast_to(np.asarray(gradient_s, dtype=np.float64), shape).tolist(),
    }
    ends_s = [0.0] * len(graph.nodes)
    busy_s = [0.0] * len(stages)
    for number in order:
        node = graph.nodes[number]
        end_s = max((ends_s[other] for other in graph.needs[number]), default=0.0)
        if isinstance(node, Message):
            boundary = min(node.sender, node.receiver)
            end_s += seconds[node.start.kind][node.start.microbatch][boundary]
        elif node[1].kind.computes:
            stage, (kind, microbatch) = node
            end_s += seconds[kind][microbatch][stage]
            busy_s[stage] += seconds[kind][microbatch][stage]
        ends_s[number] = end_s
    step_s = max(ends_s[: graph.first[-1]], default=0.0)
    of_stages = tuple(np.array(ends_s[graph.first[stage] : graph.first[stage + 1]]) for stage in range(len(stages)))
    return SimulatedStep(step_s, np.maximum(step_s - np.array(busy_s), 0.0), of_stages)
