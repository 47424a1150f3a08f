"""Units of segments move from one ownership to another inside a tensor-parallel group, all or nothing."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_size, require_group
from zeroresize.comm.exchange import Meet
from zeroresize.integrations.replicas import Reducer, WholeOptimizer
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.functional import LastGradients
from zeroresize.layers.local_parts import guard_dtensors, local_of, why_not_plain
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.layers.weight_checks import is_sharded_in
from zeroresize.optim.optimizers import stepped_tensors, torch_optimizer
from zeroresize.plan.layout import Layout
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.plan.transfers import transfers
from zeroresize.resharding.agreement import CannotMoveError, agreed, meet_over
from zeroresize.resharding.data_parallel import gathered, reducers_of, require_rebuildable, sharded_optimizer
from zeroresize.resharding.fully_sharded import FullySharded, fully_sharded_in
from zeroresize.resharding.parameter_state import (
    GRADIENTS,
    Description,
    ParameterState,
    agreed_descriptions,
    why_of_fixed_size,
)
from zeroresize.resharding.parcels import End, Pair, Parcel, RankRounds, copy_units
from zeroresize.resharding.transaction import MoveReport, Participants, Transaction, run_transaction
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.torch_state import fingerprint_of_bits

#: Of the messages of a rank in a round, unless less is allowed: these stay in a processor's cache.
_ROUND_BYTES = 8 * 2**20


def move_units(
    segments: Sequence[OwnedSegment],
    targets: Mapping[str, OwnershipMap],
    *,
    process_group: ProcessGroup,
    optimizer: object | None,
    meet: Meet | None = None,
    model: nn.Module | None = None,
    sharded: Mapping[int, FullySharded] | None = None,
    max_bytes: int = 64 * 2**20,
) -> MoveReport:
    """Give every unit to the rank that owns it in ``targets``; collective, between an optimizer's step and a forward.

    With a unit travel its rows of every parameter of the segment, of the master weights, of all optimizer state of the
    parameter's shape, and of gradients where there are some, bit for bit. Other optimizer state, such as the number of
    steps, must be the same on all ranks that have units; a rank that had none takes it over. Parameters, master weights
    and state dictionaries stay the objects that they are, with their hooks, also those on gradient accumulators.

    All or nothing, as :func:`~zeroresize.resharding.transaction.run_transaction` has it. Until all is received the new
    tensors of all segments are held beside the old ones: to hold less, move one segment after the other.

    Args:
        segments: the same on every rank; those without a target stay.
        targets: by the segment's name.
        process_group: of the ranks that the maps count.
        optimizer: the only one that steps these parameters, or a host's wrapper of it; None for none. One that is
            sharded over replicas (:class:`~zeroresize.integrations.replicas.ShardedOptimizer`) is gathered on the CPU
            meanwhile.
        meet: exchanges numbers in the group, or in all replicas, which then move alike; None to do so over
            ``process_group``.
        model: that holds these parameters. Reducers of DistributedDataParallel, torch's or Megatron-Core's, in it and
            around it are built anew, and what ``fully_shard`` holds shards of is gathered and sharded anew; replicas
            must move alike before the next step. None if no parameter is in either.
        sharded: those that ``fully_shard`` holds shards of, if they are known already; None to look for them.
        max_bytes: of messages that this rank sends and receives at once; a unit that is larger travels alone.

    Raises:
        ValueError: for a target that does not fit its segment, or what cannot move; other ranks raise a RuntimeError.
        NotEnoughMemoryError, RuntimeError: as run_transaction.
    """
    begin = time.perf_counter()
    process_group = require_group(process_group)
    device = next((tensor.parameter.device for segment in segments for tensor in segment.tensors), torch.device("cpu"))
    reducers = [] if model is None else reducers_of(model)
    meet = meet or meet_over(process_group, device)
    if (in_parts := sharded_optimizer(optimizer)) is not None:
        optimizer = gathered(in_parts, meet)
    if sharded is None:
        sharded = {} if model is None else fully_sharded_in(model, reshard=True)
    leaving = {segment.name for segment in segments if not targets.get(segment.name, segment.owned).is_home}
    _require_same_replicated(segments, leaving, optimizer, group_size(process_group), meet)
    move = run_transaction(
        lambda: UnitMove(segments, targets, process_group, optimizer, reducers, max_bytes, device, sharded),
        Participants(process_group, device, meet),
    )
    return MoveReport(**move.figures(begin))


def _require_same_replicated(
    segments: Sequence[OwnedSegment], leaving: Collection[str], optimizer: object | None, num_ranks: int, meet: Meet
) -> None:
    """Let units stay where ranks hold different parameters that serve all of them, or step them by other state."""
    places = {name: (owner, attribute) for segment in segments for owner, attribute, name in segment.replicated}
    if not places:
        return
    leave = {name for segment in segments if segment.name in leaving for *_, name in segment.replicated}
    what = fingerprint(json.dumps([*places, *sorted(leave)]))

    def prints() -> list[float]:
        held = {name: getattr(owner, attribute) for name, (owner, attribute) in places.items()}
        stepped = {} if optimizer is None else stepped_tensors(optimizer, held)
        states = {} if optimizer is None else torch_optimizer(optimizer).state
        kept = {name: states.get(stepped[name], {}).items() if name in stepped else () for name in held}
        numbers = [what]
        for name, parameter in held.items():
            state = [value for _, value in sorted(kept[name]) if isinstance(value, Tensor)]
            tensors = (parameter, stepped.get(name, parameter), *state)
            numbers.append(fingerprint(json.dumps([fingerprint_of_bits(local_of(each)) for each in tensors])))
        return numbers

    _, table = agreed(meet, prints, list, what="parameters that serve all units", moves=True)
    if len({number for number, *_ in table}) > 1:  # ranks were told to do different things, which is told below
        return
    for name, of_ranks in zip(places, [*zip(*table, strict=True)][1:], strict=True):
        for begin in range(0, len(of_ranks) * (name in leave), num_ranks):  # replicas may hold shards of it
            if len(set(of_ranks[begin : begin + num_ranks])) > 1:
                raise CannotMoveError(
                    f"nothing has changed: {name}, which serves all units, is not the same on all ranks: what of it "
                    "each rank learns, or measures, must be summed over them"
                )


def bytes_of_units(
    segments: Sequence[OwnedSegment],
    optimizer: object | None,
    rank: int = 0,
    sharded: Mapping[int, FullySharded] = MappingProxyType({}),
) -> int:
    """Return the bytes that a rank sends if it gives away all units it has at even shares, without gradients.

    Optimizer state counts once there is some.
    """
    total, in_parts = 0, sharded_optimizer(optimizer)
    for segment in segments:
        for contents in contents_of(segment, None if in_parts is not None else optimizer, rank, sharded):
            of_unit = contents.bytes_per_unit(contents.description, with_gradients=False)
            if in_parts is not None:
                of_unit += contents.unit_tensor.elements_of_unit * in_parts.bytes_of_element(contents.parameter)
            num_units = len(segment.owned.owners) // contents.unit_tensor.block
            total += num_units * of_unit // segment.owned.num_ranks
    return total


class UnitContents:
    """Holds a parameter of units, with all that belongs to it on this rank.

    Attributes:
        unit_tensor: where the parameter is.
        sharding: what gathers it where data-parallel ranks hold shards of it; else None.
        state: the parameter with its gradient and optimizer state; of shards, this rank's.
        description: of all that, for the other ranks.
    """

    def __init__(
        self,
        unit_tensor: UnitTensor,
        num_units: int,
        stepped: Tensor | None,
        optimizer: torch.optim.Optimizer | None,
        sharding: FullySharded | None = None,
    ) -> None:
        self.unit_tensor, self.sharding, name = unit_tensor, sharding, unit_tensor.name
        self.parameter = unit_tensor.parameter if sharding is None else sharding.parameter
        dim, shape, size = unit_tensor.dim, local_of(self.parameter).shape, num_units * sum(unit_tensor.rows)
        if (reason := why_sharded_for_good(unit_tensor, sharding)) is not None:
            raise ValueError(f"{reason}, so its units cannot move")
        if sharding is not None:
            if stepped is not None and stepped is not self.parameter:
                raise ValueError(f"{name}: fully_shard has sharded it, and the optimizer steps a copy of it")
            shape = sharding.shape
        if dim >= len(shape) or shape[dim] != size:
            raise ValueError(
                f"{name}: its shape is {tuple(shape)}, but dimension {dim} must be {size}: "
                f"{num_units} units of {' + '.join(map(str, unit_tensor.rows))} rows"
            )
        if not self.parameter.is_leaf:
            raise ValueError(f"{name}: it is computed from other tensors (is_leaf is False), so its units cannot move")
        self.state = ParameterState(name, self.parameter, stepped, optimizer)
        self.description = self.state.description(num_units)

    def bytes_per_unit(self, description: Description, *, with_gradients: bool = True) -> int:
        """Return the bytes of one unit in all tensors that are described."""
        kinds = (what for what in description.dtypes if with_gradients or what not in GRADIENTS)
        return self.unit_tensor.elements_of_unit * sum(description.dtype(what).itemsize for what in kinds)

    def guard(self, *, are_away: bool) -> None:
        """Let DTensors that hold units of several ranks, or of other ranks than hosts know, not be gathered."""
        if self.sharding is not None and not getattr(self.unit_tensor.owner, "has_dtensors", False):
            return  # they are over replicas only
        refused = getattr(self.unit_tensor.owner, "refused_at_home", ())
        guard_dtensors(self.state.installed, are_away=are_away, refused=refused)


def why_sharded_for_good(unit_tensor: UnitTensor, sharding: FullySharded | None) -> str | None:
    """Tell why a parameter of which this rank holds a shard cannot be gathered and sharded anew; None if it can."""
    if (made_of_others := why_not_plain(unit_tensor.parameter)) is not None:
        return f"{unit_tensor.name} is {made_of_others}"
    if not is_sharded_in(unit_tensor.owner, unit_tensor.parameter):
        return None
    why = "of a module that the model given does not hold" if sharding is None else sharding.why_fixed
    if sharding is not None and why is None:
        return None
    how = (
        ""
        if sharding is not None and sharding.is_whole
        else ", of which this rank holds a shard only, as with fully_shard"
    )
    return f"{unit_tensor.name} is a DTensor{how} {why}"


def contents_of(
    segment: OwnedSegment, optimizer: Any, rank: int, sharded: Mapping[int, FullySharded] = MappingProxyType({})
) -> list[UnitContents]:
    """Return what ``rank``, this one, holds of a segment; a parameter that is there twice counts once."""
    unit_tensors: dict[int, UnitTensor] = {}
    for tensor in segment.tensors:
        known = unit_tensors.setdefault(id(tensor.parameter), tensor)
        if (known.dim, known.rows, known.block) != (tensor.dim, tensor.rows, tensor.block):
            raise ValueError(f"{tensor.name} and {known.name} are one parameter, but hold different units")
    stepped: Mapping[str, Tensor] = {}
    inner = None
    if optimizer is not None:
        inner = torch_optimizer(optimizer)
        known_as = {key: each.parameter for key, each in sharded.items()}
        stepped = stepped_tensors(
            optimizer, {tensor.name: known_as.get(key, tensor.parameter) for key, tensor in unit_tensors.items()}
        )
    return [
        UnitContents(
            tensor,
            len(tensor.held(segment.owned, rank)),
            stepped.get(tensor.name),
            inner,
            sharded.get(id(tensor.parameter)),
        )
        for tensor in unit_tensors.values()
    ]


class _Route:
    """Which units of a segment, or blocks of them, change hands, and where they lie on this rank before and after.

    A block travels to whoever gets its first unit, and stays with those who keep one.

    Attributes:
        pairs: the units that travel, ascending, by (sender, receiver).
        places: of those that this rank sends or receives, by pair.
        num_before, num_after: units that this rank has.
        changes: whether anything changes on this rank.
        of_gradients: the route of their gradients, of which the first of the ranks that hold a block has the sum.
    """

    def __init__(
        self, before: OwnershipMap, after: OwnershipMap, rank: int, block: int = 1, *, are_gradients: bool = False
    ) -> None:
        maps = before, after
        held = [owned.units_of(rank) if block == 1 else owned.blocks_of(rank, block) for owned in maps]
        carried = held
        if block == 1:
            here, there = (Layout.of_owners(owned.owners, owned.num_ranks) for owned in maps)
        else:
            of_rank = OwnershipMap.first_blocks_of if are_gradients else OwnershipMap.blocks_of
            by_rank = [[of_rank(owned, each, block) for each in range(owned.num_ranks)] for owned in maps]
            here, there = map(Layout.of_holders, by_rank)
            carried = [units[rank] for units in by_rank]
        self.pairs = transfers(here, there).units_by_pair()
        self.places = {
            pair: np.searchsorted(held[pair[0] != rank], units) for pair, units in self.pairs.items() if rank in pair
        }
        self.is_home = after.is_home
        self.num_before, self.num_after = map(len, held)
        kept = np.intersect1d(carried[0], carried[1], assume_unique=True)
        self._kept_of, self._kept_at = (np.searchsorted(units, kept) for units in held)
        is_same = block == 1 or are_gradients
        self.of_gradients = self if is_same else _Route(before, after, rank, block, are_gradients=True)
        self.changes = bool(self.places or self.of_gradients.places) or self.num_before != self.num_after

    def copy_kept(self, old: Tensor | None, new: Tensor) -> None:
        """Copy the units that stay from one stack into the other; None stands for zeros."""
        if old is None:
            new.zero_()
        else:
            copy_units(new, self._kept_at, old, self._kept_of, len(self._kept_of))


class _MovingParameter:
    """A parameter whose units change hands, with what belongs to it on this rank.

    Attributes:
        agreed: what travels of it, once all ranks have told what they hold.
        stacks: of each tensor, by (what it is, part): the old one, None for zeros, and the new one.
    """

    agreed: Description

    def __init__(self, contents: UnitContents, route: _Route) -> None:
        self.contents, self.route = contents, route
        self._new: dict[str, Tensor] = {}
        self._gathering: dict[str, tuple[Tensor, Tensor]] = {}
        self._put: Callable[[], None] | None = None
        self.stacks: dict[tuple[str, int], tuple[Tensor | None, Tensor]] = {}

    @property
    def plan(self) -> list[Any]:
        """What must be alike on all ranks."""
        unit, is_stepped = self.contents.unit_tensor, self.contents.state.stepped is not None
        shape = unit.name, unit.dim, unit.rows, unit.block, unit.elements_of_unit
        return [*shape, is_stepped, str(self.contents.parameter.dtype)]

    def route_of(self, what: str) -> _Route:
        """The route of one of its tensors."""
        return self.route.of_gradients if what in GRADIENTS else self.route

    def parcels(self) -> Iterator[tuple[Parcel, tuple[str, int], Pair]]:
        """Yield all that travels, and of which stack it is."""
        where = self.contents.unit_tensor
        for what in sorted(self.agreed.dtypes):
            for part, rows in enumerate(where.rows):
                num_elements = where.elements_of_unit * rows // sum(where.rows)
                for pair, units in self.route_of(what).pairs.items():
                    yield Parcel((pair,), len(units), num_elements, self.agreed.dtype(what)), (what, part), pair

    @property
    def new_bytes(self) -> int:
        """The bytes of the new tensors, and of what is gathered for them."""
        num_units = self.route.num_after
        if self.contents.sharding is not None:  # each as a whole and as parts
            num_units = 2 * (num_units + self.route.num_before)
        return num_units * self.contents.bytes_per_unit(self.agreed) if self.route.changes else 0

    @property
    def num_more(self) -> int:
        """By how many elements the parameter grows here; negative where it shrinks."""
        return (self.route.num_after - self.route.num_before) * self.contents.unit_tensor.elements_of_unit

    def allocate(self) -> None:
        """Make the new tensors."""
        if not self.route.changes:
            return
        where, state, num_after = self.contents.unit_tensor, self.contents.state, self.route.num_after
        shape = list(self.contents.parameter.shape)
        shape[where.dim] = num_after * sum(where.rows)
        if (sharding := self.contents.sharding) is not None:
            self._gathering = {what: sharding.room_for(shard) for what, shard in sorted(state.tensors.items())}
            state.tensors = {what: whole[: sharding.shape[0]] for what, (_, whole) in self._gathering.items()}
        for what in sorted(self.agreed.dtypes):
            make = torch.empty if self.route_of(what) is self.route else torch.zeros
            new = make(shape, dtype=self.agreed.dtype(what), device=state.device_of(what))
            self._new[what] = new
            new_stacks, old = _stacks(new, where, num_after), state.tensors.get(what)
            old_stacks = [None] * len(new_stacks) if old is None else _stacks(old, where, self.route.num_before)
            for part, both in enumerate(zip(old_stacks, new_stacks, strict=True)):
                self.stacks[what, part] = both

    def gather(self) -> list[Exception]:
        """Fill the old tensors where this rank holds shards of them, and return failures; collective over replicas.

        After a failure the others are gathered all the same: ranks that live wait for it.
        """
        errors: list[Exception] = []
        for padded, whole in self._gathering.values():
            assert self.contents.sharding is not None
            try:
                self.contents.sharding.gather(padded, whole)
            except Exception as error:
                errors.append(error)
        self._gathering = {}
        return errors

    def shard(self) -> None:
        """Make this rank's shards of the new tensors where it holds shards only, to which nothing is added any more."""
        if self._new and self.contents.sharding is not None:
            self.stacks.clear()
            self._new, self._put = self.contents.sharding.sharded(self._new)

    def install(self) -> None:
        """Put the new tensors in place of the old ones, which then take no memory."""
        self.stacks.clear()
        if self._new:
            self.contents.state.install(self._new, self.agreed, self._put)
            self.contents.state.forget()
            self._new, self._put = {}, None
        self.contents.guard(are_away=not self.route.is_home)


class UnitMove(Transaction):
    """Moves units between ranks, as seen by this rank."""

    plan_name = "the segments, their owners or the targets that they were given"
    memory_name = "new tensors of units that move"
    title = "a move of units"

    def __init__(
        self,
        segments: Sequence[OwnedSegment],
        targets: Mapping[str, OwnershipMap],
        process_group: ProcessGroup,
        optimizer: object | None,
        reducers: Sequence[Reducer],
        max_bytes: int,
        device: torch.device,
        sharded: Mapping[int, FullySharded] = MappingProxyType({}),
    ) -> None:
        super().__init__(process_group, device)
        self._max_bytes, self._reducers, self._optimizer = max_bytes, reducers, optimizer
        known = {segment.name for segment in segments}
        if unknown := sorted(targets.keys() - known):
            raise ValueError(f"targets are given for {unknown}, which are no segments: there are {sorted(known)}")
        require_rebuildable(reducers)
        made_anew = {id(tensor) for reducer in reducers for tensor in reducer.beside()}
        self._segments: list[tuple[OwnedSegment, OwnershipMap]] = []
        self._parameters: list[_MovingParameter] = []
        routes: dict[tuple[bytes, bytes, int], _Route] = {}  # most segments move alike
        plans = []
        for segment in segments:
            before, after = segment.owned, targets.get(segment.name, segment.owned)
            _require_fitting(segment, after, group_size(process_group))
            if after == before:
                continue
            key = before.owners.tobytes(), after.owners.tobytes()
            moving = []
            for contents in contents_of(segment, optimizer, self._rank, sharded):
                follow = {*made_anew, id(contents.state.stepped)}
                if reason := why_of_fixed_size(contents.unit_tensor.name, contents.parameter, follow):
                    raise ValueError(f"{reason}, so its units cannot move")
                block = contents.unit_tensor.block
                route = routes.get((*key, block)) or _Route(before, after, self._rank, block)
                moving.append(_MovingParameter(contents, routes.setdefault((*key, block), route)))
            self._segments.append((segment, after))
            self._parameters += moving
            plans.append([segment.name, *(owners.hex() for owners in key), [each.plan for each in moving]])
        _require_disjoint(moving.contents for moving in self._parameters)
        self.plan = fingerprint(json.dumps([max_bytes, plans]))

    def describe(self) -> str:
        return json.dumps([asdict(moving.contents.description) for moving in self._parameters])

    def agree(self, descriptions: Iterable[str]) -> None:
        agreed = agreed_descriptions(
            [[Description(**fields) for fields in json.loads(of_rank)] for of_rank in descriptions]
        )
        parcels: list[Parcel] = []
        #: The stack of each parcel, and the route.
        self._travelling: list[tuple[_MovingParameter, tuple[str, int], Pair]] = []
        for moving, description in zip(self._parameters, agreed, strict=True):
            moving.agreed = description
            for parcel, stack, pair in moving.parcels():
                parcels.append(parcel)
                self._travelling.append((moving, stack, pair))
        num_more = sum(moving.num_more for moving in self._parameters)
        self.new_bytes = sum(moving.new_bytes for moving in self._parameters)
        self.new_bytes += sum(reducer.bytes_to_rebuild(num_more) for reducer in self._reducers)
        self.lay_out(RankRounds.of(parcels, self._rank, min(self._max_bytes, 2 * _ROUND_BYTES)))

    def make_tensors(self) -> None:
        for moving in self._parameters:
            moving.allocate()

    def send_and_receive(self) -> Exception | None:
        errors = [error for moving in self._parameters for error in moving.gather()]
        failure = super().send_and_receive() or next(iter(errors), None)
        for moving in self._parameters if failure is None else ():
            moving.shard()
        return failure

    def source_of(self, parcel: int) -> End:
        moving, stack, pair = self._travelling[parcel]
        return End(moving.stacks[stack][0], moving.route_of(stack[0]).places[pair])

    def target_of(self, parcel: int) -> End:
        moving, stack, pair = self._travelling[parcel]
        return End(moving.stacks[stack][1], moving.route_of(stack[0]).places[pair])

    def copy_kept(self) -> None:
        for moving in self._parameters:
            for (what, _), (old, new) in moving.stacks.items():
                moving.route_of(what).copy_kept(old, new)

    def commit(self) -> None:
        """Put the new tensors in place of the old ones; only ``on_change`` could fail."""
        if not self._segments:
            return
        for reducer in self._reducers:
            reducer.drop()  # its hooks hold on to accumulators, which remember shapes
        for moving in self._parameters:
            moving.install()
        for segment, after in self._segments:
            segment.owned = after
            for layer in (tensor.owner for tensor in segment.tensors):
                if isinstance(layer, BalancedLinear):  # what was decided and remembered is of other columns
                    layer.plan = None
                    layer.last = None if layer.last is None else LastGradients()
        for reducer in self._reducers:
            reducer.rebuild()  # no collective: every replica does so before the same step
        if isinstance(self._optimizer, WholeOptimizer):
            self._optimizer.put_back()
        for segment, _ in self._segments:
            segment.follow(self._rank)


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
    if any(count % segment.quantum for count in after.counts) and not after.is_home:
        raise ValueError(f"{segment.name}: ranks own multiples of {segment.quantum} units, found {list(after.counts)}")
    if not after.is_home and segment.why_even is not None and (reason := segment.why_even()) is not None:
        raise ValueError(f"the {segment.kind} of {segment.name} must stay evenly divided: {reason}")


def _require_disjoint(of_segments: Iterable[UnitContents]) -> None:
    seen: dict[int, UnitContents] = {}
    for contents in of_segments:
        other = seen.setdefault(id(contents.parameter), contents)
        if other is not contents:
            names = f"{other.unit_tensor.name} and {contents.unit_tensor.name}"
            raise ValueError(f"{names} of two segments are one parameter, so they cannot move")


def _stacks(tensor: Tensor, where: UnitTensor, num_units: int) -> list[Tensor]:
    """The stack [pre, units, inner] of every part of a tensor; views of it if it is contiguous."""
    pre, post = math.prod(tensor.shape[: where.dim]), math.prod(tensor.shape[where.dim + 1 :])
    parts = tensor.reshape(pre, tensor.shape[where.dim], post).split([num_units * rows for rows in where.rows], dim=1)
    return [part.unflatten(1, (num_units, rows)).flatten(2) for part, rows in zip(parts, where.rows, strict=True)]
