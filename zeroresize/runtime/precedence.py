"""What must end before what, of all instructions of a pipeline's step and the messages between its stages.

``S`` stages. Stages carry out their instructions one after another. A message travels once both sides have started it
and those before it on either side are there; whoever waits for it goes on then. With NCCL all messages of a rank may
keep their order, or those between two ranks only, by how they are started; with gloo they need not. What is free of
deadlock where all keep their order is so where fewer do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.runtime.instructions import Instruction, Kind

#: The sender's instruction and the receiver's that start one message.
_PAIRS = {Kind.SEND_ACT_START: Kind.RECV_ACT_START, Kind.SEND_GRAD_START: Kind.RECV_GRAD_START}


class PlanError(ValueError):
    """Instructions that no stages can carry out, such as a message that nobody sends."""


@dataclass(frozen=True)
class Message:
    """Describe a message by the stage that sends it and the instruction that starts it there."""

    sender: int
    start: Instruction

    @property
    def receiver(self) -> int:
        return self.sender + self.start.kind.peer

    def __str__(self) -> str:
        what = "activation" if self.start.kind is Kind.SEND_ACT_START else "gradient"
        return f"{what} of micro-batch {self.start.microbatch} from stage {self.sender} to {self.receiver}"


@dataclass(frozen=True, eq=False)
class Precedence:
    """Describe a step as a graph.

    Attributes:
        nodes: instructions with their stages, stage by stage, then messages.
        needs: of each node the numbers of those that must have ended before it begins.
        first: [S + 1] the number of each stage's first instruction; the last entry is that of the first message.
    """

    nodes: tuple[tuple[int, Instruction] | Message, ...]
    needs: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]

    def sorted_or_circle(self) -> tuple[list[int], list[int]]:
        """Return all nodes so that each stands behind what it needs; or some, and a circle of nodes that wait."""
        needed_by: list[list[int]] = [[] for _ in self.nodes]
        left = [len(needs) for needs in self.needs]
        for node, needs in enumerate(self.needs):
            for other in needs:
                needed_by[other].append(node)
        order = [node for node, number in enumerate(left) if not number]
        for node in order:  # grows meanwhile
            for other in needed_by[node]:
                left[other] -= 1
                if not left[other]:
                    order.append(other)
        if len(order) == len(self.nodes):
            return order, []
        node = next(number for number, count in enumerate(left) if count)
        place_of: dict[int, int] = {}
        path: list[int] = []
        while node not in place_of:
            place_of[node] = len(path)
            path.append(node)
            node = next(other for other in self.needs[node] if left[other])
        return order, path[place_of[node] :]


def precedence_of(stages: Sequence[Sequence[Instruction]]) -> Precedence:
    """Return the graph of a step.

    Args:
        stages: [S] instructions.

    Raises:
        PlanError: for a message that is not started exactly once on either side, or waited for before it is started;
            naming it.
    """
    nodes: list[tuple[int, Instruction] | Message] = []
    needs: list[list[int]] = []
    first = [0]
    number_of: dict[tuple[int, Instruction], int] = {}
    for stage, instructions in enumerate(stages):
        for place, instruction in enumerate(instructions):
            if (stage, instruction) in number_of:
                raise PlanError(f"stage {stage} is told {instruction} twice")
            number_of[stage, instruction] = len(nodes)
            needs.append([len(nodes) - 1] if place else [])
            nodes.append((stage, instruction))
        first.append(len(nodes))
    message_of: dict[tuple[int, Instruction], int] = {}
    for stage, instructions in enumerate(stages):
        for instruction in instructions:
            if instruction.kind in _PAIRS:
                message = Message(stage, instruction)
                arrival = message.receiver, Instruction(_PAIRS[instruction.kind], instruction.microbatch)
                if arrival not in number_of:
                    raise PlanError(f"nobody receives the {message}")
                message_of[stage, instruction] = message_of[arrival] = len(nodes)
                needs.append([number_of[stage, instruction], number_of[arrival]])
                nodes.append(message)
    for stage, instructions in enumerate(stages):
        last: int | None = None
        for instruction in instructions:
            kind, microbatch = instruction
            if kind.starts:
                if (stage, instruction) not in message_of:
                    raise PlanError(f"stage {stage} is told {instruction}, and nobody sends it")
                message_number = message_of[stage, instruction]
                if last is not None:
                    needs[message_number].append(last)
                last = message_number
            elif not kind.computes:
                start = stage, Instruction(kind.start, microbatch)
                if start not in number_of or number_of[start] > number_of[stage, instruction]:
                    raise PlanError(f"stage {stage} is told {instruction} before {start[1]}")
                needs[number_of[stage, instruction]].append(message_of[start])
    return Precedence(tuple(nodes), tuple(map(tuple, needs)), tuple(first))
