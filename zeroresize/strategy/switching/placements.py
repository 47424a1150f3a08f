"""The strategies of a switchable model on one rank: what it holds under each, and the ways from one to another."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank
from zeroresize.comm.groups import free_group_number
from zeroresize.plan.layout import Layout
from zeroresize.plan.strategy import Strategy
from zeroresize.resharding.agreement import meet_prepared
from zeroresize.strategy.placement.placement import Placement
from zeroresize.strategy.placement.strategy_groups import StrategyGroups
from zeroresize.strategy.placement.whole_layers import WholeLayers
from zeroresize.strategy.switching.rank_agreement import RankAgreement
from zeroresize.strategy.switching.switch import SwitchRoute, TravelTypes


class Placements(Mapping[Strategy, Placement]):
    """Holds the placements of strategies; strategies that divide a model alike share one.

    Args:
        layers: the undivided model.
        nodes: [R], on which node each rank is.
        process_group: of the job's ranks.
        device: of the weights.
        max_bytes: of the messages that a rank sends and receives at once in a switch.
        types: in which weights and gradients travel.
    """

    def __init__(
        self,
        layers: WholeLayers,
        nodes: Sequence[int],
        agreement: RankAgreement,
        process_group: ProcessGroup,
        device: torch.device,
        max_bytes: int,
        types: TravelTypes,
    ) -> None:
        self._layers, self._nodes, self._agreement, self._types = layers, nodes, agreement, types
        self._rank, self._device, self._max_bytes = group_rank(process_group), device, max_bytes
        self._groups = StrategyGroups(process_group)
        self._placements: dict[Strategy, Placement] = {}
        self._routes: dict[tuple[Strategy | None, ...], SwitchRoute] = {}
        self._setups_s: list[float] = []

    def __getitem__(self, strategy: Strategy) -> Placement:
        """Return the placement of a strategy.

        Raises:
            ValueError: for a strategy that the model does not have.
        """
        if strategy not in self._placements:
            known = ", ".join(map(str, self._placements))
            raise ValueError(f"strategy {strategy} is none of the model's: {known}; add(strategy) takes another")
        return self._placements[strategy]

    def __contains__(self, strategy: object) -> bool:
        return strategy in self._placements

    def __iter__(self) -> Iterator[Strategy]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    @property
    def setup_s(self) -> float | None:
        """Return the mean seconds in which this rank made the groups and modules of a strategy.

        Only strategies for which groups had to be made count; None before there was one.
        """
        return statistics.fmean(self._setups_s) if self._setups_s else None

    def place(self, layouts: Mapping[Strategy, Layout]) -> None:
        """Take strategies, each with its process groups and modules, on all ranks or on none; collective.

        Raises:
            RuntimeError: if a rank does not come, or cannot make them.
        """
        free = [number for number, *_ in meet_prepared(self._agreement.meet, (float(free_group_number()), 0.0))]
        numbers = itertools.count(int(max(free)))
        setups_s: list[float] = []

        def made() -> dict[Strategy, Placement]:
            placements = dict(self._placements)
            for strategy, layout in layouts.items():
                if strategy in placements:
                    continue
                known = placements.values()
                placement = next((one for one in known if self._divides_alike(one, strategy, layout)), None)
                if placement is None:
                    begin, num_made = time.perf_counter(), self._groups.num_made
                    groups = self._groups.of(strategy, numbers)
                    placement = Placement.of(strategy, layout, self._layers, groups, self._rank, self._device)
                    if self._groups.num_made > num_made:
                        setups_s.append(time.perf_counter() - begin)
                placements[strategy] = placement
            return placements

        try:
            self._placements = self._agreement.make_alike(made, len, "how many strategies the model has")
        except Exception:
            self._groups.keep(placement.strategy for placement in self._placements.values())
            raise
        self._setups_s += setups_s

    def add(self, strategy: Strategy) -> None:
        """Take a further strategy, on all ranks or on none; collective.

        Raises:
            ValueError: for one that does not fit the ranks or layers.
            RuntimeError: if ranks differ in it, or one does not come.
        """
        specs, num_ranks = [one.spec for one in self._layers.tensors], len(self._nodes)
        layout = self._agreement.make_alike(
            lambda: strategy.layout(specs, num_ranks, self._layers.num_layers),
            lambda _: strategy.as_dict(),
            "the strategy to add",
        )
        self.place({strategy: layout})

    def forget(self, strategy: Strategy, in_use: Collection[Strategy]) -> None:
        """Give up a strategy, with the groups, modules and routes that no other one needs; collective.

        Args:
            in_use: those that cannot be given up.

        Raises:
            ValueError: for a strategy that the model does not have, or that is in use.
            RuntimeError: if ranks differ in it, or one does not come.
        """

        def checked() -> Placement:
            if strategy in in_use:
                raise ValueError(f"strategy {strategy} cannot be forgotten: it is the optimizer's, or in force")
            return self[strategy]

        placement = self._agreement.make_alike(checked, lambda _: strategy.as_dict(), "the strategy to forget")
        del self._placements[strategy]
        left = list(self._placements.values())
        if placement not in left:
            self._routes = {key: route for key, route in self._routes.items() if placement.strategy not in key}
            self._keep_groups_of(left)

    def close(self) -> None:
        """Destroy the process groups of all strategies, on all ranks; the placements stay."""
        self._keep_groups_of(())

    def route(self, before: Placement, after: Placement | None, optimizer_placement: Placement | None) -> SwitchRoute:
        """Return the route of a switch, planned once.

        Args:
            after: where the weights go; None where they do not travel.
            optimizer_placement: where the gradients go; None where they stay.
        """
        key = tuple(None if one is None else one.strategy for one in (before, after, optimizer_placement))
        if key not in self._routes:
            self._routes[key] = SwitchRoute.of(
                before,
                after,
                optimizer_placement,
                self._layers.tensors,
                self._nodes,
                self._rank,
                self._max_bytes,
                self._types,
            )
        return self._routes[key]

    def _keep_groups_of(self, placements: Iterable[Placement]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._groups.keep(placement.strategy for placement in placements)

    def _divides_alike(self, placement: Placement, strategy: Strategy, layout: Layout) -> bool:
        known = placement.strategy
        partitions = (one.partition(self._layers.num_layers) for one in (known, strategy))
        return (
            (known.degrees, known.ranks) == (strategy.degrees, strategy.ranks)
            and len({one.boundaries for one in partitions}) == 1
            and np.array_equal(placement.layout.begins, layout.begins)
            and np.array_equal(placement.layout.ends, layout.ends)
        )
