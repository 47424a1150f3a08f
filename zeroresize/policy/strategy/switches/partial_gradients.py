"""To which replica of the optimizer's layout each replica's partial gradient goes.

``I`` source replicas, ``J`` replicas of the optimizer's layout, ``R`` ranks.
"""

from __future__ import annotations

import numpy as np

from zeroresize.plan.layout import Indices, Layout
from zeroresize.policy.strategy.switches.senders import BETWEEN, WITHIN, Queues, filled
from zeroresize.policy.strategy.switches.slices import Flags


class PartialGradients:
    """Assign the partial gradients of slices that the same ranks hold and want.

    Attributes:
        queues: who sends, by source replica.
    """

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
        of_optimizer = replicas[:, None] == np.arange(optimizer_layout.num_replicas)
        between_IJ = (~is_near[:, nodes[takers]]).astype(np.int64) @ of_optimizer
        missing_IJ = (~self._is_kept_IR[:, takers]).astype(np.int64) @ of_optimizer
        if heuristics:
            costs = between_IJ * (len(nodes) + 1) + missing_IJ
            is_choice = costs == costs.min(axis=1, keepdims=True)
        else:
            is_choice = np.arange(source.num_replicas)[:, None] % optimizer_layout.num_replicas == np.arange(
                optimizer_layout.num_replicas
            )
        links = np.where((between_IJ * is_choice).any(axis=1), BETWEEN, WITHIN)
        alike: dict[bytes, list[int]] = {}
        for number, row in enumerate(is_choice):
            alike.setdefault(row.tobytes() + bytes([links[number]]), []).append(number)
        choices = [(np.array(own), np.flatnonzero(is_choice[own[0]]), int(links[own[0]])) for own in alike.values()]
        #: Source replicas, the optimizer's that are equally good for them, and the link that most of it takes.
        self._free = [one for one in choices if len(one[1]) > 1]
        settled = [
            (sources, self._receivers[optimizer_replicas[0]])
            for sources, optimizer_replicas, _ in choices
            if len(optimizer_replicas) == 1
        ]
        #: Source replicas for which one of the optimizer's is best, and the ranks to which their gradients go.
        self._settled = [
            np.concatenate([np.zeros(0, np.int64), *parts])
            for parts in (
                [np.repeat(own, len(takers)) for own, takers in settled],
                [np.tile(takers, len(own)) for own, takers in settled],
            )
        ]

    def assigned(self, numbers: Indices, received: Indices, size: int) -> tuple[Indices, Indices, Indices, Flags]:
        """Return slices, source replicas and destinations, and whether the destination holds the slice in the replica.

        Args:
            numbers: of the slices, of ``size`` bytes each.
            received: [2, R] bytes so far.
        """
        replicas, takers = self._settled
        assignments = [(np.tile(numbers, len(replicas)), *(np.repeat(one, len(numbers)) for one in (replicas, takers)))]
        for replicas, optimizer_replicas, link in self._free:
            slices, of_replica = np.tile(numbers, len(replicas)), np.repeat(replicas, len(numbers))
            levels = np.array(
                [[received[link, self._receivers[optimizer_replica]].max() for optimizer_replica in optimizer_replicas]]
            )
            times = filled(levels, np.ones_like(levels, dtype=bool), size, np.array([len(slices)]))[0]
            ends = np.cumsum(times)
            for optimizer_replica, begin, end in zip(optimizer_replicas, ends - times, ends, strict=True):
                takers = self._receivers[optimizer_replica]
                whole, part = (np.repeat(column[begin:end], len(takers)) for column in (slices, of_replica))
                assignments.append((whole, part, np.tile(takers, end - begin)))
        slices, of_replica, destinations = (np.concatenate(parts) for parts in zip(*assignments, strict=True))
        return slices, of_replica, destinations, self._is_kept_IR[of_replica, destinations]
