"""Each rank has a part in a move of units: it holds, sends, receives and puts in place some of them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from zeroresize.comm.collectives import group_rank, group_size, message_device
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.dtensor_guards import guard_dtensors
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.plan.ownership import Indices, OwnershipMap, transfer_plan
from zeroresize.resharding.data_parallel import drop_reducers, rebuild_reducers, require_rebuildable
from zeroresize.resharding.parameter_state import (
    GRADIENTS,
    Description,
    agreed_descriptions,
    descriptions_from_json,
    descriptions_to_json,
    dtype_of,
)
from zeroresize.resharding.parcels import End, Parcel, RankRounds, copy_units
from zeroresize.resharding.transaction import Transaction
from zeroresize.resharding.transport import Transport
from zeroresize.resharding.units.unit_contents import UnitContents, contents_of, layers_of
from zeroresize.utils.hashing import fingerprint

#: Of the messages of a rank in a round, unless less is allowed: these stay in a processor's cache.
_ROUND_BYTES = 8 * 2**20


class UnitMove(Transaction):
    """Moves units between ranks, as seen by this rank.

    Attributes:
        moving: the segments whose units change hands, each as (segment, before, after).
        num_units: of every kind that moves, how many change owners in the whole group.

    Raises:
        ValueError: for a target that does not fit its segment, and for what cannot move.
    """

    plan_name = "the segments, their owners or the targets that they were given"
    memory_name = "new tensors of units that move"
    title = "a move of units"

    def __init__(
        self,
        segments: Sequence[OwnedSegment],
        targets: Mapping[str, OwnershipMap],
        process_group: ProcessGroup,
        optimizer: object | None,
        data_parallel: Sequence[DistributedDataParallel],
        max_bytes: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._group, self._rank, self._max_bytes = process_group, group_rank(process_group), max_bytes
        known = {segment.name for segment in segments}
        unknown = sorted(targets.keys() - known)
        if unknown:
            raise ValueError(f"targets are given for {unknown}, which are no segments: there are {sorted(known)}")
        require_rebuildable(data_parallel)
        self._wrappers = data_parallel
        self.moving: list[tuple[OwnedSegment, OwnershipMap, OwnershipMap]] = []
        for segment in segments:
            after = targets.get(segment.name, segment.owned)
            _require_fitting(segment, after, group_size(process_group))
            if after != segment.owned:
                self.moving.append((segment, segment.owned, after))
        self._plans = [transfer_plan(before, after) for _, before, after in self.moving]
        self._contents = [contents_of(segment, optimizer, self._rank) for segment, *_ in self.moving]
        _require_disjoint(self._contents)
        self.num_units: dict[str, int] = {}
        for (segment, *_), plan in zip(self.moving, self._plans, strict=True):
            self.num_units.setdefault(segment.kind, 0)
            self.num_units[segment.kind] += sum(map(len, plan.values()))
        self._descriptions = [one.description for of_segment in self._contents for one in of_segment]
        self.plan = fingerprint(self._what_moves())
        self.state = fingerprint(descriptions_to_json(self._descriptions, with_units=False))

    def needs_descriptions(self, states: Sequence[float]) -> bool:
        return len(set(states)) > 1

    def describe(self) -> str:
        return descriptions_to_json(self._descriptions, with_units=True)

    def agree(self, descriptions: Iterable[str] | None) -> None:
        agreed = iter(
            self._descriptions
            if descriptions is None
            else agreed_descriptions([descriptions_from_json(text) for text in descriptions])
        )
        self._agreed = [[next(agreed) for _ in of_segment] for of_segment in self._contents]
        self._takes_part = [any(self._rank in pair for pair in plan) for plan in self._plans]
        self.new_bytes = 0
        parcels: list[Parcel] = []
        #: The tensor and the places on this rank of each parcel.
        self._travelling: list[tuple[_Part, Indices]] = []
        for number, (_, before, after) in enumerate(self.moving):
            num_new = after.counts[self._rank] if self._takes_part[number] else 0
            places = {
                pair: _places(before if pair[0] == self._rank else after, self._rank, units)
                for pair, units in self._plans[number].items()
            }
            for index, (contents, agreed_contents) in enumerate(
                zip(self._contents[number], self._agreed[number], strict=True)
            ):
                where = contents.unit_tensor
                self.new_bytes += num_new * bytes_per_unit(contents, agreed_contents)
                for (what, dtype), (part, rows) in itertools.product(
                    sorted(agreed_contents.dtypes.items()), enumerate(where.rows)
                ):
                    num_elements = where.elements_of_unit * rows // sum(where.rows)
                    for pair, units in self._plans[number].items():
                        parcels.append(Parcel((pair,), len(units), num_elements, dtype_of(dtype)))
                        self._travelling.append((_Part(number, index, what, part), places[pair]))
        max_bytes = min(self._max_bytes, 2 * _ROUND_BYTES)
        self.transport = Transport(RankRounds.of(parcels, self._rank, max_bytes), self._group)

    def allocate(self) -> None:
        self.transport.allocate(message_device(self._group, self._device))
        self._new: list[list[dict[str, Tensor]]] = [[] for _ in self.moving]
        #: What this rank holds, None for zeros, and what it will hold.
        self._stacks: dict[_Part, tuple[Tensor | None, Tensor]] = {}
        for number, (_, before, after) in enumerate(self.moving):
            num_old, num_new = before.counts[self._rank], after.counts[self._rank]
            for index, contents in enumerate(self._contents[number] if self._takes_part[number] else ()):
                where, shape = contents.unit_tensor, list(contents.parameter.shape)
                shape[where.dim] = num_new * sum(where.rows)
                new = {
                    what: torch.empty(shape, dtype=dtype_of(dtype), device=contents.state.device_of(what))
                    for what, dtype in sorted(self._agreed[number][index].dtypes.items())
                }
                self._new[number].append(new)
                for what, tensor in new.items():
                    old, new_stacks = contents.state.tensors.get(what), _stacks(tensor, where, num_new)
                    old_stacks = [None] * len(new_stacks) if old is None else _stacks(old, where, num_old)
                    for part, both in enumerate(zip(old_stacks, new_stacks, strict=True)):
                        self._stacks[_Part(number, index, what, part)] = both

    def send_and_receive(self) -> Exception | None:
        return self.transport.carry_out(
            lambda parcel: self._end_of(parcel, 0), lambda parcel: self._end_of(parcel, 1), meanwhile=self._copy_kept
        )

    def commit(self) -> None:
        """Put the new tensors in place of the old ones, which then take no memory; only ``on_change`` could fail."""
        if not self.num_units:
            return
        drop_reducers(self._wrappers)
        self._install()
        rebuild_reducers(self._wrappers)
        for segment, *_ in self.moving:
            segment.follow(self._rank)

    def _install(self) -> None:
        self._stacks.clear()
        for (segment, _, after), of_segment, of_new, of_agreed in zip(
            self.moving, self._contents, self._new, self._agreed, strict=True
        ):
            for contents, new, agreed in zip(of_segment, of_new, of_agreed, strict=False):
                contents.state.install(new, agreed)
                contents.state.forget()
            segment.owned = after
            for contents in of_segment:
                refused = getattr(contents.unit_tensor.owner, "refused_at_home", ())
                guard_dtensors(contents.state.installed, are_away=not after.is_even, refused=refused)
            for layer in layers_of(segment):
                if isinstance(layer, BalancedLinear):  # what was decided and remembered is of other columns
                    layer.plan = None
                    layer.last = None if layer.last is None else LastGradients()

    def _end_of(self, parcel: int, end: int) -> End:
        """Where a parcel is sent from, or with ``end`` 1 put."""
        tensor, places = self._travelling[parcel]
        return End(self._stacks[tensor][end], places)

    def _copy_kept(self) -> None:
        """Units that stay, into the new tensors, while the first messages are on their way."""
        for number, (_, before, after) in enumerate(self.moving):
            kept = np.flatnonzero((before.owners == self._rank) & (after.owners == self._rank))
            of, at = (_places(owned, self._rank, kept) for owned in (before, after))
            for old, new in (both for part, both in self._stacks.items() if part.segment == number):
                if old is None:
                    new.zero_()
                else:
                    copy_units(new, at, old, of, len(kept))

    def _what_moves(self) -> str:
        """Everything that must be the same on all ranks, but for what the parameters hold besides themselves."""
        plan = [
            [
                segment.name,
                before.owners.tobytes().hex(),
                after.owners.tobytes().hex(),
                [
                    [
                        contents.name,
                        contents.unit_tensor.dim,
                        contents.unit_tensor.rows,
                        contents.unit_tensor.elements_of_unit,
                        contents.state.stepped is not None,
                        str(contents.parameter.dtype),
                    ]
                    for contents in of_segment
                ],
            ]
            for (segment, before, after), of_segment in zip(self.moving, self._contents, strict=True)
        ]
        return json.dumps([self._max_bytes, plan])


class _Part(NamedTuple):
    """One part of a tensor of a moving segment: of which of its parameters, and which of that one's tensors."""

    segment: int
    contents: int
    what: str
    part: int


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
    if not after.is_even and segment.why_even is not None and (reason := segment.why_even()) is not None:
        raise ValueError(f"the {segment.kind} of {segment.name} must stay evenly divided: {reason}")


def _require_disjoint(by_segment: Sequence[Sequence[UnitContents]]) -> None:
    seen: dict[int, UnitContents] = {}
    for contents in itertools.chain.from_iterable(by_segment):
        other = seen.setdefault(id(contents.parameter), contents)
        if other is not contents:
            raise ValueError(f"{other.name} and {contents.name} of two segments are one parameter, so they cannot move")


def bytes_per_unit(contents: UnitContents, description: Description, *, with_gradients: bool = True) -> int:
    """Return the bytes of one unit in all tensors that are described.

    Args:
        contents: the parameter that holds the unit.
        description: of the tensors that count.
        with_gradients: whether gradients count, too.
    """
    sizes = [
        dtype_of(dtype).itemsize
        for what, dtype in description.dtypes.items()
        if with_gradients or what not in GRADIENTS
    ]
    return contents.unit_tensor.elements_of_unit * sum(sizes)


def _places(owned: OwnershipMap, rank: int, units: Indices) -> Indices:
    """Where ``units`` lie on ``rank``."""
    return np.searchsorted(owned.units_of(rank), units)


def _stacks(tensor: Tensor, where: UnitTensor, num_units: int) -> list[Tensor]:
    """The stack [pre, units, inner] of every part of a tensor; views of it if it is contiguous."""
    pre, post = math.prod(tensor.shape[: where.dim]), math.prod(tensor.shape[where.dim + 1 :])
    parts = tensor.reshape(pre, tensor.shape[where.dim], post).split([num_units * rows for rows in where.rows], dim=1)
    return [part.unflatten(1, (num_units, rows)).flatten(2) for part, rows in zip(parts, where.rows, strict=True)]
