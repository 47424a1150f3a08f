"""To which replica of the optimizer's layout each replica's partial gradient goes, and what nodes sum before.

``I`` source replicas, ``J`` replicas of the optimizer's layout, ``R`` ranks, ``S`` slices, ``E`` transfers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zeroresize.plan.layout import Indices, Layout
from zeroresize.plan.transfers import Flags
from zeroresize.policy.strategy.switches.senders import BETWEEN, WITHIN, Queues, filled


class Moves(NamedTuple):
    """Hold [E] numbers of slices, and the ranks that they leave and reach."""

    slices: Indices
    sources: Indices
    destinations: Indices


class PartialGradients:
    """Assign the partial gradients of slices that the same ranks hold and want; ``queues`` tell who sends."""

    def __init__(
        self, source: Layout, optimizer_layout: Layout, held: Flags, wanted: Flags, nodes: Indices, *, heuristics: bool
    ) -> None:
        holders, takers = np.flatnonzero(held), np.flatnonzero(wanted)
        groups, replicas = source.replicas[holders], optimizer_layout.replicas[takers]
        self.queues = Queues(holders, groups, nodes, prefer=heuristics)
        self._receivers = [takers[replicas == number] for number in range(optimizer_layout.num_replicas)]
        self._is_kept_IR = np.zeros((source.num_replicas, len(nodes)), dtype=bool)
        self._is_kept_IR[groups, holders] = True
        is_near = np.zeros((source.num_replicas, int(nodes.max()) + 1), dtype=bool)
        is_near[groups, nodes[holders]] = True
        if not (is_near.any(axis=1).all() and all(map(len, self._receivers))):
            raise ValueError("a replica of the layouts does not hold all units of all tensors")
        numbers_J = np.arange(optimizer_layout.num_replicas)
        of_optimizer = replicas[:, None] == numbers_J
        between_IJ = (~is_near[:, nodes[takers]]).astype(np.int64) @ of_optimizer
        missing_IJ = (~self._is_kept_IR[:, takers]).astype(np.int64) @ of_optimizer
        if heuristics:
            costs = between_IJ * (len(nodes) + 1) + missing_IJ
            is_choice = costs == costs.min(axis=1, keepdims=True)
        else:
            is_choice = np.arange(source.num_replicas)[:, None] % len(numbers_J) == numbers_J
        links = np.where((between_IJ * is_choice).any(axis=1), BETWEEN, WITHIN)
        alike: dict[bytes, list[int]] = {}
        for number, row in enumerate(is_choice):
            alike.setdefault(row.tobytes() + bytes([links[number]]), []).append(number)
        #: Source replicas, the optimizer's that are equally good for them, and the link that most of it takes.
        self._choices = [
            (np.array(sources), np.flatnonzero(is_choice[sources[0]]), int(links[sources[0]]))
            for sources in alike.values()
        ]

    def assigned(self, numbers: Indices, received: Indices, size: int) -> tuple[Indices, Indices, Indices, Flags]:
        """Return slices, source replicas and destinations, and whether the destination holds the slice in the replica.

        Slices are given by their numbers, of ``size`` bytes each; ranks have received [2, R] bytes so far.
        """
        assignments = []
        for sources, replicas, link in sorted(self._choices, key=lambda choice: len(choice[1]) > 1):
            slices, of_replica = np.tile(numbers, len(sources)), np.repeat(sources, len(numbers))
            levels = np.array([[received[link, self._receivers[replica]].max() for replica in replicas]])
            times = filled(levels, np.ones_like(levels, dtype=bool), size, np.array([len(slices)]))[0]
            ends = np.cumsum(times)
            for replica, begin, end in zip(replicas, ends - times, ends, strict=True):
                takers = self._receivers[replica]
                columns = (np.tile(column[begin:end], len(takers)) for column in (slices, of_replica))
                assignments.append((*columns, np.repeat(takers, end - begin)))
        slices, of_replica, destinations = (np.concatenate(parts) for parts in zip(*assignments, strict=True))
        return slices, of_replica, destinations, self._is_kept_IR[of_replica, destinations]


def sum_within_nodes(
    sent: Moves,
    kept: Moves,
    source_replicas: Indices,
    optimizer_replicas: Indices,
    nodes: Indices,
    num_bytes: Indices,
) -> tuple[Moves, Moves]:
    """Return what is summed inside nodes first, and what is sent then, both [E], by the replica of each rank [R].

    An item is a source replica's part of a slice; items that go from one node to one replica of the optimizer's layout
    are a group. Of a group one rank, the root, receives what the others have, adds it to its part, and sends the sum to
    where all of them went. Roots take turns, so that they send equally much. What has another way out stays as it is: a
    part that some rank also gets inside the node, or keeps.

    Args:
        source_replicas, optimizer_replicas: [R], of which replica each rank is before and after.
        nodes: [R], numbered from 0.
        num_bytes: [S].
    """
    num_replicas, num_nodes = (int(numbers.max(initial=-1)) + 1 for numbers in (source_replicas, nodes))
    if not len(sent.slices):
        return sent, sent
    items, firsts, item_of = np.unique(
        sent.slices * num_replicas + source_replicas[sent.sources], return_index=True, return_inverse=True
    )
    item_of = item_of.ravel()
    sources, slices = sent.sources[firsts], sent.slices[firsts]
    leaves = (nodes[sent.sources] == nodes[sources][item_of]) & (nodes[sent.destinations] != nodes[sent.sources])
    has_one_way = np.bincount(item_of, weights=~leaves) == 0
    has_one_way &= ~np.isin(items, kept.slices * num_replicas + source_replicas[kept.sources])
    members = np.flatnonzero(has_one_way)
    keys = slices * num_nodes + nodes[sources]
    keys = keys * (int(optimizer_replicas.max()) + 1) + optimizer_replicas[sent.destinations[firsts]]
    _, group_of, sizes = np.unique(keys[members], return_inverse=True, return_counts=True)
    group_of = group_of.ravel()
    members, group_of = members[sizes[group_of] > 1], group_of[sizes[group_of] > 1]
    if not len(members):
        return Moves(*(column[:0] for column in sent)), sent
    order = np.argsort(group_of, kind="stable")
    members, group_of = members[order], group_of[order]
    begins = np.flatnonzero(np.diff(group_of, prepend=-1))
    sizes = np.diff(begins, append=len(members))
    roots = members[begins + _turns(sources[members[begins]], sizes, num_bytes[slices[members[begins]]])]
    root_of = np.arange(len(items))  # the item whose rank sends an item's part
    root_of[members] = np.repeat(roots, sizes)
    others = members[root_of[members] != members]
    summed = Moves(slices[others], sources[others], sources[root_of[others]])
    is_sent = root_of[item_of] == item_of
    is_sum = np.zeros(len(items), dtype=bool)
    is_sum[roots] = True
    senders = np.where(is_sum[item_of], sources[item_of], sent.sources)
    return summed, Moves(sent.slices[is_sent], senders[is_sent], sent.destinations[is_sent])


def _turns(first_ranks: Indices, sizes: Indices, num_bytes: Indices) -> Indices:
    """Which member of each group is its root: of equal groups in turn, to and fro, large slices first."""
    order = np.lexsort((-num_bytes, sizes, first_ranks))
    is_new = (np.diff(first_ranks[order], prepend=-1) != 0) | (np.diff(sizes[order], prepend=-1) != 0)
    begins = np.flatnonzero(is_new)
    places = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    turns, passes = places % sizes[order], places // sizes[order]
    result = np.empty_like(order)
    result[order] = np.where(passes % 2, sizes[order] - 1 - turns, turns)
    return result
