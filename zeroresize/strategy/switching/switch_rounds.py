"""What travels in a switch, in rounds of bounded memory, with one message for each pair of ranks and round.

A round has neighbouring tensors, or a part of a large one: all that is added to one element comes in one round, so
that it is added in one order wherever it is added.

``P`` tensors, ``R`` ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zeroresize.plan.layout import Indices
from zeroresize.policy.strategy.switches.transfers import SliceTransfers
from zeroresize.resharding.transport import Pair
from zeroresize.strategy.placement.whole_layers import WholeTensor
from zeroresize.utils.fingerprint import digest


@dataclass(frozen=True, eq=False)
class Flow:
    """Describes one kind of content that travels, such as weights, or gradients.

    Attributes:
        transfers: between different ranks.
        kept: what stays on its rank, and is added there in its turn; None for nothing.
        itemsizes: [P], bytes of an element; None for those of the parameters.
    """

    transfers: SliceTransfers
    kept: SliceTransfers | None = None
    itemsizes: Indices | None = None

    def only(self, is_wanted: np.ndarray) -> Flow:
        """Return the flow of the wanted tensors alone, of which [P] tells."""

        def of_wanted(transfers: SliceTransfers) -> SliceTransfers:
            return transfers.at(np.flatnonzero(is_wanted[transfers.tensors]))

        return Flow(of_wanted(self.transfers), None if self.kept is None else of_wanted(self.kept), self.itemsizes)


class TensorSlice(NamedTuple):
    """Names units of a tensor; of an undivided one, elements.

    Attributes:
        flow: which of the flows.
    """

    flow: int
    tensor: int
    begin: int
    end: int
    num_bytes: int


@dataclass(frozen=True)
class SwitchRound:
    """Holds a rank's messages of a round.

    Attributes:
        slices: by (sender, receiver): in the order in which what is received is unpacked.
        sizes: bytes of each message, by (sender, receiver); 0 for what stays on its rank.
    """

    slices: Mapping[Pair, Sequence[TensorSlice]]
    sizes: Mapping[Pair, int]


class _Span(NamedTuple):
    """The tensors from ``first`` up to ``last``; of a single one, the units from ``begin`` up to ``end``."""

    first: int
    last: int
    begin: int = 0
    end: int = 2**62


def switch_rounds(
    flows: Sequence[Flow], tensors: Sequence[WholeTensor], rank: int, order: Sequence[int], max_bytes: int
) -> list[SwitchRound]:
    """Lay out the rounds of a rank; all ranks have equally many.

    Args:
        order: [R]: what comes from ranks of smaller numbers is unpacked first.
        max_bytes: that a rank sends and receives in a round; a single unit may be larger.
    """
    spans = _spans(flows, tensors, len(order), max_bytes)
    slices: list[dict[Pair, list[TensorSlice]]] = [{} for _ in spans]
    firsts, lasts = (np.array([getattr(one, key) for one in spans]) for key in ("first", "last"))
    for number, flow in enumerate(flows):
        travelling = flow.transfers.at(
            np.flatnonzero((flow.transfers.sources == rank) | (flow.transfers.destinations == rank))
        )
        kept = [] if flow.kept is None else [flow.kept.at(np.flatnonzero(flow.kept.sources == rank))]
        for transfer in (one for part in (travelling, *kept) for one in part):
            tensor = tensors[transfer.tensor]
            begin, end = transfer.begin, transfer.end
            if tensor.spec.division is None:
                end = math.prod(tensor.spec.shape)
            unit_bytes = _unit_elements(tensor) * _itemsize(flow, transfer.tensor, tensor)
            of_tensor = np.flatnonzero((firsts <= transfer.tensor) & (transfer.tensor < lasts))
            for span in of_tensor.tolist():
                low, high = max(begin, spans[span].begin), min(end, spans[span].end)
                if low < high:
                    pair = transfer.source, transfer.destination
                    tensor_slice = TensorSlice(number, transfer.tensor, low, high, (high - low) * unit_bytes)
                    slices[span].setdefault(pair, []).append(tensor_slice)

    def turn(pair: Pair) -> tuple[int, int, int]:
        return order[pair[0]], *pair

    return [_round({pair: of_span[pair] for pair in sorted(of_span, key=turn)}, flows, tensors) for of_span in slices]


def fingerprint_of(flows: Iterable[Flow]) -> str:
    """Return a hash of all that travels, on all ranks."""
    lists = [one for flow in flows for one in (flow.transfers, flow.kept) if one is not None]
    columns = [(one.tensors, one.begins, one.ends, one.sources, one.destinations) for one in lists]
    return digest(*(np.ascontiguousarray(column).tobytes() for own in columns for column in own)).hex()


def _spans(flows: Sequence[Flow], tensors: Sequence[WholeTensor], num_ranks: int, max_bytes: int) -> list[_Span]:
    loads_PR, counts_PR = (np.zeros((len(tensors), num_ranks), dtype=np.int64) for _ in range(2))
    most_itemsize = np.zeros(len(tensors), dtype=np.int64)
    for flow in flows:
        itemsizes = np.array([_itemsize(flow, number, one) for number, one in enumerate(tensors)])
        most_itemsize = np.maximum(most_itemsize, itemsizes)
        transfers = flow.transfers
        of_parameter = np.array([one.spec.itemsize for one in tensors])
        num_bytes = transfers.num_bytes // of_parameter[transfers.tensors] * itemsizes[transfers.tensors]
        for ranks in (transfers.sources, transfers.destinations):
            np.add.at(loads_PR, (transfers.tensors, ranks), num_bytes)
            np.add.at(counts_PR, (transfers.tensors, ranks), 1)
    spans: list[_Span] = []
    first, used = 0, np.zeros(num_ranks, dtype=np.int64)
    for number, tensor in enumerate(tensors):
        load = loads_PR[number]
        if (used + load).max() <= max_bytes:
            used = used + load
            continue
        if first < number:
            spans.append(_Span(first, number))
        first, used = number, load
        if load.max() > max_bytes:
            # Of one unit a rank sends and receives no more than this.
            of_unit = int(counts_PR[number].max()) * _unit_elements(tensor) * int(most_itemsize[number])
            each = max(max_bytes // of_unit, 1)
            units = _num_units(tensor)
            spans += [_Span(number, number + 1, begin, min(begin + each, units)) for begin in range(0, units, each)]
            first, used = number + 1, np.zeros_like(used)
    return [*spans, _Span(first, len(tensors))] if first < len(tensors) else spans


def _round(
    slices: Mapping[Pair, list[TensorSlice]], flows: Sequence[Flow], tensors: Sequence[WholeTensor]
) -> SwitchRound:
    def larger_elements_first(tensor_slice: TensorSlice) -> tuple[int, TensorSlice]:
        return -_itemsize(flows[tensor_slice.flow], tensor_slice.tensor, tensors[tensor_slice.tensor]), tensor_slice

    sizes = {
        pair: 0 if pair[0] == pair[1] else sum(one.num_bytes for one in of_pair) for pair, of_pair in slices.items()
    }
    return SwitchRound({pair: sorted(of_pair, key=larger_elements_first) for pair, of_pair in slices.items()}, sizes)


def _num_units(tensor: WholeTensor) -> int:
    return math.prod(tensor.spec.shape) if tensor.spec.division is None else tensor.spec.num_units


def _unit_elements(tensor: WholeTensor) -> int:
    return math.prod(tensor.spec.shape) // max(_num_units(tensor), 1)


def _itemsize(flow: Flow, number: int, tensor: WholeTensor) -> int:
    return tensor.spec.itemsize if flow.itemsizes is None else int(flow.itemsizes[number])
