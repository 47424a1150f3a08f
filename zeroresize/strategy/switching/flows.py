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
from zeroresize.strategy.placement.whole_layers import WholeTensor
from zeroresize.utils.fingerprint import digest


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
