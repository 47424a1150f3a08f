"""To which replica of the home layout each replica's partial gradient goes.

``I`` source replicas, ``J`` home replicas, ``R`` ranks.
"""

from __future__ import annotations

import numpy as np

from zeroresize.resharding.layout import Indices, Layout
from zeroresize.resharding.senders import BETWEEN, WITHIN, Queues, filled
from zeroresize.resharding.slices import Flags


class PartialGradients:
    """The partial gradients of slices that the same ranks hold and want.

    Attributes:
        queues: who sends, by source replica.
    """

    def __init__(
        self, source: Layout, home: Layout, held: Flags, wanted: Flags, nodes: Indices, *, heuristics: bool
    ) -> None:
        holders, takers = np.flatnonzero(held), np.flatnonzero(wanted)
        groups, replicas = source.replicas[holders], home.replicas[takers]
        self.queues = Queues(holders, groups, nodes, prefer=heuristics)
        self._receivers = [takers[replicas == number] for number in range(home.num_replicas)]
        self._is_kept_IR = np.zeros((source.num_replicas, len(nodes)), dtype=bool)
        self._is_kept_IR[groups, holders] = True
        is_near = np.zeros((source.num_replicas, int(nodes.max()) + 1), dtype=bool)
        is_near[groups, nodes[holders]] = True
        if not (is_near.any(axis=1).all() and all(map(len, self._receivers))):
            raise ValueError("a replica of the layouts does not hold all units of all tensors")
        of_home = replicas[:, None] == np.arange(home.num_replicas)
        between_IJ = (~is_near[:, nodes[takers]]).astype(np.int64) @ of_home
        missing_IJ = (~self._is_kept_IR[:, takers]).astype(np.int64) @ of_home
        if heuristics:
            costs = between_IJ * (len(nodes) + 1) + missing_IJ
            is_choice = costs == costs.min(axis=1, keepdims=True)
        else:
            is_choice = np.arange(source.num_replicas)[:, None] % home.num_replicas == np.arange(home.num_replicas)
        links = np.where((between_IJ * is_choice).any(axis=1), BETWEEN, WITHIN)
        alike: dict[bytes, list[int]] = {}
        for number, row in enumerate(is_choice):
            alike.setdefault(row.tobytes() + bytes([links[number]]), []).append(number)
        #: Source replicas, the home replicas that are equally good for them, and the link that most of it takes.
        self._choices = [
            (np.array(numbers), np.flatnonzero(is_choice[numbers[0]]), int(links[numbers[0]]))
            for numbers in alike.values()
        ]

    def assigned(self, numbers: Indices, received: Indices, size: int) -> tuple[Indices, Indices, Indices, Flags]:
        """Slices, source replicas and destinations, and whether the destination holds the slice in the replica.

        Args:
            numbers: of the slices, of ``size`` bytes each.
            received: [2, R] bytes so far.
        """
        found: list[tuple[Indices, Indices, Indices]] = []
        for replicas, homes, link in self._choices:
            own, of_replica = np.tile(numbers, len(replicas)), np.repeat(replicas, len(numbers))
            if len(homes) > 1:
                levels = np.array([[received[link, self._receivers[home]].max() for home in homes]])
                times = filled(levels, np.ones_like(levels, dtype=bool), size, np.array([len(own)]))[0]
            else:
                times = np.array([len(own)])
            ends = np.cumsum(times)
            for home, begin, end in zip(homes, ends - times, ends, strict=True):
                takers = self._receivers[home]
                whole, part = (np.repeat(column[begin:end], len(takers)) for column in (own, of_replica))
                found.append((whole, part, np.tile(takers, end - begin)))
        own, of_replica, destinations = (np.concatenate(parts) for parts in zip(*found, strict=True))
        return own, of_replica, destinations, self._is_kept_IR[of_replica, destinations]
