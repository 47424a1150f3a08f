"""What travels in a switch, such as weights, or gradients that are added where they arrive, as parcels.

All that is added to one element comes in one round, so that it is added in one order wherever it is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeroresize.plan.layout import Indices
from zeroresize.policy.strategy.switches.transfers import SliceTransfers
from zeroresize.resharding.parcels import End, Pair, Parcel, RankRounds
from zeroresize.resharding.transport import Transport
from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.placement.whole_layers import WholeTensor
from zeroresize.utils.hashing import digest


@dataclass(frozen=True, eq=False)
class Flow:
    """Describes one kind of content that travels.

    Attributes:
        transfers: between different ranks.
        dtypes: of the elements as they travel, by the number of the tensor; other tensors do not travel.
        kept: what stays on its rank, and is added there in its turn; None for nothing.
        turn: a flow of a later turn takes along what those of earlier ones have added.
    """

    transfers: SliceTransfers
    dtypes: Mapping[int, torch.dtype]
    kept: SliceTransfers | None = None
    turn: int = 0


@dataclass(frozen=True)
class FlowEnds:
    """Tells where a flow begins and ends on this rank: stacks [pre, units, inner] by the tensor's number.

    Attributes:
        sources: what is sent; None stands for zeros.
        targets: what is filled.
        source_begins, target_begins: [P], the first unit that this rank holds of each tensor.
        adds: whether what comes is added to what is there.
    """

    sources: Mapping[int, Tensor | None]
    targets: Mapping[int, Tensor]
    source_begins: Indices
    target_begins: Indices
    adds: bool = False


@dataclass(frozen=True, eq=False)
class FlowRounds:
    """Holds all rounds of flows that travel together, planned once.

    Attributes:
        slices: of each parcel, as (flow, tensor, first unit).
        fingerprint: the same on ranks with the same plan.
    """

    rounds: RankRounds
    slices: Sequence[tuple[int, int, int]]
    fingerprint: str

    @classmethod
    def of(
        cls, flows: Sequence[Flow], tensors: Sequence[WholeTensor], rank: int, order: Sequence[int], max_bytes: int
    ) -> FlowRounds:
        """Plan the rounds of a rank.

        Args:
            order: [R]: what comes from ranks of smaller numbers is put in place first.
            max_bytes: that a rank sends and receives at once; a single unit may be larger.
        """
        parcels, slices = [], []
        for number, flow in enumerate(flows):
            routes: dict[tuple[int, int, int], list[Pair]] = {}
            for transfers in (flow.transfers, flow.kept or ()):
                for tensor, begin, end, *pair in transfers:
                    if tensor in flow.dtypes:
                        routes.setdefault((tensor, begin, end), []).append((pair[0], pair[1]))
            for (tensor, begin, end), pairs in routes.items():
                shape, num_units = tensors[tensor].spec.shape, tensors[tensor].spec.num_units
                if tensors[tensor].spec.division is None:  # a unit for every element
                    end = num_units = math.prod(shape)
                unit_elements = math.prod(shape) // max(num_units, 1)
                parcels.append(Parcel(tuple(pairs), end - begin, unit_elements, flow.dtypes[tensor], flow.turn))
                slices.append((number, tensor, begin))
        lists = [transfers for flow in flows for transfers in (flow.transfers, flow.kept) if transfers is not None]
        columns = [column for each in lists for column in (each.tensors, each.begins, each.ends)]
        columns += [column for each in lists for column in (each.sources, each.destinations)]
        fingerprint = digest(*(np.ascontiguousarray(column).tobytes() for column in columns)).hex()
        return cls(RankRounds.of(parcels, rank, max_bytes, order), slices, fingerprint)

    def carry_out(self, transport: Transport, ends: Sequence[FlowEnds]) -> Exception | None:
        """Send and receive all rounds, given the ends of each flow, and return the first failure."""

        def source_of(parcel: int) -> End:
            flow, tensor, begin = self.slices[parcel]
            return End(ends[flow].sources[tensor], begin - int(ends[flow].source_begins[tensor]))

        def target_of(parcel: int) -> End:
            flow, tensor, begin = self.slices[parcel]
            return End(ends[flow].targets[tensor], begin - int(ends[flow].target_begins[tensor]), ends[flow].adds)

        return transport.carry_out(source_of, target_of)


class Relocation:
    """Changes the layout of one kind of tensors, such as weights, on this rank; what is there stays as it is.

    Args:
        held: by the number of the tensor, under the strategy before. Of another type than is wanted, just what this
            rank sends or keeps is cast.
        dtypes: of what is wanted under the strategy after, by the number of the tensor.

    Attributes:
        new_bytes: of what :meth:`allocate` makes: tensors of which the rank holds the same part after stay the same.
    """

    def __init__(
        self,
        before: Placement,
        after: Placement,
        tensors: Sequence[WholeTensor],
        rank: int,
        held: Mapping[int, Tensor],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        self._before, self._after, self._tensors, self._rank, self._held = before, after, tensors, rank, held
        self._same = {
            number: held[number]
            for number in dtypes
            if number in held
            and held[number].dtype == dtypes[number]
            and before.layout.units_of(number, rank) == after.layout.units_of(number, rank)
        }
        self._made = {number: dtype for number, dtype in dtypes.items() if number not in self._same}
        self._new: dict[int, Tensor] = {}
        self.new_bytes = sum(after.parameters[number].numel() * dtype.itemsize for number, dtype in self._made.items())

    @property
    def tensors(self) -> dict[int, Tensor]:
        """Return the tensors under the strategy after, by the number of the tensor."""
        return self._same | self._new

    def allocate(self, device: torch.device) -> None:
        """Make the new tensors."""
        for number, dtype in self._made.items():
            self._new[number] = torch.empty(self._after.parameters[number].shape, dtype=dtype, device=device)

    def ends(self) -> FlowEnds:
        """Return where the flow begins and ends; what this rank has of its new tensors already is copied now."""
        rank, before, after = self._rank, self._before, self._after
        sources: dict[int, Tensor | None] = {
            number: stack_of(before, number, self._tensors, tensor, rank) for number, tensor in self._held.items()
        }
        targets = {number: stack_of(after, number, self._tensors, one, rank) for number, one in self._new.items()}
        for number, target in targets.items():
            old, new = (placement.layout.units_of(number, rank) for placement in (before, after))
            source = sources.get(number)
            if source is not None and self._tensors[number].spec.division is None:
                target.copy_(source)
                continue
            begin, end = max(old.start, new.start), min(old.stop, new.stop)
            if source is not None and begin < end:
                kept = source.narrow(1, begin - old.start, end - begin)
                target.narrow(1, begin - new.start, end - begin).copy_(kept)
        return FlowEnds(sources, targets, before.layout.begins[:, rank], after.layout.begins[:, rank])


def stack_of(placement: Placement, number: int, tensors: Sequence[WholeTensor], data: Tensor, rank: int) -> Tensor:
    """View a contiguous tensor of a parameter's shape as [pre, units, inner]."""
    return placement.stack(number, tensors[number], data, rank).flatten(0, 1)
