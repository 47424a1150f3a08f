"""Measure messages between the ranks of a group by their size: what moves of units, layers and strategies take."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, group_rank, group_size, message_device, start_messages
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.resharding.agreement import meet_over, wait_for_all

#: Bytes of a small and of a large message, and how often each is sent. The median of each size counts: a freak of the
#: machine must not make a link look slow, nor fast.
_SMALL, _LARGE, _ROUNDS = 2**10, 2**22, 5
#: Seconds of a move beside its messages, in which ranks agree, allocate and install; the first move tells what it is.
INSTALLING_S = 0.05


def measure_move_cost(process_group: ProcessGroup, device: torch.device, over: Channel | None = None) -> MoveCost:
    """Measure what a move between these ranks takes before any was made: its messages, and a moment to install them.

    Collective; arguments, result and errors are those of :func:`measure_messages`.
    """
    messages = measure_messages(process_group, device, over)
    return MoveCost(messages.seconds_per_byte, INSTALLING_S + messages.fixed_s)


def measure_messages(process_group: ProcessGroup, device: torch.device, over: Channel | None = None) -> MoveCost:
    """Measure what messages between neighbouring ranks take, all ranks sending at once; collective.

    Every rank sends to the next one while it receives from the one before, so links that ranks share count as shared,
    and the last rank sends to the first one.

    Args:
        device: where what is to travel lies.
        over: another transport between these ranks, of tensors on the CPU; None for the group itself.

    Returns:
        The seconds per byte and those of the smallest message, of the slowest rank, the same on all ranks; zeros where
        there is one rank only.

    Raises:
        RuntimeError: if a rank does not come within the time limit of the group.
    """
    if group_size(process_group) == 1:
        return MoveCost(0.0, 0.0)
    where = message_device(process_group, device) if over is None else torch.device("cpu")
    seconds: dict[int, list[float]] = {_SMALL: [], _LARGE: []}
    buffers = {size: torch.zeros(2, size, dtype=torch.uint8, device=where) for size in seconds}
    for number in range(1 + _ROUNDS):
        for size, of_size in seconds.items():
            taken_s = _seconds(process_group, buffers[size], over)
            if number:  # the first messages open connections and touch memory
                of_size.append(taken_s)
    small_s, large_s = (median(of_size) for of_size in seconds.values())
    # Where not even the sizes tell the messages apart, the larger one bounds what a byte takes.
    per_byte_s = (large_s - small_s) / (_LARGE - _SMALL) if large_s > small_s else large_s / _LARGE
    table = meet_over(process_group, device, over)(per_byte_s, small_s)
    return MoveCost(*(max(column) for column in zip(*table, strict=True)))


def _seconds(process_group: ProcessGroup, buffers: torch.Tensor, over: Channel | None) -> float:
    rank, num_ranks = group_rank(process_group), group_size(process_group)
    sent, received = buffers
    began = time.perf_counter()
    transfers = start_messages({(rank + 1) % num_ranks: sent}, {(rank - 1) % num_ranks: received}, process_group, over)
    for error in wait_for_all(transfers).values():
        raise error
    if received.is_cuda:
        torch.cuda.synchronize(received.device)
    return time.perf_counter() - began
