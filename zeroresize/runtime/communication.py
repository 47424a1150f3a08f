"""When messages between stages start and are waited for, so that no circle of stages waits (DynaPipe, section 6).

``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from zeroresize.runtime.instructions import Instruction, Kind
from zeroresize.runtime.schedules import Order, Schedule, orders_of
from zeroresize.runtime.timeline import Floats, timeline

#: Of a forward and of a backward: what is sent and received behind it, and waited for before the next stage's.
_MESSAGES = {
    True: (Kind.SEND_ACT_START, Kind.RECV_ACT_START),
    False: (Kind.SEND_GRAD_START, Kind.RECV_GRAD_START),
}


def planned_instructions(orders: Sequence[Order], forward_s: Floats, backward_s: Floats) -> list[list[Instruction]]:
    """Return [S] instructions: a message starts on both sides when it is made, and is waited for when it is needed.

    Operations are gone through as they end by the seconds that are expected. So any two neighbours start the messages
    between them in the same order, and whatever an instruction waits for ends earlier by that plan: however long
    operations really take, no circle of stages waits. An activation has been sent when its micro-batch's backward
    begins, at the latest, a gradient when the next backward does, so that no more memory is kept than the schedule
    says.

    Args:
        orders: [S] of forwards and backwards.
        forward_s, backward_s: [M, S] seconds that are expected of each micro-batch on each stage.

    Raises:
        ValueError: as :func:`~zeroresize.runtime.timeline.timeline`.
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
    """Return [S] instructions of a schedule, planned as if all micro-batches took equally long.

    Raises:
        ValueError: for another schedule.
    """
    if not num_microbatches:
        return ((),) * num_stages
    forward_s = np.ones((num_microbatches, num_stages))
    orders = orders_of(schedule, num_stages, num_microbatches)
    return tuple(map(tuple, planned_instructions(orders, forward_s, 2.0 * forward_s)))
