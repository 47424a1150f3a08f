"""Measure messages between the ranks of a group by their size.

That is what moves of units, layers and strategies take, and what messages between the stages of a pipeline do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, group_rank, group_size, message_device, start_messages
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.resharding.agreement import meet_over, wait_for_all
from zeroresize.utils.torch_state import synchronize
from zeroresize.utils.usual import usual_of

#: Bytes of a small and of a large message, and how often each is sent. The median of each size counts: a freak of the
#: machine must not make a link look slow, nor fast.
_SMALL, _ROUNDS = 2**10, 5
_LARGE = (2 * _SMALL) ** 2
#: How many round trips of each size tell a neighbour's link, beside the first ones; the shorter one counts. They are
#: few, so that links can be measured again and again while a model trains.
_ROUND_TRIPS = 2
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
    rank, num_ranks = group_rank(process_group), group_size(process_group)

    def send_on(sent: Tensor, received: Tensor) -> None:
        _carry({(rank + 1) % num_ranks: sent}, {(rank - 1) % num_ranks: received}, process_group, over)

    where = message_device(process_group, device) if over is None else torch.device("cpu")
    figures = _figures(send_on, _LARGE, _ROUNDS, where)
    table = meet_over(process_group, device, over)(*figures)
    return MoveCost(*(max(column) for column in zip(*table, strict=True)))


def measure_neighbour_links(
    process_group: ProcessGroup, device: torch.device, *, num_bytes: int = _SMALL**2
) -> tuple[MoveCost, ...]:
    """Measure what a message between each two neighbouring ranks takes, as stages of a pipeline send them; collective.

    Of each two neighbours the first one sends a message and gets as large a one back, which counts as two. Ranks with
    even numbers do that with the next one at the same time, then those with odd numbers. So a slow link is known by
    itself, and links that several neighbours share count as shared. It takes the time of six round trips of a small
    message and of six of a large one, and is meant for every profiled step, as bandwidth may change.

    Args:
        device: where activations lie.
        num_bytes: of the large message, above 1 KiB; best about as many as activations have.

    Returns:
        [R − 1] the seconds per byte of a message, and those of a small one, from rank i to rank i + 1 or back, the mean
        of both ways; the same on all ranks. ``seconds(num_bytes)`` of each tells what another message takes.

    Raises:
        ValueError: if the large message is not above 1 KiB.
        RuntimeError: if a rank does not come within the time limit of the group.
    """
    if num_bytes <= _SMALL:
        raise ValueError(f"num_bytes={num_bytes} is not allowed: wanted are more than {_SMALL}")
    rank, num_ranks = group_rank(process_group), group_size(process_group)
    where = message_device(process_group, device)
    figures = 0.0, 0.0
    for turn in (0, 1):
        if rank % 2 == turn and rank + 1 < num_ranks:
            carry = partial(_round_trip, rank + 1, True, process_group)
            per_byte_s, small_s = _figures(carry, num_bytes, _ROUND_TRIPS, where)
            figures = per_byte_s / 2, small_s / 2
        elif rank % 2 != turn and rank > 0:
            _figures(partial(_round_trip, rank - 1, False, process_group), num_bytes, _ROUND_TRIPS, where)
    table = [figures] if num_ranks == 1 else meet_over(process_group, device)(*figures)
    return tuple(MoveCost(per_byte_s, small_s) for per_byte_s, small_s in table[:-1])


def _round_trip(peer: int, is_first: bool, process_group: ProcessGroup, sent: Tensor, received: Tensor) -> None:
    for sends in (is_first, not is_first):
        _carry({peer: sent} if sends else {}, {} if sends else {peer: received}, process_group)


def _figures(
    carry: Callable[[Tensor, Tensor], None], large: int, num_rounds: int, where: torch.device
) -> tuple[float, float]:
    """Seconds per byte and those of a small message, by what ``carry`` takes for two tensors of either size."""
    seconds: dict[int, list[float]] = {_SMALL: [], large: []}
    buffers = {size: torch.zeros(2, size, dtype=torch.uint8, device=where) for size in seconds}
    for number in range(1 + num_rounds):
        for size, of_size in seconds.items():
            began = time.perf_counter()
            carry(*buffers[size])
            if number:  # the first messages open connections, touch memory and wait for the other rank
                of_size.append(time.perf_counter() - began)
    small_s, large_s = (usual_of(of_size) for of_size in seconds.values())
    # Where not even the sizes tell the messages apart, the larger one bounds what a byte takes.
    return (large_s - small_s) / (large - _SMALL) if large_s > small_s else large_s / large, small_s


def _carry(
    sends: Mapping[int, Tensor],
    receives: Mapping[int, Tensor],
    process_group: ProcessGroup,
    over: Channel | None = None,
) -> None:
    for error in wait_for_all(start_messages(sends, receives, process_group, over)).values():
        raise error
    for tensor in (*sends.values(), *receives.values()):
        synchronize(tensor.device)
