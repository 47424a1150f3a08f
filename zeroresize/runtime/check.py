"""Whether stages can carry out their instructions: complete, in an order that makes sense, and free of deadlock.

``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from zeroresize.runtime.instructions import Instruction, Kind
from zeroresize.runtime.precedence import Message, PlanError, Precedence, precedence_of


class DeadlockError(PlanError):
    """Stages would wait for each other for ever.

    Attributes:
        circle: what waits for what, the last for the first; in words.
    """

    def __init__(self, circle: Sequence[str]) -> None:
        super().__init__("deadlock: " + ", which waits for ".join([*circle, circle[0]]))
        self.circle = tuple(circle)


def check(stages: Sequence[Sequence[Instruction]], num_microbatches: int | None = None) -> None:
    """Prove that a step can be carried out, whatever its instructions take.

    Args:
        stages: [S] instructions.
        num_microbatches: M; None for as many as the first stage has forwards.

    Raises:
        PlanError: for a forward, a backward or a message that is missing, stands twice, or comes before what it needs.
        DeadlockError: with the circle.
    """
    if not stages:
        raise PlanError("instructions of no stage are given: at least one is needed")
    if num_microbatches is None:
        num_microbatches = sum(instruction.kind is Kind.FORWARD for instruction in stages[0])
    for stage, instructions in enumerate(stages):
        _require_complete(stage, instructions, len(stages), num_microbatches)
    graph = precedence_of(stages)
    _, circle = graph.sorted_or_circle()
    if circle:
        raise DeadlockError([_in_words(graph, node) for node in circle])


def _require_complete(stage: int, instructions: Sequence[Instruction], num_stages: int, num_microbatches: int) -> None:
    place_of = {instruction: place for place, instruction in enumerate(instructions)}
    if len(place_of) < len(instructions):
        twice = next(instruction for place, instruction in enumerate(instructions) if place_of[instruction] != place)
        raise PlanError(f"stage {stage} is told {twice} twice")
    expected: set[Instruction] = set()
    for microbatch in range(num_microbatches):
        before = [Kind.RECV_ACT_START, Kind.WAIT_RECV_ACT] if stage else []
        behind = [Kind.SEND_GRAD_START, Kind.WAIT_SEND_GRAD] if stage else []
        between = (
            [Kind.SEND_ACT_START, Kind.WAIT_SEND_ACT, Kind.RECV_GRAD_START, Kind.WAIT_RECV_GRAD]
            if stage + 1 < num_stages
            else []
        )
        everything = [*before, Kind.FORWARD, *between, Kind.BACKWARD, *behind]
        needed = [Instruction(kind, microbatch) for kind in everything]
        expected.update(needed)
        missing = next((instruction for instruction in needed if instruction not in place_of), None)
        if missing is not None:
            raise PlanError(f"stage {stage} is never told {missing}")
        chains = [[*before, Kind.FORWARD, Kind.BACKWARD, *behind]]
        if between:
            send, sent, receive, received = between
            chains += [[Kind.FORWARD, send, sent], [receive, received, Kind.BACKWARD]]
        for chain in chains:
            for first, then in itertools.pairwise(chain):
                if place_of[Instruction(first, microbatch)] > place_of[Instruction(then, microbatch)]:
                    raise PlanError(
                        f"stage {stage} is told {Instruction(then, microbatch)} before {Instruction(first, microbatch)}"
                    )
    unknown = next((instruction for instruction in instructions if instruction not in expected), None)
    if unknown is not None:
        raise PlanError(f"stage {stage} of {num_stages} is told {unknown}, of {num_microbatches} micro-batches")


def _in_words(graph: Precedence, number: int) -> str:
    node = graph.nodes[number]
    return str(node) if isinstance(node, Message) else f"{node[1]} on stage {node[0]}"
