"""What must travel between two layouts, and from where: pure functions of plain numbers.

``U`` units of a segment, ``R`` ranks, ``S`` slices (of whatever tensors), ``N`` nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.ownership import Indices, OwnershipMap


def transfer_plan(before: OwnershipMap, after: OwnershipMap) -> dict[tuple[int, int], Indices]:
    """Which units travel, by (source, destination): those that change owners and no others.

    Every unit has one owner, so its source is no choice, and no plan sends less.

    Returns:
        Ascending units for every pair of ranks that has any, in ascending order of the pairs.

    Raises:
        ValueError: if the maps are of different units or ranks.
    """
    if len(before.owners) != len(after.owners) or before.num_ranks != after.num_ranks:
        raise ValueError(
            f"a map of {len(before.owners)} units on {before.num_ranks} ranks cannot follow one of "
            f"{len(after.owners)} units on {after.num_ranks} ranks"
        )
    moved = np.flatnonzero(before.owners != after.owners)
    if not moved.size:
        return {}
    pairs = before.owners[moved] * before.num_ranks + after.owners[moved]
    order = np.argsort(pairs, kind="stable")
    pairs, moved = pairs[order], moved[order]
    begins = np.flatnonzero(np.diff(pairs, prepend=-1))
    return {
        (int(pairs[begin]) // before.num_ranks, int(pairs[begin]) % before.num_ranks): units
        for begin, units in zip(begins, np.split(moved, begins[1:]), strict=True)
    }


@dataclass(frozen=True, eq=False)
class SliceTransfers:
    """Which slices travel, one transfer an entry.

    Attributes:
        slices, sources, destinations: [number of transfers], int64, in ascending order of the slices.
        sent_within, sent_between: [R], float64: what each rank sends inside its node and to other nodes, in the unit
            of the sizes.
    """

    slices: Indices
    sources: Indices
    destinations: Indices
    sent_within: NDArray[np.float64]
    sent_between: NDArray[np.float64]


def replicated_transfer_plan(
    held: NDArray[np.bool_], wanted: NDArray[np.bool_], sizes: Sequence[float], nodes: Sequence[int]
) -> SliceTransfers:
    """Who sends what where several ranks may hold a slice, such as replicas of a model (HotSPa, Algorithm 1).

    A rank that wants a slice which it does not hold gets it from a holder on its node if there is one, else from any.
    Among these the one sends that has sent least so far, inside nodes and between nodes counted by themselves, so that
    the largest send volume of a device is small: nodes' links inside and outside are different ones, and work in both
    directions at once. Unlike in the paper large slices are placed first, as in list scheduling.

    Args:
        held: [S, R]: which ranks hold which slices before.
        wanted: [S, R]: which ranks hold which slices after.
        sizes: [S]: of the slices, such as bytes; not negative.
        nodes: [R]: on which node each rank is.

    Raises:
        ValueError: for a slice that somebody wants and nobody holds.
    """
    num_ranks = held.shape[1]
    missing = wanted & ~held
    lost = np.flatnonzero(missing.any(axis=1) & ~held.any(axis=1))
    if lost.size:
        raise ValueError(f"slices {lost.tolist()} are wanted, but no rank holds them")
    by_node = _ranks_by_node(nodes)
    within, between = np.zeros(num_ranks + 1), np.zeros(num_ranks)  # the last entry stands for no rank
    found: list[tuple[int, Indices, Indices]] = []
    for part in np.argsort(-np.asarray(sizes, dtype=np.float64), kind="stable"):
        if not missing[part].any():
            continue
        size = float(sizes[part])
        is_source, is_missing = np.append(held[part], False), np.append(missing[part], False)
        has_source = is_source[by_node].any(axis=1)
        # Within nodes: the first rank of every node that lacks the slice, then every second one, and so on.
        lacking = [row[is_missing[row]] for row in by_node[has_source]]
        candidates = by_node[has_source]
        for turn in range(max(map(len, lacking), default=0)):
            takes = np.array([len(row) > turn for row in lacking])
            loads = np.where(is_source[candidates], within[candidates], np.inf)
            sources = candidates[np.arange(len(candidates)), loads.argmin(axis=1)][takes]
            within[sources] += size
            found.append((int(part), sources, np.array([row[turn] for row in lacking if len(row) > turn])))
        far = by_node[~has_source]
        destinations = far[is_missing[far]]
        if destinations.size:
            sources = _least_loaded(np.flatnonzero(held[part]), between, size, len(destinations))
            np.add.at(between, sources, size)
            found.append((int(part), sources, destinations))
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return SliceTransfers(none, none, none, within[:-1], between)
    slices = np.concatenate([np.full(len(sources), part) for part, sources, _ in found])
    order = np.argsort(slices, kind="stable")
    sources, destinations = (np.concatenate([one[place] for one in found])[order] for place in (1, 2))
    return SliceTransfers(slices[order], sources, destinations, within[:-1], between)


def _ranks_by_node(nodes: Sequence[int]) -> Indices:
    """[N, most ranks of a node]: every node's ranks, filled up with −1."""
    ranks = [np.flatnonzero(np.asarray(nodes) == node) for node in sorted(set(nodes))]
    table = np.full((len(ranks), max(map(len, ranks))), -1, dtype=np.int64)
    for row, own in zip(table, ranks, strict=True):
        row[: len(own)] = own
    return table


def _least_loaded(holders: Indices, loads: NDArray[np.float64], size: float, num_times: int) -> Indices:
    """Who sends a slice so many times if each time it is the least loaded holder, without counting one by one."""
    own = loads[holders]
    if size == 0.0:
        return np.repeat(holders[own.argmin()], num_times)
    order = np.argsort(own, kind="stable")
    own, holders = own[order], holders[order]
    # The level up to which the loads are filled, from below: at most num_times whole slices fit under it.
    levels = (size * num_times + np.cumsum(own)) / np.arange(1, len(own) + 1)
    level = levels[np.flatnonzero(own <= levels)[-1]]
    times = np.maximum((level - own) // size, 0.0).astype(np.int64)
    times[0] -= max(int(times.sum()) - num_times, 0)  # rounding
    left = num_times - int(times.sum())
    times[np.argsort(own + times * size, kind="stable")[:left]] += 1
    return np.repeat(holders, times)
