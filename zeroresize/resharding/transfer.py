"""Units of segments move from one ownership to another inside a tensor-parallel group, all or nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import group_rank, group_size, require_group, sends_from_device, start_messages
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segment import OwnedSegment
from zeroresize.plan.ownership import Indices, OwnershipMap
from zeroresize.resharding.agreement import (
    Meet,
    fingerprint,
    meet_over,
    meet_prepared,
    require_memory,
    require_received,
    require_same,
    texts_of_ranks,
    wait_for_all,
)
from zeroresize.resharding.contents import (
    Contents,
    Description,
    agreed_contents,
    as_json,
    contents_of,
    from_json,
    layers_of,
)
from zeroresize.resharding.data_parallel import drop_reducers, rebuild_reducers, require_rebuildable
from zeroresize.resharding.messages import Pair, Round, Travelling, copy_units, in_rounds, parts_of, stack
from zeroresize.resharding.transfer_plan import transfer_plan


@dataclass(frozen=True)
class MoveReport:
    """What a move was on this rank.

    Attributes:
        bytes_sent, bytes_received: by this rank, of parameters, gradients, master weights and optimizer state.
        seconds: wall time of the whole move.
        num_units: that changed owners, in the whole group.
        num_rounds: in which messages were sent.
        buffer_bytes: memory of the messages of this rank's largest round, sent and received.
        new_bytes: memory of the new tensors, which were there beside the old ones.
    """

    bytes_sent: int
    bytes_received: int
    seconds: float
    num_units: int
    num_rounds: int
    buffer_bytes: int
    new_bytes: int


def move_units(
    segments: Sequence[OwnedSegment],
    targets: Mapping[str, OwnershipMap],
    *,
    process_group: ProcessGroup,
    optimizer: object | None,
    meet: Meet | None = None,
    data_parallel: Sequence[DistributedDataParallel] = (),
    max_bytes: int = 64 * 2**20,
) -> MoveReport:
    """Give every unit to the rank that owns it in ``targets``; collective, between an optimizer's step and a forward.

    With a unit travel its rows of every parameter of the segment, of the master weights, of all optimizer state of the
    parameter's shape, and of gradients where there are some. Other optimizer state, such as the number of steps, must
    be the same on all ranks that have units; a rank that had none takes it over. All rows arrive bit for bit, so units
    that move away and back leave everything as it was.

    Parameters, master weights and the optimizer's state dictionaries stay the objects that they are, their tensors get
    other shapes. Hooks on parameters stay; hooks that somebody else put on gradient accumulators are lost, but for
    those of ``data_parallel``.

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
        data_parallel: the wrappers around these parameters, see
            :func:`~zeroresize.resharding.data_parallel.wrappers_of`. Replicas must move alike before the next step.
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
    rank = group_rank(process_group)
    device = next((one.parameter.device for segment in segments for one in segment.tensors), torch.device("cpu"))
    meet_device = device if sends_from_device(process_group, torch.empty(0, device=device)) else torch.device("cpu")
    meet = meet or meet_over(process_group, meet_device)
    try:
        move: _Move | Exception = _Move(segments, targets, process_group, optimizer, data_parallel, max_bytes)
    except Exception as error:  # the others must hear of any
        move = error
    numbers = move if isinstance(move, Exception) else (move.fingerprint, fingerprint(move.told(with_units=False)))
    table = meet_prepared(meet, numbers)
    assert isinstance(move, _Move)
    require_same(
        [number for number, *_ in table], "the segments, their owners or the targets that they were given", meet
    )
    if len({number for _, number, *_ in table}) > 1:
        told = texts_of_ranks(move.told(with_units=True), meet, process_group, meet_device)
        agreed: tuple[float, float] | Exception
        try:
            move.agree(agreed_contents([from_json(text) for text in told]))
            agreed = float(len(move.rounds)), 0.0
        except Exception as error:  # replicas must hear of it
            agreed = error
        table = meet_prepared(meet, agreed)
        require_same([number for number, *_ in table], "how much travels: some may lack gradients", meet)
    else:
        move.agree(move.descriptions)
    require_memory(move.new_bytes + move.buffer_bytes, device, meet)
    allocated: tuple[float, float] | Exception = (0.0, 0.0)
    try:
        move.allocate(meet_device)
    except Exception as error:  # such as out of memory on a device
        allocated = error
    meet_prepared(meet, allocated)
    for number in range(len(move.rounds)):
        require_received(move.carry_out(number), meet)
    if move.num_units:
        drop_reducers(data_parallel)
        move.install()
        rebuild_reducers(data_parallel)
        for segment, _, after in move.moving:
            if segment.on_change is not None:
                segment.on_change(after.counts[rank])
    return MoveReport(
        move.bytes_sent,
        move.bytes_received,
        time.perf_counter() - begin,
        move.num_units,
        len(move.rounds),
        move.buffer_bytes,
        move.new_bytes,
    )


class _Move:
    """One move on this rank, from the plan to the installed tensors."""

    def __init__(
        self,
        segments: Sequence[OwnedSegment],
        targets: Mapping[str, OwnershipMap],
        process_group: ProcessGroup,
        optimizer: object | None,
        data_parallel: Sequence[DistributedDataParallel],
        max_bytes: int,
    ) -> None:
        self._group, self._rank, self._max_bytes = process_group, group_rank(process_group), max_bytes
        known = {segment.name for segment in segments}
        unknown = sorted(targets.keys() - known)
        if unknown:
            raise ValueError(f"targets are given for {unknown}, which are no segments: there are {sorted(known)}")
        require_rebuildable(data_parallel)
        #: (segment, before, after)
        self.moving = []
        for segment in segments:
            after = targets.get(segment.name, segment.owned)
            _require_fitting(segment, after, group_size(process_group))
            if after != segment.owned:
                self.moving.append((segment, segment.owned, after))
        self._plans = [transfer_plan(before, after) for _, before, after in self.moving]
        self._contents = [contents_of(segment, optimizer, self._rank) for segment, *_ in self.moving]
        _require_disjoint(self._contents)
        self.num_units = sum(len(units) for plan in self._plans for units in plan.values())
        self.descriptions = [one.description for of_segment in self._contents for one in of_segment]
        self.fingerprint = fingerprint(self._what_moves())
        self.bytes_sent = self.bytes_received = 0
        self._has_kept = False

    def told(self, *, with_units: bool) -> str:
        """What this rank holds, for the others."""
        return as_json(self.descriptions, with_units=with_units)

    def agree(self, descriptions: Sequence[Description]) -> None:
        """Take what all ranks have agreed on to travel, and lay out the rounds."""
        agreed = iter(descriptions)
        self._agreed = [[next(agreed) for _ in of_segment] for of_segment in self._contents]
        unit_bytes = [
            sum(
                _elements_per_unit(one) * torch.zeros(0, dtype=getattr(torch, dtype)).element_size()
                for one, what in zip(of_segment, of_agreed, strict=True)
                for dtype in what.dtypes.values()
            )
            for of_segment, of_agreed in zip(self._contents, self._agreed, strict=True)
        ]
        self.rounds: list[Round] = in_rounds(self._plans, unit_bytes, self._max_bytes)
        self._unit_bytes = unit_bytes
        self._takes_part = [any(self._rank in pair for pair in plan) for plan in self._plans]
        self.new_bytes = sum(
            after.counts[self._rank] * size
            for (*_, after), size, takes_part in zip(self.moving, unit_bytes, self._takes_part, strict=True)
            if takes_part
        )
        self.buffer_bytes = max((sum(self._sizes(one).values()) for one in self.rounds), default=0)

    def allocate(self, buffer_device: torch.device) -> None:
        """Make the new tensors and the memory of messages."""
        size = max((sum(map(_aligned, self._sizes(one).values())) for one in self.rounds), default=0)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=buffer_device)
        self._new: list[list[dict[str, Tensor]]] = []
        tensors = []
        for number, of_segment in enumerate(self._contents):
            _, before, after = self.moving[number]
            num_old, num_new = before.counts[self._rank], after.counts[self._rank]
            self._new.append([])
            for one, agreed in zip(of_segment, self._agreed[number], strict=True) if self._takes_part[number] else ():
                where, shape = one.unit_tensor, list(one.parameter.shape)
                shape[where.dim] = where.num_blocks * num_new * where.rows
                self._new[-1].append({})
                for what, name in sorted(agreed.dtypes.items()):
                    dtype, old = getattr(torch, name), one.tensor(what)
                    new = torch.empty(shape, dtype=dtype, device=one.device_of(what))
                    self._new[-1][-1][what] = new
                    old_stack = None if old is None else stack(old, where, num_old)
                    tensors.append(Travelling(number, dtype, old_stack, stack(new, where, num_new)))
        self._tensors = sorted(tensors, key=lambda one: -one.dtype.itemsize)

    def carry_out(self, number: int) -> Exception | None:
        """Send and receive the messages of one round; returns what failed."""
        messages, begin = {}, 0
        for pair, size in self._sizes(self.rounds[number]).items():
            messages[pair] = self._buffer[begin : begin + size]
            begin += _aligned(size)
        try:
            self._exchange(self.rounds[number], messages)
        except Exception as error:  # the others must hear of any
            return error
        return None

    def install(self) -> None:
        """Put the new tensors in place of the old ones, which then take no memory; nothing of it can fail."""
        self._tensors.clear()
        for (segment, _, after), of_segment, of_new, of_agreed in zip(
            self.moving, self._contents, self._new, self._agreed, strict=True
        ):
            for one, new, agreed in zip(of_segment, of_new, of_agreed, strict=False):
                one.install(new, agreed)
                one.forget()
            segment.owned = after
            for layer in layers_of(segment):
                if isinstance(layer, BalancedLinear):  # what was decided and remembered is of other columns
                    layer.plan = None
                    layer.last = None if layer.last is None else LastGradients()

    def _exchange(self, round_: Round, messages: Mapping[Pair, Tensor]) -> None:
        sends, receives = {}, {}
        for pair, message in messages.items():
            source, destination = pair
            if source == self._rank:
                self._pack(message, round_, pair)
                sends[destination] = message
            else:
                receives[source] = message
        transfers = start_messages(sends, receives, self._group)
        self._copy_kept()
        errors = wait_for_all(transfers)
        if errors:
            raise next(iter(errors.values()))
        for source, message in receives.items():
            self._unpack(message, round_, (source, self._rank))
        self.bytes_sent += sum(message.numel() for message in sends.values())
        self.bytes_received += sum(message.numel() for message in receives.values())

    def _pack(self, message: Tensor, round_: Round, pair: Pair) -> None:
        for parcel, number, part in parts_of(message, round_[pair], self._tensors):
            old = self._tensors[number].old
            if old is None:
                part.zero_()
            else:
                places = _places(self.moving[parcel.segment][1], self._rank, parcel.units)
                copy_units(part, np.arange(len(places)), old, places)

    def _unpack(self, message: Tensor, round_: Round, pair: Pair) -> None:
        for parcel, number, part in parts_of(message, round_[pair], self._tensors):
            places = _places(self.moving[parcel.segment][2], self._rank, parcel.units)
            copy_units(self._tensors[number].new, places, part, np.arange(len(places)))

    def _copy_kept(self) -> None:
        """Units that stay, into the new tensors, while the first messages are on their way."""
        if self._has_kept:
            return
        self._has_kept = True
        for tensor in self._tensors:
            _, before, after = self.moving[tensor.segment]
            kept = np.flatnonzero((before.owners == self._rank) & (after.owners == self._rank))
            places = _places(after, self._rank, kept)
            if tensor.old is None:
                tensor.new.zero_()
            else:
                copy_units(tensor.new, places, tensor.old, _places(before, self._rank, kept))

    def _sizes(self, round_: Round) -> dict[Pair, int]:
        """Bytes of this rank's messages in a round."""
        return {
            pair: sum(len(parcel.units) * self._unit_bytes[parcel.segment] for parcel in parcels)
            for pair, parcels in round_.items()
            if self._rank in pair
        }

    def _what_moves(self) -> str:
        """Everything that must be the same on all ranks, but for what the parameters hold besides themselves."""
        told = [
            [
                segment.name,
                before.owners.tolist(),
                after.owners.tolist(),
                [
                    [one.name, one.unit_tensor.dim, one.unit_tensor.rows, one.unit_tensor.num_blocks]
                    + [_elements_per_unit(one), one.stepped is not None, str(one.parameter.dtype)]
                    for one in of_segment
                ],
            ]
            for (segment, before, after), of_segment in zip(self.moving, self._contents, strict=True)
        ]
        return json.dumps([self._max_bytes, told])


def _require_fitting(segment: OwnedSegment, after: OwnershipMap, num_ranks: int) -> None:
    before = segment.owned
    if len(after.owners) != len(before.owners) or not after.num_ranks == before.num_ranks == num_ranks:
        raise ValueError(
            f"{segment.name}: its {len(before.owners)} units on {num_ranks} ranks cannot follow a map of "
            f"{len(after.owners)} units on {after.num_ranks} ranks"
        )
    if after.owners.min() < 0 or after.owners.max() >= num_ranks:
        raise ValueError(f"{segment.name}: units are owned by ranks 0 to {num_ranks - 1} only")
    if min(after.counts) < segment.min_units:
        raise ValueError(f"{segment.name}: every rank must keep {segment.min_units} units, found {list(after.counts)}")


def _require_disjoint(contents: Sequence[Sequence[Contents]]) -> None:
    seen: dict[int, Contents] = {}
    for one in (one for of_segment in contents for one in of_segment):
        other = seen.setdefault(id(one.parameter), one)
        if other is not one:
            raise ValueError(f"{other.name} and {one.name} of two segments are one parameter, so they cannot move")


def _elements_per_unit(one: Contents) -> int:
    """Elements that belong to one unit."""
    shape, where = one.parameter.shape, one.unit_tensor
    others = [size for dim, size in enumerate(shape) if dim != where.dim]
    return int(np.prod(others, dtype=np.int64)) * where.num_blocks * where.rows


def _places(owned: OwnershipMap, rank: int, units: Indices) -> Indices:
    """Where ``units`` lie on ``rank``."""
    return np.searchsorted(owned.units_of(rank), units)


def _aligned(num_bytes: int) -> int:
    """Where another message may begin, whatever the dtype of its elements."""
    return -(-num_bytes // 16) * 16
