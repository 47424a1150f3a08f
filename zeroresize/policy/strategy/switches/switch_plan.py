"""Who sends what to whom when a model changes from one layout to another (HotSPa, Algorithm 1): plain numbers.

Every rank computes the same plan. ``P`` tensors, ``R`` ranks, ``N`` nodes, ``S`` slices, ``C`` patterns of slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from zeroresize.plan.layout import Indices, Layout, TensorSpec
from zeroresize.plan.transfers import Slices, SliceTransfers, common_slices, transfers
from zeroresize.policy.strategy.switches.partial_gradients import Moves, PartialGradients, sum_within_nodes
from zeroresize.policy.strategy.switches.senders import Queues, SendLoads
from zeroresize.policy.strategy.switches.transfers import SwitchPlan

#: Slices are cut to this part of what a rank receives on average, so that senders can be loaded evenly.
LARGEST_SLICE = 1 / 8


def plan_weights(
    before: Layout, after: Layout, tensors: Sequence[TensorSpec], nodes: Sequence[int], *, heuristics: bool = True
) -> SwitchPlan:
    """Plan that every rank gets what it wants in the layout after and does not hold before, each slice from one rank.

    A holder on the rank's own node sends, or else any; of these the one that has sent least so far, inside nodes and
    between nodes counted by themselves. Unlike in the paper large slices come first, as in list scheduling, and slices
    that are large beside what ranks receive are cut into several.
    """
    nodes_R, none = _numbered(nodes, before.num_ranks), SliceTransfers.none()
    if not heuristics:
        return SwitchPlan(transfers(before, after, tensors), none, nodes_R)
    slices = common_slices(before, after, tensors)
    missing = slices.wanted & ~slices.held
    slices = _divided(slices, missing.sum(axis=1))
    loads, sent = SendLoads(before.num_ranks), list[tuple[Indices, Indices, Indices]]()
    for pattern, numbers in _equal_slices(slices):
        lacking = np.flatnonzero(missing[pattern])
        if not lacking.size:
            continue
        holders = np.flatnonzero(slices.held[pattern])
        queues = Queues(holders, np.zeros_like(holders), nodes_R)
        destinations = np.repeat(lacking, len(numbers))
        queue_of = queues.of(np.zeros_like(destinations), destinations)
        sources = loads.choose(queues, queue_of, int(slices.num_bytes[numbers[0]]))
        sent.append((np.tile(numbers, len(lacking)), sources, destinations))
    return SwitchPlan(SliceTransfers.of(slices, *_joined(sent)), none, nodes_R)


def plan_gradients(
    source: Layout,
    optimizer_layout: Layout,
    tensors: Sequence[TensorSpec],
    nodes: Sequence[int],
    *,
    heuristics: bool = True,
) -> SwitchPlan:
    """Plan that every replica's partial gradient of every slice gets to one replica of the optimizer's layout.

    There it is to be added, on all ranks of that replica that hold the slice. The replica is the one to which least
    travels between nodes, then the one to which least travels at all, as its ranks hold the slice in both layouts, then
    the one that has received least. Who sends is chosen as for weights; only one of the ranks of a replica that hold
    the same does. Where replicas of one node would send to the same ranks of other nodes, they are summed on theirs
    before. The sum of all of the optimizer's replicas is the gradient.

    Args:
        heuristics: False: source replica i goes to the optimizer's replica i modulo their number, from the first holder
            in the order of ranks.
    """
    nodes_R = _numbered(nodes, source.num_ranks)
    slices = common_slices(source, optimizer_layout, tensors)
    if heuristics:
        most = max(optimizer_layout.num_replicas, 1)
        slices = _divided(slices, slices.wanted.sum(axis=1) * source.num_replicas // most)
    loads, received = SendLoads(source.num_ranks), np.zeros((2, source.num_ranks), np.int64)
    sent, kept = list[tuple[Indices, Indices, Indices]](), list[tuple[Indices, Indices, Indices]]()
    routes: dict[int, PartialGradients] = {}
    for pattern, numbers in _equal_slices(slices):
        size = int(slices.num_bytes[numbers[0]])
        if pattern not in routes:
            masks = slices.held[pattern], slices.wanted[pattern]
            routes[pattern] = PartialGradients(source, optimizer_layout, *masks, nodes_R, heuristics=heuristics)
        partials = routes[pattern]
        *assigned, is_kept = partials.assigned(numbers, received, size)
        stays, _, where = (column[is_kept] for column in assigned)
        kept.append((stays, where, where))
        slice_numbers, replicas, destinations = (column[~is_kept] for column in assigned)
        if slice_numbers.size:
            queue_of = partials.queues.of(replicas, destinations)
            np.add.at(received, (partials.queues.links[queue_of], destinations), size)
            sent.append((slice_numbers, loads.choose(partials.queues, queue_of, size), destinations))
    travels, stays_where, summed = _joined(sent), _joined(kept), _joined(())
    if heuristics:
        replicas_R = source.replicas, optimizer_layout.replicas
        summed, travels = sum_within_nodes(travels, stays_where, *replicas_R, nodes_R, slices.num_bytes)
    then, stays_there, first = (SliceTransfers.of(slices, *moves) for moves in (travels, stays_where, summed))
    return SwitchPlan(then, stays_there, nodes_R, first)


def _joined(parts: Sequence[tuple[Indices, Indices, Indices]]) -> Moves:
    none = np.zeros(0, dtype=np.int64)
    return Moves(*map(np.concatenate, zip((none, none, none), *parts, strict=True)))


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
