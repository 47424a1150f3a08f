"""Units of segments move from one ownership to another inside a tensor-parallel group, all or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import require_group
from zeroresize.comm.exchange import Meet
from zeroresize.layers.segment import OwnedSegment
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.agreement import meet_over
from zeroresize.resharding.data_parallel import wrappers_of
from zeroresize.resharding.transaction import MoveReport, Participants, run_transaction
from zeroresize.resharding.units.unit_contents import contents_of
from zeroresize.resharding.units.unit_move import UnitMove, bytes_per_unit


@dataclass(frozen=True, kw_only=True)
class UnitMoveReport(MoveReport):
    """Reports what a move of units was on this rank: of parameters, gradients, master weights and optimizer state.

    Attributes:
        num_units: of every kind that moved, how many changed owners in the whole group.
    """

    num_units: Mapping[str, int]


def move_units(
    segments: Sequence[OwnedSegment],
    targets: Mapping[str, OwnershipMap],
    *,
    process_group: ProcessGroup,
    optimizer: object | None,
    meet: Meet | None = None,
    model: nn.Module | None = None,
    max_bytes: int = 64 * 2**20,
) -> UnitMoveReport:
    """Give every unit to the rank that owns it in ``targets``; collective, between an optimizer's step and a forward.

    With a unit travel its rows of every parameter of the segment, of the master weights, of all optimizer state of the
    parameter's shape, and of gradients where there are some. Other optimizer state, such as the number of steps, must
    be the same on all ranks that have units; a rank that had none takes it over. All rows arrive bit for bit, so units
    that move away and back leave everything as it was.

    Parameters, master weights and the optimizer's state dictionaries stay the objects that they are, their tensors get
    other shapes. Hooks on parameters stay, those on gradient accumulators, too. A parameter with a tensor of its size
    as an attribute, as Megatron's ``main_grad``, cannot move.

    All or nothing: nobody changes anything before every rank has received all. Up to then the new tensors of all
    segments that this rank's units change in are held beside the old ones, and messages of at most ``max_bytes``.
    To hold less, move one segment after the other.

    Args:
        segments: the same on every rank; those without a target stay.
        targets: by the segment's name.
        process_group: of the ranks that the maps count.
        optimizer: the only one that steps these parameters, or a host's wrapper of it; None for none.
        meet: ``meet(one, other)`` returns both numbers of every rank, in the group's order, such as
            :meth:`zeroresize.comm.exchange.Exchange.meet`; None meets over ``process_group`` itself. With a
            :class:`~zeroresize.resharding.agreement.MeetReplicas` all replicas move, or none.
        model: that holds these parameters. Reducers of DistributedDataParallel in it and around it are built anew;
            replicas must move alike before the next step. None if no parameter is in such a wrapper.
        max_bytes: of messages that this rank sends and receives at once; a unit that is larger travels alone.

    Raises:
        ValueError: for a target that does not fit its segment, or what cannot move, such as ZeRO's shards and factored
            optimizer state; the other ranks raise a RuntimeError.
        NotEnoughMemoryError: on every rank, if the new tensors and messages do not fit on some.
        RuntimeError: on every rank that lives, if ranks differ in what to move or in optimizer state, or one dies or
            fails; it names them. After any of these everything is as it was. Only what ``on_change`` raises, and a
            rank that dies just when the last one has received all, can leave others with units moved.
    """
    begin = time.perf_counter()
    process_group = require_group(process_group)
    device = next((one.parameter.device for segment in segments for one in segment.tensors), torch.device("cpu"))
    wrappers = () if model is None else wrappers_of(model)
    move = run_transaction(
        lambda: UnitMove(segments, targets, process_group, optimizer, wrappers, max_bytes, device),
        Participants(process_group, device, meet or meet_over(process_group, device)),
    )
    return UnitMoveReport(num_units=move.num_units, **move.figures(begin))


def bytes_of_units(segments: Sequence[OwnedSegment], optimizer: object | None, rank: int = 0) -> int:
    """Return the bytes that a rank sends if it gives away all units it has at even shares, without gradients.

    Optimizer state counts once there is some.

    Args:
        rank: this one, within its group; it matters while units are away only.
    """
    total = 0
    for segment in segments:
        num_units = len(segment.owned.owners) // segment.owned.num_ranks
        for contents in contents_of(segment, optimizer, rank):
            total += num_units * bytes_per_unit(contents, contents.description, with_gradients=False)
    return total
