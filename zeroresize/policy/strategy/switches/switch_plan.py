"""Who sends what to whom when a model changes from one layout to another (HotSPa, Algorithm 1): plain numbers.

Every rank computes the same plan. ``P`` tensors, ``R`` ranks, ``N`` nodes, ``S`` slices, ``C`` patterns of slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from zeroresize.plan.layout import Indices, Layout, TensorSpec
from zeroresize.policy.strategy.switches.node_sums import Moves, sum_within_nodes
from zeroresize.policy.strategy.switches.partial_gradients import PartialGradients
from zeroresize.policy.strategy.switches.senders import Queues, SendLoads
from zeroresize.policy.strategy.switches.slices import Slices, common_slices
from zeroresize.policy.strategy.switches.transfers import SliceTransfers, SwitchPlan

#: Slices are cut to this part of what a rank receives on average, so that senders can be loaded evenly.
LARGEST_SLICE = 1 / 8


def plan_weights(
    before: Layout, after: Layout, tensors: Sequence[TensorSpec], nodes: Sequence[int], *, heuristics: bool = True
) -> SwitchPlan:
    """Plan that every rank gets what it wants in the layout after and does not hold before.

    It gets each slice from one rank that holds it.

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
        slice_numbers, destinations = np.tile(numbers, len(lacking)), np.repeat(lacking, len(numbers))
        queue_of = queues[pattern].of(np.zeros_like(destinations), destinations)
        builder.add(
            slice_numbers, loads.choose(queues[pattern], queue_of, int(slices.num_bytes[numbers[0]])), destinations
        )
    return builder.plan(nodes_R)


def plan_gradients(
    source: Layout,
    optimizer_layout: Layout,
    tensors: Sequence[TensorSpec],
    nodes: Sequence[int],
    *,
    heuristics: bool = True,
) -> SwitchPlan:
    """Plan that every replica's partial gradient of every slice gets to one replica of the optimizer's layout.

    There it is to be added.

    It gets to all ranks of that replica that hold the slice. The replica is the one to which least travels between
    nodes, then the one to which least travels at all, as its ranks hold the slice in both layouts, then the one that
    has received least. Who sends is chosen as for weights; only one of the ranks of a replica that hold the same does.
    Where replicas of one node would send to the same ranks of other nodes, they are summed on theirs before. The sum of
    all of the optimizer's replicas is the gradient.

    Args:
        heuristics: False: source replica i goes to the optimizer's replica i modulo their number, from the first holder
            in the order of ranks.

    Raises:
        ValueError: as :func:`plan_weights` does.
    """
    nodes_R = _numbered(nodes, source.num_ranks)
    slices = common_slices(source, optimizer_layout, tensors)
    if heuristics:
        slices = _divided(
            slices, slices.wanted.sum(axis=1) * source.num_replicas // max(optimizer_layout.num_replicas, 1)
        )
    loads, received, builder = SendLoads(source.num_ranks), np.zeros((2, source.num_ranks), np.int64), _Builder(slices)
    routes: dict[int, PartialGradients] = {}
    for pattern, numbers in _equal_slices(slices):
        size = int(slices.num_bytes[numbers[0]])
        if pattern not in routes:
            masks = slices.held[pattern], slices.wanted[pattern]
            routes[pattern] = PartialGradients(source, optimizer_layout, *masks, nodes_R, heuristics=heuristics)
        partials = routes[pattern]
        slice_numbers, replicas, destinations, is_kept = partials.assigned(numbers, received, size)
        builder.keep(slice_numbers[is_kept], destinations[is_kept])
        slice_numbers, replicas, destinations = slice_numbers[~is_kept], replicas[~is_kept], destinations[~is_kept]
        if not slice_numbers.size:
            continue
        queue_of = partials.queues.of(replicas, destinations)
        np.add.at(received, (partials.queues.links[queue_of], destinations), size)
        builder.add(slice_numbers, loads.choose(partials.queues, queue_of, size), destinations)
    return builder.plan(nodes_R, (source.replicas, optimizer_layout.replicas) if heuristics else None)


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

    def plan(self, nodes: Indices, replicas: tuple[Indices, Indices] | None = None) -> SwitchPlan:
        """Of what was added; given the [R] replicas of both layouts, nodes sum first what would leave them."""
        sent, kept = (
            Moves(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
            for parts in (self._sent, self._kept)
        )
        summed = Moves(*(column[:0] for column in sent))
        if replicas is not None:
            summed, sent = sum_within_nodes(sent, kept, *replicas, nodes, self._slices.num_bytes)
        sent_first, sent_then, stays = (self._sorted(one, len(nodes)) for one in (summed, sent, kept))
        return SwitchPlan(sent_then, stays, nodes, sent_first)

    def _sorted(self, moves: Moves, num_ranks: int) -> SliceTransfers:
        numbers, sources, destinations = moves
        order = np.argsort((numbers * num_ranks + destinations) * num_ranks + sources, kind="stable")
        numbers, sources, destinations, slices = numbers[order], sources[order], destinations[order], self._slices
        units = slices.tensors[numbers], slices.begins[numbers], slices.ends[numbers]
        return SliceTransfers(*units, sources, destinations, slices.num_bytes[numbers])


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
