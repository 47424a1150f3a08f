"""Partial gradients of replicas on one node are summed there before they leave it: between nodes one of them travels.

``E`` transfers, ``K`` slices that stay on their rank, ``S`` slices, ``R`` ranks. An item is a source replica's part of
a slice; items that go from one node to one replica of the optimizer's layout are a group.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zeroresize.plan.layout import Indices


class Moves(NamedTuple):
    """Hold [E] numbers of slices, and the ranks that they leave and reach."""

    slices: Indices
    sources: Indices
    destinations: Indices


def sum_within_nodes(
    sent: Moves,
    kept: Moves,
    source_replicas: Indices,
    optimizer_replicas: Indices,
    nodes: Indices,
    num_bytes: Indices,
) -> tuple[Moves, Moves]:
    """Return what is summed inside nodes first, and what is sent then; both [E].

    Of a group one rank, the root, receives what the others have, adds it to its part, and sends the sum to where all of
    them went. Roots take turns, so that they send equally much. What has another way out stays as it is: a part that
    some rank also gets inside the node, or keeps.

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
    """Which member of each group is its root: of equal groups one after another, to and fro, large slices first."""
    order = np.lexsort((-num_bytes, sizes, first_ranks))
    is_new = (np.diff(first_ranks[order], prepend=-1) != 0) | (np.diff(sizes[order], prepend=-1) != 0)
    begins = np.flatnonzero(is_new)
    places = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    turns, passes = places % sizes[order], places // sizes[order]
    result = np.empty_like(order)
    result[order] = np.where(passes % 2, sizes[order] - 1 - turns, turns)
    return result
