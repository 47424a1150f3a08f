"""What the stages of a pipeline are told to do, one after another: planned, and proven to be free of deadlock.

``S`` stages, ``M`` micro-batches (DynaPipe, sections 3 and 6). A message is two instructions on either side: one that
starts it, and one that waits until it is there, or sent. Activations go from a stage to the next one, gradients to the
one before. A message travels once both sides have started it and those that either side has started before are there.
With NCCL all messages of a rank may keep their order, or those between two ranks only, by how they are started; with
gloo they need not. What is free of deadlock where all keep their order is so where fewer do.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from zeroresize.runtime.schedules import Floats, Order, Schedule, orders_of
from zeroresize.runtime.simulated_steps import timeline


class Kind(Enum):
    """The kinds of instructions, by the names of DynaPipe's paper."""

    FORWARD = "Forward"
    BACKWARD = "Backward"
    SEND_ACT_START = "SendActStart"
    RECV_ACT_START = "RecvActStart"
    SEND_GRAD_START = "SendGradStart"
    RECV_GRAD_START = "RecvGradStart"
    WAIT_SEND_ACT = "WaitSendAct"
    WAIT_RECV_ACT = "WaitRecvAct"
    WAIT_SEND_GRAD = "WaitSendGrad"
    WAIT_RECV_GRAD = "WaitRecvGrad"

    __hash__ = object.__hash__  # by identity, several times as fast as by name

    def __repr__(self) -> str:
        return self.value

    @property
    def computes(self) -> bool:
        """Whether it is a forward or a backward."""
        return self in (Kind.FORWARD, Kind.BACKWARD)

    @property
    def starts(self) -> bool:
        """Whether it starts a message."""
        return self in _WAITS

    @property
    def wait(self) -> Kind:
        """The kind that waits for what this one starts."""
        return _WAITS[self]

    @property
    def start(self) -> Kind:
        """The kind that starts what this one waits for."""
        return _STARTS[self]

    @property
    def peer(self) -> int:
        """How far the other stage is: 1 for the next one, −1 for the one before, 0 for computing."""
        return _PEERS.get(_STARTS.get(self, self), 0)


_WAITS = {
    Kind.SEND_ACT_START: Kind.WAIT_SEND_ACT,
    Kind.RECV_ACT_START: Kind.WAIT_RECV_ACT,
    Kind.SEND_GRAD_START: Kind.WAIT_SEND_GRAD,
    Kind.RECV_GRAD_START: Kind.WAIT_RECV_GRAD,
}
_STARTS = {wait: start for start, wait in _WAITS.items()}
_SENDS = {Kind.SEND_ACT_START, Kind.WAIT_SEND_ACT, Kind.SEND_GRAD_START, Kind.WAIT_SEND_GRAD}
_PEERS = {Kind.SEND_ACT_START: 1, Kind.RECV_GRAD_START: 1, Kind.RECV_ACT_START: -1, Kind.SEND_GRAD_START: -1}


class Instruction(NamedTuple):
    """Describe one thing to do, with a micro-batch or a message of it."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}({self.microbatch})"


#: Of a forward and of a backward: what is sent and received behind it, and waited for before the next stage's.
_MESSAGES = {
    True: (Kind.SEND_ACT_START, Kind.RECV_ACT_START),
    False: (Kind.SEND_GRAD_START, Kind.RECV_GRAD_START),
}


def planned_instructions(orders: Sequence[Order], forward_s: Floats, backward_s: Floats) -> list[list[Instruction]]:
    """Return [S] instructions: a message starts on both sides when it is made, and is waited for when it is needed.

    Operations are gone through as they end by the seconds [M, S] that are expected. So any two neighbours start the
    messages between them in the same order, and whatever an instruction waits for ends earlier by that plan: however
    long operations really take, no circle of stages waits. An activation has been sent when its micro-batch's backward
    begins, at the latest, a gradient when the next backward does, so no more memory is kept than the schedule says.
    """
    num_stages = len(orders)
    stages: list[list[Instruction]] = [[] for _ in orders]
    unsent: list[int | None] = [None] * num_stages
    for stage, (is_forward, microbatch) in timeline(orders, forward_s, backward_s).operations:
        instructions = stages[stage]
        sender, receiver = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        send, receive = _MESSAGES[is_forward]
        if not is_forward:
            last = unsent[stage]
            if last is not None:
                instructions.append(Instruction(Kind.WAIT_SEND_GRAD, last))
                unsent[stage] = None
            if stage + 1 < num_stages:
                instructions.append(Instruction(Kind.WAIT_SEND_ACT, microbatch))
        if 0 <= sender < num_stages:
            instructions.append(Instruction(receive.wait, microbatch))
        instructions.append(Instruction(Kind.FORWARD if is_forward else Kind.BACKWARD, microbatch))
        if 0 <= receiver < num_stages:
            instructions.append(Instruction(send, microbatch))
            stages[receiver].append(Instruction(receive, microbatch))
            if not is_forward:
                unsent[stage] = microbatch
    for stage, last in enumerate(unsent):
        if last is not None:
            stages[stage].append(Instruction(Kind.WAIT_SEND_GRAD, last))
    return stages


@lru_cache(maxsize=256)
def instructions_of(schedule: Schedule, num_stages: int, num_microbatches: int) -> tuple[tuple[Instruction, ...], ...]:
    """Return [S] instructions of a schedule, planned as if all micro-batches took equally long."""
    if not num_microbatches:
        return ((),) * num_stages
    forward_s = np.ones((num_microbatches, num_stages))
    orders = orders_of(schedule, num_stages, num_microbatches)
    return tuple(map(tuple, planned_instructions(orders, forward_s, 2.0 * forward_s)))


def forward_instructions(stage: int, num_stages: int, num_microbatches: int) -> list[Instruction]:
    """Return what a stage does where a model is evaluated: forwards only, each sent before the next one is."""
    instructions: list[Instruction] = []
    for number in range(num_microbatches):
        if stage:
            instructions += [Instruction(Kind.RECV_ACT_START, number), Instruction(Kind.WAIT_RECV_ACT, number)]
        instructions.append(Instruction(Kind.FORWARD, number))
        if stage + 1 < num_stages:
            if number:
                instructions.append(Instruction(Kind.WAIT_SEND_ACT, number - 1))
            instructions.append(Instruction(Kind.SEND_ACT_START, number))
    if num_microbatches and stage + 1 < num_stages:
        instructions.append(Instruction(Kind.WAIT_SEND_ACT, num_microbatches - 1))
    return instructions


class PlanError(ValueError):
    """Instructions that no stages can carry out, such as a message that nobody sends."""


class DeadlockError(PlanError):
    """Stages would wait for each other for ever: in a circle each for the next one, the last for the first."""

    def __init__(self, circle: Sequence[str]) -> None:
        super().__init__("deadlock: " + ", which waits for ".join([*circle, circle[0]]))
        self.circle = tuple(circle)


def check(stages: Sequence[Sequence[Instruction]], num_microbatches: int | None = None) -> None:
    """Prove that a step of [S] instructions can be carried out, whatever they take.

    M is None for as many micro-batches as the first stage has forwards.

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
    circle = _Walk(stages).circle()
    if circle:
        raise DeadlockError(circle)


def _require_complete(stage: int, instructions: Sequence[Instruction], num_stages: int, num_microbatches: int) -> None:
    place_of = {instruction: place for place, instruction in enumerate(instructions)}
    if len(place_of) < len(instructions):
        twice = next(instruction for place, instruction in enumerate(instructions) if place_of[instruction] != place)
        raise PlanError(f"stage {stage} is told {twice} twice")
    received = [Kind.RECV_ACT_START, Kind.WAIT_RECV_ACT] if stage else []
    returned = [Kind.SEND_GRAD_START, Kind.WAIT_SEND_GRAD] if stage else []
    chains = [[*received, Kind.FORWARD, Kind.BACKWARD, *returned]]
    if stage + 1 < num_stages:
        chains.append([Kind.FORWARD, Kind.SEND_ACT_START, Kind.WAIT_SEND_ACT])
        chains.append([Kind.RECV_GRAD_START, Kind.WAIT_RECV_GRAD, Kind.BACKWARD])
    expected = {Instruction(kind, number) for chain in chains for kind in chain for number in range(num_microbatches)}
    for instruction in expected - place_of.keys():
        raise PlanError(f"stage {stage} is never told {instruction}")
    for instruction in place_of.keys() - expected:
        raise PlanError(f"stage {stage} of {num_stages} is told {instruction}, of {num_microbatches} micro-batches")
    for microbatch in range(num_microbatches):
        for chain in chains:
            for pair in itertools.pairwise(chain):
                first, then = (Instruction(kind, microbatch) for kind in pair)
                if place_of[first] > place_of[then]:
                    raise PlanError(f"stage {stage} is told {then} before {first}")


class _Message(NamedTuple):
    sender: int
    receiver: int
    microbatch: int

    def __str__(self) -> str:
        what = "activation" if self.sender < self.receiver else "gradient"
        return f"{what} of micro-batch {self.microbatch} from stage {self.sender} to {self.receiver}"


class _Walk:
    """All stages go as far as they can by their instructions, which are complete."""

    def __init__(self, stages: Sequence[Sequence[Instruction]]) -> None:
        self._stages, self._places = stages, [0] * len(stages)
        #: Of each stage the messages that it has started and that have not arrived, and all that have.
        self._started: list[deque[_Message]] = [deque() for _ in stages]
        self._arrived: set[_Message] = set()

    def circle(self) -> list[str]:
        """Waits and messages each of which waits for the next one, the last for the first; none if all stages end."""
        while any([self._goes_on(stage) for stage in range(len(self._stages))]):
            pass
        waiting = [stage for stage, place in enumerate(self._places) if place < len(self._stages[stage])]
        if not waiting:
            return []
        path: list[int | _Message] = [waiting[0]]
        while (needed := self._needed_by(path[-1])) not in path:
            path.append(needed)
        circle = path[path.index(needed) :]
        return [f"{self._next_of(each)} on stage {each}" if isinstance(each, int) else str(each) for each in circle]

    def _needed_by(self, node: int | _Message) -> int | _Message:
        """What a stage waits for, or a message: one of its stages, or the message before it there."""
        if isinstance(node, int):
            return self._message_of(node, self._next_of(node))
        sides = (node.sender, node.receiver)
        for side in sides:
            if node not in self._started[side]:
                return side
        return next(self._started[side][0] for side in sides if self._started[side][0] != node)

    def _goes_on(self, stage: int) -> bool:
        """Whether a stage could do something, which is done."""
        instructions, begin = self._stages[stage], self._places[stage]
        while self._places[stage] < len(instructions):
            instruction = instructions[self._places[stage]]
            if not instruction.kind.computes:
                message = self._message_of(stage, instruction)
                if instruction.kind.starts:
                    self._started[stage].append(message)
                    self._deliver(message)
                elif message not in self._arrived:
                    break
            self._places[stage] += 1
        return self._places[stage] > begin

    def _deliver(self, message: _Message) -> None:
        """Let messages arrive that both sides have started before all others, and those behind them."""
        candidates = [message]
        while candidates:
            message = candidates.pop()
            sides = self._started[message.sender], self._started[message.receiver]
            if all(side and side[0] == message for side in sides):
                self._arrived.add(message)
                for side in sides:
                    side.popleft()
                candidates += [side[0] for side in sides if side]

    def _next_of(self, stage: int) -> Instruction:
        return self._stages[stage][self._places[stage]]

    def _message_of(self, stage: int, instruction: Instruction) -> _Message:
        kind, peer = instruction.kind, stage + instruction.kind.peer
        return _Message(*((stage, peer) if kind in _SENDS else (peer, stage)), instruction.microbatch)
