"""What travels when strategies change, such as weights, or gradients that are added where they arrive, as parcels.

All that is added to one element comes in one round, so that it is added in one order wherever it is added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zeroresize.plan.transfers import SliceTransfers
from zeroresize.resharding.parcels import End, Pair, Parcel, RankRounds, copy_units
from zeroresize.resharding.transaction import Transaction
from zeroresize.strategy.placement.placement import Placement
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
        before, after: the placements that hold them.
        adds: whether what comes is added to what is there.
    """

    sources: Mapping[int, Tensor | None]
    targets: Mapping[int, Tensor]
    before: Placement
    after: Placement
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
    def of(cls, flows: Sequence[Flow], before: Placement, max_bytes: int) -> FlowRounds:
        """Plan this rank's rounds from a placement; what comes from replicas of smaller numbers is put in place first.

        So partial gradients are added in one order, and on ranks that hold the same the sums are the same bits.
        """
        parcels, slices = [], []
        for number, flow in enumerate(flows):
            routes: dict[tuple[int, int, int], list[Pair]] = {}
            for transfers in (flow.transfers, flow.kept or ()):
                for tensor, begin, end, *pair in transfers:
                    if tensor in flow.dtypes:
                        routes.setdefault((tensor, begin, end), []).append((pair[0], pair[1]))
            for (tensor, begin, end), pairs in routes.items():
                spec = before.tensors[tensor].spec
                num_elements, num_units = math.prod(spec.shape), spec.num_units
                if spec.division is None:  # a unit for every element
                    end = num_units = num_elements
                unit_elements = num_elements // max(num_units, 1)
                parcels.append(Parcel(tuple(pairs), end - begin, unit_elements, flow.dtypes[tensor], flow.turn))
                slices.append((number, tensor, begin))
        lists = [transfers for flow in flows for transfers in (flow.transfers, flow.kept) if transfers is not None]
        columns = [np.ascontiguousarray(column).tobytes() for transfers in lists for column in transfers.columns]
        rounds = RankRounds.of(parcels, before.rank, max_bytes, before.layout.replicas.tolist())
        return cls(rounds, slices, digest(*columns).hex())


class Relocation:
    """Changes the layout of one kind of tensors, such as weights, on this rank; what is there stays as it is.

    Args:
        held: by the number of the tensor, under the strategy before. Of another type than is wanted, just what this
            rank sends or keeps is cast.
        dtypes: of what is wanted under the strategy after, by the number of the tensor.

    Attributes:
        tensors: under the strategy after, by the number of the tensor, once they are made. Those of which the rank
            holds the same part before and after stay the same.
        new_bytes: of what :meth:`make_tensors` makes.
    """

    def __init__(
        self,
        before: Placement,
        after: Placement,
        held: Mapping[int, Tensor],
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        self._before, self._after, self._held = before, after, held
        self.tensors = {
            number: held[number]
            for number, dtype in dtypes.items()
            if number in held and held[number].dtype == dtype and before.units_of(number) == after.units_of(number)
        }
        self._made = {number: dtype for number, dtype in dtypes.items() if number not in self.tensors}
        self.new_bytes = sum(after.parameters[number].numel() * dtype.itemsize for number, dtype in self._made.items())

    def make_tensors(self, device: torch.device) -> None:
        """Make the new tensors."""
        for number, dtype in self._made.items():
            self.tensors[number] = torch.empty(self._after.parameters[number].shape, dtype=dtype, device=device)

    def ends(self) -> FlowEnds:
        """Return where the flow begins and ends; what this rank has of its new tensors already is copied now."""
        before, after = self._before, self._after
        sources: dict[int, Tensor | None] = {number: before.stack(number, held) for number, held in self._held.items()}
        targets = {number: after.stack(number, self.tensors[number]) for number in self._made}
        for number, target in targets.items():
            old, new, source = before.units_of(number), after.units_of(number), sources.get(number)
            if source is None:
                continue
            begin, end = max(old.start, new.start), min(old.stop, new.stop)
            if before.tensors[number].spec.division is None:  # a unit for every element
                begin, end = old.start, old.start + target.shape[1]
            if begin < end:
                copy_units(target, begin - new.start, source, begin - old.start, end - begin)
        return FlowEnds(sources, targets, before, after)


class FlowMove(Transaction):
    """Moves what ranks hold under strategies by ``flows``, of which the first ones are those of ``relocations``."""

    flows: FlowRounds
    relocations: Sequence[Relocation] = ()

    def make_tensors(self) -> None:
        for relocation in self.relocations:
            relocation.make_tensors(self._device)

    def ends(self) -> list[FlowEnds]:
        """Return where each flow begins and ends; what this rank has already of what it makes is copied now."""
        return [relocation.ends() for relocation in self.relocations]

    def send_and_receive(self) -> Exception | None:
        self._ends = self.ends()
        return super().send_and_receive()

    def source_of(self, parcel: int) -> End:
        flow, tensor, begin = self.flows.slices[parcel]
        ends = self._ends[flow]
        return End(ends.sources[tensor], begin - int(ends.before.begins[tensor]))

    def target_of(self, parcel: int) -> End:
        flow, tensor, begin = self.flows.slices[parcel]
        ends = self._ends[flow]
        return End(ends.targets[tensor], begin - int(ends.after.begins[tensor]), ends.adds)
