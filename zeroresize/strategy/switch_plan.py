"""Who sends what to whom when a model changes from one layout to another (HotSPa, Algorithm 1): plain numbers.

Every rank computes the same plan. ``P`` tensors, ``R`` ranks, ``S`` slices, ``E`` transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from zeroresize.resharding.layout import Indices, Layout, TensorSpec
from zeroresize.resharding.senders import BETWEEN, WITHIN, Queues, SendLoads, filled
from zeroresize.resharding.slices import Slices, common_slices

#: Slices are cut to this part of what a rank receives on average, so that senders can be loaded evenly.
LARGEST_SLICE = 1 / 8


@dataclass(frozen=True)
class LinkSpeeds:
    """Bytes per second of a rank's links in one direction, inside its node and to other nodes.

    Attributes:
        latency_s: what a switch takes besides.
    """

    within_bytes_per_s: float
    between_bytes_per_s: float
    latency_s: float = 0.0


class Transfer(NamedTuple):
    """Units of a tensor, from ``begin`` up to ``end`` (of the undivided tensor), that go from one rank to another."""

    tensor: int
    begin: int
    end: int
    source: int
    destination: int


@dataclass(frozen=True, eq=False)
class Transfers:
    """Transfers in ascending order of tensors, then units, destinations and sources: the same order on all ranks.

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

    def __iter__(self) -> Iterator[Transfer]:
        columns = (self.tensors, self.begins, self.ends, self.sources, self.destinations)
        return map(Transfer._make, zip(*(column.tolist() for column in columns), strict=True))

    def at(self, entries: Indices) -> Transfers:
        """Those of these numbers."""
        columns = (self.tensors, self.begins, self.ends, self.sources, self.destinations, self.num_bytes)
        return Transfers(*(column[entries] for column in columns))


@dataclass(frozen=True)
class RankTransfers:
    """What a rank has to do.

    Attributes:
        sends, receives: what it sends and is sent, in the order of :class:`Transfers`.
        kept: of gradients: what it adds to its own, as it holds it in both layouts.
    """

    sends: Transfers
    receives: Transfers
    kept: Transfers


@dataclass(frozen=True, eq=False)
class SwitchPlan:
    """Which slices travel, and how much that is for every rank.

    Attributes:
        transfers: between different ranks.
        kept: of gradients only: what a rank holds in both layouts and adds where it is; source and destination are the
            same.
        nodes: [R] on which node each rank is, numbered from 0.
    """

    transfers: Transfers
    kept: Transfers
    nodes: Indices

    def of_rank(self, rank: int) -> RankTransfers:
        """A rank's part of the plan."""
        own, kept = self.transfers, self.kept
        return RankTransfers(
            own.at(np.flatnonzero(own.sources == rank)),
            own.at(np.flatnonzero(own.destinations == rank)),
            kept.at(np.flatnonzero(kept.sources == rank)),
        )

    @cached_property
    def sent_within(self) -> Indices:
        """[R] bytes that each rank sends inside its node."""
        return self._volumes(self.transfers.sources, WITHIN)

    @cached_property
    def sent_between(self) -> Indices:
        """[R] bytes that each rank sends to other nodes."""
        return self._volumes(self.transfers.sources, BETWEEN)

    @cached_property
    def received_within(self) -> Indices:
        """[R] bytes that each rank receives from its node."""
        return self._volumes(self.transfers.destinations, WITHIN)

    @cached_property
    def received_between(self) -> Indices:
        """[R] bytes that each rank receives from other nodes."""
        return self._volumes(self.transfers.destinations, BETWEEN)

    def _volumes(self, ranks: Indices, link: int) -> Indices:
        is_own = self._links == link
        volumes = np.bincount(ranks[is_own], weights=self.transfers.num_bytes[is_own], minlength=len(self.nodes))
        return volumes.astype(np.int64)

    @cached_property
    def _links(self) -> Indices:
        return (self.nodes[self.transfers.sources] != self.nodes[self.transfers.destinations]).astype(np.int64)

    def seconds(self, links: LinkSpeeds) -> float:
        """How long the transfers take if nothing but the ranks' own links holds them up.

        All ranks start together; a rank sends and receives at the same time, and inside its node and to other nodes at
        the same time; no link is shared between ranks. 0 if nothing travels.
        """
        if not len(self.transfers):
            return 0.0
        within = max(self.sent_within.max(), self.received_within.max()) / links.within_bytes_per_s
        between = max(self.sent_between.max(), self.received_between.max()) / links.between_bytes_per_s
        return float(max(within, between)) + links.latency_s


def plan_weights(
    before: Layout, after: Layout, tensors: Sequence[TensorSpec], nodes: Sequence[int], *, heuristics: bool = True
) -> SwitchPlan:
    """Every rank gets what it wants in the layout after and does not hold before, from one rank that holds it.

    A holder on the rank's own node sends, or else any; of these the one that has sent least so far, inside nodes and
    between nodes counted by themselves. Unlike in the paper large slices come first, as in list scheduling, and slices
    that are large beside what ranks receive are cut into several.

    Args:
        nodes: [R]: on which node each rank is.
        heuristics: False: the first holder in the order of ranks sends.

    Raises:
        ValueError: as :func:`common_slices` does, and for nodes of another number of ranks.
    """
    nodes_R = _numbered(nodes, before.num_ranks)
    slices = common_slices(before, after, tensors)
    missing = slices.wanted & ~slices.held
    if heuristics:
        slices = _divided(slices, missing.sum(axis=1))
    loads, builder = SendLoads(before.num_ranks), _Builder(slices)
    queues: dict[int, Queues] = {}
    for pattern, numbers in _equal_slices(slices):
        lacking = np.flatnonzero(missing[pattern])
        if not lacking.size:
            continue
        if pattern not in queues:
            holders = np.flatnonzero(slices.held[pattern])
            queues[pattern] = Queues(holders, np.zeros_like(holders), nodes_R, prefer=heuristics)
        own, destinations = np.tile(numbers, len(lacking)), np.repeat(lacking, len(numbers))
        queue_of = queues[pattern].of(np.zeros_like(destinations), destinations)
        builder.add(own, loads.choose(queues[pattern], queue_of, int(slices.num_bytes[numbers[0]])), destinations)
    return builder.plan(nodes_R)


def plan_gradients(
    source: Layout, home: Layout, tensors: Sequence[TensorSpec], nodes: Sequence[int], *, heuristics: bool = True
) -> SwitchPlan:
    """Every replica's partial gradient of every slice gets to one replica of the home layout, to be added there.

    It gets to all ranks of that replica that hold the slice. The replica is the one to which least travels between
    nodes, then the one to which least travels at all, as its ranks hold the slice in both layouts, then the one that
    has received least. Who sends is chosen as for weights; only one of the ranks of a replica that hold the same does.
    The sum of all home replicas is the gradient.

    Args:
        heuristics: False: source replica i goes to home replica i modulo their number, from the first holder in the
            order of ranks.

    Raises:
        ValueError: as :func:`plan_weights` does.
    """
    nodes_R = _numbered(nodes, source.num_ranks)
    slices = common_slices(source, home, tensors)
    if heuristics:
        slices = _divided(slices, slices.wanted.sum(axis=1) * source.num_replicas // max(home.num_replicas, 1))
    loads, received, builder = SendLoads(source.num_ranks), np.zeros((2, source.num_ranks), np.int64), _Builder(slices)
    routes: dict[int, _Partials] = {}
    for pattern, numbers in _equal_slices(slices):
        size = int(slices.num_bytes[numbers[0]])
        if pattern not in routes:
            masks = slices.held[pattern], slices.wanted[pattern]
            routes[pattern] = _Partials.of(source, home, *masks, nodes_R, heuristics=heuristics)
        partials = routes[pattern]
        own, replicas, destinations, is_kept = partials.assigned(numbers, received, size)
        builder.keep(own[is_kept], destinations[is_kept])
        own, replicas, destinations = own[~is_kept], replicas[~is_kept], destinations[~is_kept]
        if not own.size:
            continue
        queue_of = partials.queues.of(replicas, destinations)
        np.add.at(received, (partials.queues.links[queue_of], destinations), size)
        builder.add(own, loads.choose(partials.queues, queue_of, size), destinations)
    return builder.plan(nodes_R)


@dataclass(frozen=True, eq=False)
class _Partials:
    """Partial gradients of the slices of a pattern: I source replicas, J home replicas that may take them.

    Attributes:
        queues: who sends, by source replica.
        is_choice: [I, J]: which home replicas are best for a source replica.
        links: [I]: by which class of link most of it travels to them.
        receivers: the ranks of each home replica that hold the slice.
        is_kept: [I, R]: whether a rank is of the source replica and holds the slice.
    """

    queues: Queues
    is_choice: np.ndarray
    links: Indices
    receivers: list[Indices]
    is_kept: np.ndarray

    @classmethod
    def of(
        cls, source: Layout, home: Layout, held: np.ndarray, wanted: np.ndarray, nodes: Indices, *, heuristics: bool
    ) -> _Partials:
        holders, takers = np.flatnonzero(held), np.flatnonzero(wanted)
        num_sources, num_homes = source.num_replicas, home.num_replicas
        queues = Queues(holders, source.replicas[holders], nodes, prefer=heuristics)
        is_kept = np.zeros((num_sources, len(nodes)), dtype=bool)
        is_kept[source.replicas[holders], holders] = True
        replicas = home.replicas[takers]
        receivers = [takers[replicas == number] for number in range(num_homes)]
        is_near = np.zeros((num_sources, int(nodes.max()) + 1), dtype=bool)
        is_near[source.replicas[holders], nodes[holders]] = True
        of_home = replicas[:, None] == np.arange(num_homes)
        num_between = (~is_near[:, nodes[takers]]).astype(np.int64) @ of_home
        num_missing = (~is_kept[:, takers]).astype(np.int64) @ of_home
        if heuristics:
            costs = num_between * (len(nodes) + 1) + num_missing
            is_choice = costs == costs.min(axis=1, keepdims=True)
        else:
            is_choice = np.arange(num_sources)[:, None] % num_homes == np.arange(num_homes)
        links = np.where((num_between * is_choice).any(axis=1), BETWEEN, WITHIN)
        return cls(queues, is_choice, links, receivers, is_kept)

    def assigned(self, numbers: Indices, received: Indices, size: int) -> tuple[Indices, Indices, Indices, np.ndarray]:
        """Slices, source replicas and destinations, and whether the destination holds the slice in the replica.

        Args:
            numbers: of the slices, of ``size`` bytes each.
            received: [2, R] bytes so far.
        """
        rows, kind_of = np.unique(
            np.concatenate([self.is_choice, self.links[:, None] == BETWEEN], axis=1), axis=0, return_inverse=True
        )
        found: list[tuple[Indices, Indices, Indices]] = []
        for kind, row in enumerate(rows):
            replicas = np.flatnonzero(kind_of.ravel() == kind)
            homes, link = np.flatnonzero(row[:-1]), int(row[-1])
            own, of_replica = np.tile(numbers, len(replicas)), np.repeat(replicas, len(numbers))
            levels = np.array([[received[link, self.receivers[home]].max() for home in homes]])
            times = filled(levels, np.ones_like(levels, dtype=bool), size, np.array([len(own)]))[0]
            home_of = np.repeat(homes, times)
            for home in homes[times > 0]:
                entries, takers = np.flatnonzero(home_of == home), self.receivers[home]
                whole = np.repeat(own[entries], len(takers)), np.repeat(of_replica[entries], len(takers))
                found.append((*whole, np.tile(takers, len(entries))))
        own, of_replica, destinations = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return own, of_replica, destinations, self.is_kept[of_replica, destinations]


class _Builder:
    """Collects transfers of slices."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        none = np.zeros(0, dtype=np.int64)
        self._sent, self._kept = [(none, none, none)], [(none, none, none)]

    def add(self, numbers: Indices, sources: Indices, destinations: Indices) -> None:
        self._sent.append((numbers, sources, destinations))

    def keep(self, numbers: Indices, ranks: Indices) -> None:
        self._kept.append((numbers, ranks, ranks))

    def plan(self, nodes: Indices) -> SwitchPlan:
        return SwitchPlan(self._sorted(self._sent, len(nodes)), self._sorted(self._kept, len(nodes)), nodes)

    def _sorted(self, parts: list[tuple[Indices, Indices, Indices]], num_ranks: int) -> Transfers:
        numbers, sources, destinations = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort((numbers * num_ranks + destinations) * num_ranks + sources, kind="stable")
        numbers, sources, destinations, own = numbers[order], sources[order], destinations[order], self._slices
        units = own.tensors[numbers], own.begins[numbers], own.ends[numbers]
        return Transfers(*units, sources, destinations, own.num_bytes[numbers])


def _numbered(nodes: Sequence[int], num_ranks: int) -> Indices:
    """[R]: the nodes, numbered from 0."""
    if len(nodes) != num_ranks:
        raise ValueError(f"{len(nodes)} ranks have a node, but the layouts have {num_ranks} ranks")
    return np.unique(np.asarray(nodes, dtype=np.int64), return_inverse=True)[1].astype(np.int64).ravel()


def _divided(slices: Slices, num_transfers: Indices) -> Slices:
    """Slices none of which is large beside what ranks receive; ``num_transfers`` [C] of each slice of a pattern."""
    num_ranks = slices.held.shape[1]
    total = int((slices.num_bytes * num_transfers[slices.patterns]).sum())
    return slices.divided(int(total / num_ranks * LARGEST_SLICE) + 1) if total else slices


def _equal_slices(slices: Slices) -> Iterator[tuple[int, Indices]]:
    """A pattern, and slices of it that are equally large; large ones first, then those that fewer ranks hold."""
    num_holders = slices.held.sum(axis=1)[slices.patterns]
    order = np.lexsort((slices.patterns, num_holders, -slices.num_bytes))
    changes = (np.diff(slices.num_bytes[order], prepend=-1) != 0) | (np.diff(slices.patterns[order], prepend=-1) != 0)
    for numbers in np.split(order, np.flatnonzero(changes)[1:]) if len(order) else ():
        yield int(slices.patterns[numbers[0]]), numbers
