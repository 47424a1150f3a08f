"""How much a change of layouts sends, for every rank, and how long that takes.

``R`` ranks, ``E`` transfers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from zeroresize.plan.layout import Indices
from zeroresize.plan.transfers import SliceTransfers
from zeroresize.utils.checked import checked, real

#: Of the messages that a rank sends and receives at once, unless said otherwise.
MAX_MESSAGE_BYTES = 2**28


@checked(
    within_bytes_per_s=real(above=0.0, or_infinite=True),
    between_bytes_per_s=real(above=0.0, or_infinite=True),
    latency_s=real(least=0.0),
    node_bytes_per_s=real(above=0.0),
)
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
    def volumes(self) -> Indices:
        """Return [2, 2, R] bytes that each rank sends, then receives: inside its node, then from and to other nodes."""
        ends, num_bytes = self._ends(self.transfers), self.transfers.num_bytes
        leaves = self.nodes[ends[0]] != self.nodes[ends[1]]
        return np.stack([[self._bytes_of(ranks, num_bytes * (leaves == link)) for link in (0, 1)] for ranks in ends])

    @cached_property
    def summed_bytes(self) -> Indices:
        """Return [2, R] bytes that each rank sends, and receives, to sum inside its node."""
        return np.stack([self._bytes_of(ranks, self.summed.num_bytes) for ranks in self._ends(self.summed)])

    @property
    def most_bytes(self) -> int:
        """Return the bytes of the rank that sends or receives most."""
        return int(self.volumes.sum(axis=1).max())

    def seconds(self, links: LinkSpeeds) -> float:
        """Return how long the transfers take if nothing but the ranks' own links holds them up; 0 if nothing travels.

        Sums inside nodes come first. All ranks start together; a rank sends and receives at the same time, and inside
        its node and to other nodes at the same time; ranks share no link but the one of their node, where its speed is
        told.
        """
        return fused_seconds([self], links)

    @staticmethod
    def _ends(transfers: SliceTransfers) -> tuple[Indices, Indices]:
        return transfers.sources, transfers.destinations

    def _bytes_of(self, ranks: Indices, num_bytes: Indices) -> Indices:
        return np.bincount(ranks, weights=num_bytes, minlength=len(self.nodes)).astype(np.int64)


def fused_seconds(plans: Sequence[SwitchPlan], links: LinkSpeeds) -> float:
    """Return the seconds of plans of the same nodes that are carried out together, as :meth:`SwitchPlan.seconds`."""
    if not any(len(plan.transfers) for plan in plans):
        return 0.0
    within, between = np.sum([plan.volumes for plan in plans], axis=0).transpose(1, 0, 2)  # [2, R] each
    of_nodes = max(np.bincount(plans[0].nodes, weights=of_way).max() for of_way in between)
    seconds = max(
        within.max() / links.within_bytes_per_s,
        between.max() / links.between_bytes_per_s,
        of_nodes / links.node_bytes_per_s,
    )
    summed_s = max(int(plan.summed_bytes.max()) for plan in plans) / links.within_bytes_per_s
    return float(seconds) + summed_s + links.latency_s * (2 if summed_s else 1)
