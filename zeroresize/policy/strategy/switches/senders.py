"""Who sends what several ranks hold: on the same node first, then the least loaded one (HotSPa, Algorithm 1).

``R`` ranks, ``N`` nodes, ``G`` groups, ``Q`` queues, ``W`` most ranks of a queue, ``E`` transfers.
"""

from __future__ import annotations

import numpy as np

from zeroresize.plan.layout import Indices
from zeroresize.plan.transfers import Flags

#: The class of link that a transfer takes: inside a node, or between nodes.
WITHIN, BETWEEN = 0, 1


class Queues:
    """Hold which ranks may send something: of a group's holders those on the receiver's node, or else all of them.

    A queue is a set of ranks among which there is no preference but their load.

    Args:
        holders, groups: [H]: ranks that hold it, and of which group each of them is, such as a replica; only a rank of
            the group that is asked for may send.
        nodes: [R], numbered from 0.
        prefer: False: always the first holder of a group in the order of ranks.
    """

    def __init__(self, holders: Indices, groups: Indices, nodes: Indices, *, prefer: bool = True) -> None:
        num_groups, self._num_nodes = int(groups.max(initial=-1)) + 1, int(nodes.max(initial=-1)) + 1
        self._nodes = nodes
        near, far = _members(groups * self._num_nodes + nodes[holders], holders), _members(groups, holders)
        if not prefer:
            near, far = {}, {group: ranks[:1] for group, ranks in far.items()}
        queues = [*near.values(), *far.values()]
        self.links = np.array([WITHIN] * len(near) + [BETWEEN] * len(far), dtype=np.int64)
        self.ranks_QW = np.full((len(queues), max(map(len, queues), default=0)), -1, dtype=np.int64)
        for row, ranks in zip(self.ranks_QW, queues, strict=True):
            row[: len(ranks)] = ranks
        self._near = np.full(num_groups * self._num_nodes, -1, dtype=np.int64)
        self._near[list(near)] = np.arange(len(near))
        self._far = np.full(num_groups, -1, dtype=np.int64)
        self._far[list(far)] = len(near) + np.arange(len(far))

    def of(self, groups: Indices, destinations: Indices) -> Indices:
        """Return [E] from which queue each destination is to be sent what a group holds."""
        near = self._near[groups * self._num_nodes + self._nodes[destinations]]
        return np.where(near >= 0, near, self._far[groups])


def _members(keys: Indices, ranks: Indices) -> dict[int, Indices]:
    """The ranks of every key, in ascending order of the keys and of the ranks."""
    order = np.lexsort((ranks, keys))
    keys, ranks = keys[order], ranks[order]
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    return dict(zip(keys[begins].tolist(), np.split(ranks, begins[1:]), strict=True)) if len(keys) else {}


class SendLoads:
    """Count what each rank has been given to send, inside its node and between nodes: :attr:`sent` [2, R] bytes."""

    def __init__(self, num_ranks: int) -> None:
        self.sent = np.zeros((2, num_ranks), dtype=np.int64)

    def choose(self, queues: Queues, queue_of: Indices, size: int) -> Indices:
        """Choose [E] ranks that send ``size`` bytes each: one transfer after another gets the least loaded rank.

        Neighbours of one queue get the same sender where that is as good, so that few ranks have to do with each other.
        """
        ranks_QW, links_Q1 = queues.ranks_QW, queues.links[:, None]
        num_times = np.bincount(queue_of, minlength=len(ranks_QW))
        times_QW = filled(self.sent[links_Q1, ranks_QW], ranks_QW >= 0, size, num_times)
        np.add.at(self.sent, (np.broadcast_to(links_Q1, ranks_QW.shape), ranks_QW), times_QW * size)
        sources = np.empty_like(queue_of)
        sources[np.argsort(queue_of, kind="stable")] = np.repeat(ranks_QW.ravel(), times_QW.ravel())
        return sources


def filled(loads_QW: Indices, is_there_QW: Flags, size: int, num_times: Indices) -> Indices:
    """Return [Q, W] how often each is chosen if each of [Q] ``num_times`` the least loaded of a row is, all at once."""
    most = np.iinfo(np.int64).max
    order = np.argsort(np.where(is_there_QW, loads_QW, most), axis=1, kind="stable")
    loads, is_there = (np.take_along_axis(table, order, axis=1) for table in (loads_QW, is_there_QW))
    # The level up to which the loads are filled, from below: at most num_times whole transfers fit under it.
    volumes = size * num_times[:, None] + np.cumsum(np.where(is_there, loads, 0), axis=1)
    levels = volumes // np.arange(1, loads.shape[1] + 1)
    num_filled = (is_there & (loads <= levels)).sum(axis=1, keepdims=True)
    level = np.take_along_axis(levels, num_filled - 1, axis=1)
    times = np.where(is_there, np.maximum((level - loads) // size, 0), 0)
    left = num_times - times.sum(axis=1)
    after = np.where(is_there, loads + times * size, most)
    place = np.argsort(np.argsort(after, axis=1, kind="stable"), axis=1, kind="stable")
    times += place < left[:, None]
    unsorted = np.empty_like(times)
    np.put_along_axis(unsorted, order, times, axis=1)
    return unsorted
