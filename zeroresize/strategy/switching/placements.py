"""The strategies of a switchable model on one rank: what it holds under each, and the ways from one to another."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from zeroresize.comm.collectives import group_rank
from zeroresize.comm.groups import free_group_number
from zeroresize.plan.layout import Layout
from zeroresize.plan.strategy import Strategy
from zeroresize.resharding.agreement import make_alike
from zeroresize.resharding.transaction import Participants
from zeroresize.strategy.placement.placement import Placement, StrategyGroups
from zeroresize.strategy.placement.whole_layers import WholeLayers
from zeroresize.strategy.switching.switch import SwitchRoute, TravelTypes
from zeroresize.utils.torch_state import synchronize


class Placements(dict[Strategy, Placement]):
    """Holds the placements of strategies; strategies that divide a model alike share one.

    Args:
        nodes: [R], on which node each rank is.
        max_bytes: of the messages that a rank sends and receives at once in a switch.
        types: in which weights and gradients travel.
    """

    def __init__(
        self, layers: WholeLayers, nodes: Sequence[int], job: Participants, max_bytes: int, types: TravelTypes
    ) -> None:
        super().__init__()
        self._layers, self._nodes, self._job, self._types, self._max_bytes = layers, nodes, job, types, max_bytes
        self._groups = StrategyGroups(job.process_group)
        self._routes: dict[tuple[Strategy | None, ...], SwitchRoute] = {}

    def __missing__(self, strategy: Strategy) -> NoReturn:
        known = ", ".join(map(str, self))
        raise ValueError(f"strategy {strategy} is none of the model's: {known}; add(strategy) takes another")

    def place(self, layouts: Mapping[Strategy, Layout]) -> None:
        """Take strategies, each with its process groups and modules, on all ranks or on none; collective."""
        numbers, rank = itertools.count(next_group_number(self._job)), group_rank(self._job.process_group)

        def made() -> dict[Strategy, Placement]:
            placements = dict(self)
            for strategy, layout in layouts.items():
                if strategy in placements:
                    continue
                known = (each for each in placements.values() if self._divides_alike(each, strategy, layout))
                placement = next(known, None)
                if placement is None:
                    groups = self._groups.of(strategy, numbers)
                    placement = Placement.of(strategy, layout, self._layers, groups, rank, self._job.device)
                placements[strategy] = placement
            return placements

        try:
            placements = make_alike(self._job.meet, made, len, "how many strategies the model has")
        except Exception:
            self._groups.keep(placement.strategy for placement in self.values())
            raise
        self.update(placements)

    def add(self, strategy: Strategy) -> None:
        """Take a further strategy, on all ranks or on none; collective.

        Raises:
            ValueError: for one that does not fit the ranks or layers.
            RuntimeError: if ranks differ in it.
        """
        specs, num_ranks = [tensor.spec for tensor in self._layers.tensors], len(self._nodes)
        layout = make_alike(
            self._job.meet,
            lambda: strategy.layout(specs, num_ranks, self._layers.num_layers),
            lambda _: strategy.as_dict(),
            "the strategy to add",
        )
        self.place({strategy: layout})

    def forget(self, strategy: Strategy, in_use: Collection[Strategy]) -> None:
        """Give up a strategy, with the groups, modules and routes that no other one needs; collective.

        Raises:
            ValueError: for a strategy that the model does not have, or that is ``in_use``.
            RuntimeError: if ranks differ in it.
        """

        def checked() -> Placement:
            if strategy in in_use:
                raise ValueError(f"strategy {strategy} cannot be forgotten: it is the optimizer's, or in force")
            return self[strategy]

        placement = make_alike(self._job.meet, checked, lambda _: strategy.as_dict(), "the strategy to forget")
        del self[strategy]
        if placement not in self.values():
            self._routes = {key: route for key, route in self._routes.items() if placement.strategy not in key}
            self._keep_groups_of(self.values())

    def close(self) -> None:
        """Destroy the process groups of all strategies, on all ranks; the placements stay."""
        self._keep_groups_of(())

    def route(self, before: Placement, after: Placement | None, optimizer_placement: Placement | None) -> SwitchRoute:
        """Return the route of a switch, planned once.

        Args:
            after: where the weights go; None where they do not travel.
            optimizer_placement: where the gradients go; None where they stay.
        """
        ends = before, after, optimizer_placement
        key = tuple(None if placement is None else placement.strategy for placement in ends)
        if key not in self._routes:
            self._routes[key] = SwitchRoute.of(*ends, self._nodes, self._max_bytes, self._types)
        return self._routes[key]

    def _keep_groups_of(self, placements: Iterable[Placement]) -> None:
        """Destroy the other groups, on all ranks."""
        synchronize(self._job.device)
        self._groups.keep(placement.strategy for placement in placements)

    def _divides_alike(self, placement: Placement, strategy: Strategy, layout: Layout) -> bool:
        known = placement.strategy
        partitions = (each.partition(self._layers.num_layers) for each in (known, strategy))
        return (
            (known.degrees, known.ranks) == (strategy.degrees, strategy.ranks)
            and len({each.boundaries for each in partitions}) == 1
            and np.array_equal(placement.layout.begins, layout.begins)
            and np.array_equal(placement.layout.ends, layout.ends)
        )


def next_group_number(job: Participants) -> int:
    """Return a number from which on no rank has given any to a process group; collective."""
    return int(max(number for number, *_ in job.meet(float(free_group_number()), 0.0)))
