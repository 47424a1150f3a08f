"""Messages between a pipeline's stages as they are without planning: sent when made, received when needed.

``S`` stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.runtime.instructions import Instruction, Kind
from zeroresize.runtime.schedules import Order


def naive_instructions(orders: Sequence[Order]) -> list[list[Instruction]]:
    """Return [S] instructions that send what is made at once, and receive just before it is needed.

    As pipelines of equal micro-batches do; stages that send to each other at one time wait for ever where sends wait
    for their receivers.
    """
    stages: list[list[Instruction]] = []
    for stage, order in enumerate(orders):
        instructions: list[Instruction] = []
        for is_forward, microbatch in order:
            sender, receiver = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
            send, receive = (
                (Kind.SEND_ACT_START, Kind.RECV_ACT_START)
                if is_forward
                else (Kind.SEND_GRAD_START, Kind.RECV_GRAD_START)
            )
            if 0 <= sender < len(orders):
                instructions += [Instruction(receive, microbatch), Instruction(receive.wait, microbatch)]
            instructions.append(Instruction(Kind.FORWARD if is_forward else Kind.BACKWARD, microbatch))
            if 0 <= receiver < len(orders):
                instructions += [Instruction(send, microbatch), Instruction(send.wait, microbatch)]
        stages.append(instructions)
    return stages
