"""What a change of layouts sends: who to whom, in which order, and how much that is for every rank.

``R`` ranks, ``E`` transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from zeroresize.plan.layout import Indices
from zeroresize.policy.strategy.switches.senders import BETWEEN, WITHIN

#: Of the messages that a rank sends and receives at once, unless said otherwise.
MAX_MESSAGE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class LinkSpeeds:
    """Hold the bytes per second of a rank's links in one direction, inside its node and to other nodes.

    Attributes:
        latency_s: what a switch takes besides.
        node_bytes_per_s: what all ranks of a node together send to other nodes, or receive from them.
    """

    within_bytes_per_s: float
    between_bytes_per_s: float
    latency_s: float = 0.0
    node_bytes_per_s: float = math.inf


class SliceTransfer(NamedTuple):
    """Describe units of a tensor that go from one rank to another.

    They are those from ``begin`` up to ``end`` of the undivided tensor.
    """

    tensor: int
    begin: int
    end: int
    source: int
    destination: int


@dataclass(frozen=True, eq=False)
class SliceTransfers:
    """Hold transfers in ascending order of tensors, units, destinations and sources: the same order on all ranks.

    Attributes:
        tensors, begins, ends, sources, destinations, num_bytes: [E], int64.
    """

    tensors: Indices
    begins: Indices
    ends: Indices
    sources: Indices
    destinations: Indices
    num_bytes: Indices

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[SliceTransfer]:
        columns = (self.tensors, self.begins, self.ends, self.sources, self.destinations)
        return map(SliceTransfer._make, zip(*(column.tolist() for column in columns), strict=True))

    @classmethod
    def none(cls) -> SliceTransfers:
        """Return no transfers."""
        return cls(*(np.zeros(0, dtype=np.int64) for _ in range(6)))

    def at(self, entries: Indices) -> SliceTransfers:
        """Return the transfers of these numbers."""
        columns = (self.tensors, self.begins, self.ends, self.sources, self.destinations, self.num_bytes)
        return SliceTransfers(*(column[entries] for column in columns))


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """Describe which slices travel, and how much that is for every rank.

    Attributes:
        transfers: between different ranks.
        kept: of gradients only: what a rank holds in both layouts and adds where it is; source and destination are the
            same.
        nodes: [R] on which node each rank is, numbered from 0.
        summed: of gradients only: what travels inside nodes before all else and is added there to what the destination
            holds in the source layout; the sums are a part of ``transfers``, of whose volumes it is none.
    """

    transfers: SliceTransfers
    kept: SliceTransfers
    nodes: Indices
    summed: SliceTransfers = field(default_factory=SliceTransfers.none)

    @cached_property
    def summed_bytes(self) -> Indices:
        """Return [2, R] bytes that each rank sends, and receives, to sum inside its node."""
        num_ranks = len(self.nodes)
        return np.stack(
            [
                np.bincount(ranks, weights=self.summed.num_bytes, minlength=num_ranks).astype(np.int64)
                for ranks in (self.summed.sources, self.summed.destinations)
            ]
        )

    @cached_property
    def sent_within(self) -> Indices:
        """Return [R] bytes that each rank sends inside its node."""
        return self._volumes(self.transfers.sources, WITHIN)

    @cached_property
    def sent_between(self) -> Indices:
        """Return [R] bytes that each rank sends to other nodes."""
        return self._volumes(self.transfers.sources, BETWEEN)

    @cached_property
    def received_within(self) -> Indices:
        """Return [R] bytes that each rank receives from its node."""
        return self._volumes(self.transfers.destinations, WITHIN)

    @cached_property
    def received_between(self) -> Indices:
        """Return [R] bytes that each rank receives from other nodes."""
        return self._volumes(self.transfers.destinations, BETWEEN)

    def _volumes(self, ranks: Indices, link: int) -> Indices:
        is_own = self._links == link
        volumes = np.bincount(ranks[is_own], weights=self.transfers.num_bytes[is_own], minlength=len(self.nodes))
        return volumes.astype(np.int64)

    @cached_property
    def _links(self) -> Indices:
        return (self.nodes[self.transfers.sources] != self.nodes[self.transfers.destinations]).astype(np.int64)

    def seconds(self, links: LinkSpeeds) -> float:
        """Return how long the transfers take if nothing but the ranks' own links holds them up.

        Sums inside nodes come first. All ranks start together; a rank sends and receives at the same time, and inside
        its node and to other nodes at the same time; ranks share no link but the one of their node, where its speed is
        told. 0 if nothing travels.
        """
        return fused_seconds([self], links)


def fused_seconds(plans: Sequence[SwitchPlan], links: LinkSpeeds) -> float:
    """Return the seconds of plans of the same nodes that are carried out together.

    They are counted as :meth:`SwitchPlan.seconds` counts those of one.
    """
    if not any(len(plan.transfers) for plan in plans):
        return 0.0
    seconds = 0.0
    for way in ("sent", "received"):
        within, between = (sum(getattr(plan, f"{way}_{link}") for plan in plans) for link in ("within", "between"))
        of_nodes = np.bincount(plans[0].nodes, weights=between)
        seconds = max(
            seconds,
            within.max() / links.within_bytes_per_s,
            between.max() / links.between_bytes_per_s,
            of_nodes.max() / links.node_bytes_per_s,
        )
    summed_s = max(int(plan.summed_bytes.max()) for plan in plans) / links.within_bytes_per_s
    return float(seconds) + summed_s + links.latency_s * (2 if summed_s else 1)
