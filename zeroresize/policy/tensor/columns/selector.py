"""What a ratio γ means on one rank: which columns of which layer it prunes or lends. They change at epochs' ends only,
and where units move.

Each layer has an order of its columns for the epoch; a ratio prunes the first of them, so a change of γ adds to or
takes from the same set. The order follows from what is known of the columns that the rank holds, and from their homes.

``K`` columns of a layer on this rank, whatever it owns now.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from zeroresize.config import BalanceConfig
from zeroresize.config.keys import PRIORITY_MODES
from zeroresize.plan.group import Relief
from zeroresize.policy.tensor.columns.order import decided_columns, num_lent, order_of_homes, pruned_of_order
from zeroresize.policy.tensor.columns.priority import ColumnPriority, budget_ratios, relative_scores
from zeroresize.policy.tensor.rules.paper import pridiff_ratios
from zeroresize.policy.tensor.rules.sharing import pruned_by_segment

Columns = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Names of the layers between two synchronisations of the ranks, one after the other.
Segments = Sequence[Sequence[str]]

logger = logging.getLogger(__name__)

#: A first epoch of more steps than this is likely one whose end nobody tells.
_LONG_EPOCH = 20_000


@dataclass
class _UnderWay:
    """The iterations since ``relief`` was last changed, all of which pruned ``columns``."""

    relief: Relief | None = None
    columns: Mapping[str, Columns] = field(default_factory=dict)
    num_steps: int = 0


@dataclass
class SelectorState:
    """Hold what a selector knows, from which a resumed run goes on; it is the rank's own.

    Attributes:
        columns: what is known of every layer's columns, by name.
        epoch: number of epochs that have ended.
        steps_of_epoch: iterations of the epoch so far.
        steps_unseen: of how many of them, the first ones, the statistic will tell nothing, as it began anew after them.
        steps_of_last_epoch: iterations of the epoch before.
    """

    columns: dict[str, ColumnPriority]
    epoch: int = 0
    steps_of_epoch: int = 0
    steps_unseen: int = 0
    steps_of_last_epoch: int = 0


class ColumnSelector:
    """Decide for one rank which columns a ratio prunes and which it lends, by ``config.mode``.

    Args:
        config: how to balance.
        rank: this rank within the group, for the seed of random orders.
        num_columns: K of every layer at even shares, by name, in the order of the model.
        costs: of every layer's products, in any unit.
        segments: None for all layers in one.

    Attributes:
        state: what is known of columns, and how far the epoch is.
        homes: of every layer [K]: for each column the rank that holds it at even shares × the layer's columns there +
            its place there.
        edition: how often the columns were ordered: the same ratio means other columns in another edition.
    """

    def __init__(
        self,
        config: BalanceConfig,
        rank: int,
        num_columns: Mapping[str, int],
        costs: Mapping[str, float],
        segments: Segments | None = None,
    ) -> None:
        self._config, self._costs, self._costs_at_home = config, dict(costs), dict(costs)
        self._segments: Segments = [list(num_columns)] if segments is None else segments
        self._num_at_home = dict(num_columns)
        self.homes: dict[str, Columns] = {
            name: rank * columns + np.arange(columns) for name, columns in num_columns.items()
        }
        self.state = SelectorState({name: ColumnPriority(columns) for name, columns in num_columns.items()})
        self.edition = 0
        self._orders: dict[str, Columns] = {}
        self._selected: tuple[Relief, dict[str, Columns]] | None = None
        self._under_way = _UnderWay()
        self._order_columns()
        coarse = [name for name, columns in num_columns.items() if 2 * config.block > columns]
        if coarse and config.mode != "off":
            names = ", ".join(coarse)
            logger.warning("block=%d is more than half of the columns of %s: never pruned", config.block, names)

    def layer_ratios(self, relief: Relief) -> dict[str, float]:
        """Return γ_k that every layer prunes, before rounding to blocks.

        Time that is spared in one segment makes up for nothing in another, so each prunes γ, or where whole units gave
        this rank another share of one than of the next, so much that it computes equally much in all; the paper's rule
        for PriDiff, and a forced ratio, are one for all layers.
        """
        ratios = dict.fromkeys(self._costs, relief.pruned)
        if not relief.is_forced:
            works = self._costs_at_home
            owned = [self._costs[name] / works[name] if works[name] else 1.0 for name in works]
            by_layer = pruned_by_segment(relief.pruned, relief.lent, owned, list(works.values()))
            ratios = dict(zip(works, by_layer, strict=True))
        if self._config.differentiates_layers and relief.pruned > 0.0:
            is_one_for_all = self._config.paper.pridiff_rule == "paper"
            for names in [list(ratios)] if is_one_for_all else self._segments:
                ratio = relief.pruned if is_one_for_all else ratios[names[0]]
                ratios |= zip(names, self._differentiated(names, ratio, relief.lent), strict=True)
        return ratios

    def _differentiated(self, names: Sequence[str], ratio: float, lent: float) -> list[float]:
        """γ_k of the layers ``names`` that are to prune ``ratio`` together; what is lent counts towards γ_max."""
        config, max_ratio = self._config, max(self._config.max_ratio - lent, 0.0)
        ratio = min(ratio, max_ratio)
        w_vars = [self.state.columns[name].w_var for name in names]
        if config.paper.pridiff_rule == "paper":
            return pridiff_ratios(config, w_vars, ratio, self.state.steps_of_last_epoch, max_ratio)
        if config.priority == "activation":
            w_vars = [relative_scores(w_var) for w_var in w_vars]
        return budget_ratios(w_vars, [self._costs[name] for name in names], ratio, max_ratio=max_ratio)

    def pruned_columns(self, relief: Relief) -> dict[str, Columns]:
        """Return the columns of every layer that are pruned, least important first; empty where none.

        Unless a ratio is forced, those that are lent count towards γ_max.
        """
        if self._selected is None or self._selected[0] != relief:
            ratios = self.layer_ratios(relief)
            self._selected = relief, {name: self._pruned_of(name, ratio, relief) for name, ratio in ratios.items()}
        return self._selected[1]

    def _pruned_of(self, name: str, ratio: float, relief: Relief) -> Columns:
        order, block = self._orders[name], self._config.block
        if relief.is_forced:
            return pruned_of_order(order, ratio, block)
        lent_share = num_lent(len(order), relief.lent, is_forced=False) / max(len(order), 1)
        return decided_columns(order, ratio, block, max(self._config.max_ratio - lent_share, 0.0))

    def lent_columns(self, relief: Relief) -> dict[str, Columns]:
        """Return the columns of every layer that a rank lends: the most important ones, the very most at the end."""
        counts = {
            name: num_lent(len(order), relief.lent, is_forced=relief.is_forced) for name, order in self._orders.items()
        }
        return {name: order[len(order) - counts[name] :] for name, order in self._orders.items()}

    def count_step(self, relief: Relief) -> None:
        """Count one iteration that ran under ``relief``."""
        if relief != self._under_way.relief:
            self._count_pruned_steps()
            self._under_way = _UnderWay(relief, self.pruned_columns(relief))
        self._under_way.num_steps += 1
        self.state.steps_of_epoch += 1
        if self._config.mode in PRIORITY_MODES and self.state.epoch == 0 and self.state.steps_of_epoch == _LONG_EPOCH:
            logger.warning(
                "%d steps and no epoch has ended: columns stay drawn at random until Balancer.epoch_end() is called or "
                "iters_per_epoch is set",
                _LONG_EPOCH,
            )

    @property
    def pruned_steps(self) -> dict[str, NDArray[np.int64]]:
        """Return, for every layer, [K] in how many steps so far each column was pruned."""
        self._count_pruned_steps()
        return {name: known.pruned_steps for name, known in self.state.columns.items()}

    def end_epoch(self, fresh: Mapping[str, NDArray[np.float64]], *, incremental: bool, adds_up: bool = False) -> None:
        """Learn from the epoch that ends and order the columns for the next.

        Args:
            fresh: the statistic of every layer's columns; empty where none is taken.
            incremental: see :meth:`~zeroresize.policy.tensor.columns.priority.ColumnPriority.update`.
            adds_up: whether the statistic adds up over steps: then one that has not seen the whole epoch counts as if
                the rest had been like what it saw.
        """
        self._count_pruned_steps()
        unseen, num_steps = self.state.steps_unseen, self.state.steps_of_epoch
        scale = num_steps / (num_steps - unseen) if num_steps > unseen else np.nan
        for name, values in fresh.items():
            known = self.state.columns[name]
            is_scaled = unseen > 0 and (adds_up or num_steps == unseen)
            was_pruned = 2 * known.pruned_of_epoch > num_steps
            known.update(values * scale if is_scaled else values, was_pruned, incremental=incremental)
        self.state.steps_of_last_epoch = self.state.steps_of_epoch or self.state.steps_of_last_epoch
        for known in self.state.columns.values():
            known.pruned_of_epoch[:] = 0
        self.state.steps_of_epoch = self.state.steps_unseen = 0
        self.state.epoch += 1
        self._order_columns()

    def known_of(self, name: str, columns: Columns) -> Floats:
        """Return what is known of some columns of a layer, which :meth:`hold` takes where units moved to; [4, columns].

        That is w_var, age, and in how many steps so far, and in how many of the epoch, the column was pruned.
        """
        self._count_pruned_steps()
        return np.stack([row[columns].astype(np.float64) for row in self.state.columns[name].rows])

    def hold(
        self,
        homes: Mapping[str, Columns],
        arrived: Mapping[str, tuple[Columns, Floats]] | None = None,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        """Hold other columns of some layers from now on, in the epoch that is under way.

        Columns that stay keep what is known of them. All are ordered anew by the rule of an epoch's beginning: it
        follows from the columns alone, so a resumed run has the same order.

        Args:
            homes: as :attr:`homes`, of the layers that change.
            arrived: of a layer the homes of columns that came, and what :meth:`known_of` told of them where they were.
                What is held and known from nowhere begins anew.
            costs: of the products of every layer, as this rank owns it now; None where they stay.
        """
        self._count_pruned_steps()
        self._under_way = _UnderWay()  # of columns that were held
        for name, of_layer in homes.items():
            others = (arrived or {}).get(name, (np.empty(0, np.int64), np.empty((4, 0))))
            known_homes = np.concatenate([self.homes[name], others[0]])
            known = np.concatenate([self.known_of(name, np.arange(len(self.homes[name]))), others[1]], axis=1)
            held = np.repeat([[np.nan], [0.0], [0.0], [0.0]], len(of_layer), axis=1)
            _, here, there = np.intersect1d(of_layer, known_homes, return_indices=True)
            held[:, here] = known[:, there]
            self.state.columns[name] = priority = ColumnPriority(len(of_layer))
            priority.w_var = held[0]
            priority.age, priority.pruned_steps, priority.pruned_of_epoch = held[1:].astype(np.int64)
            self.homes[name] = of_layer
        if costs is not None:
            self._costs = dict(costs)
        self._order_columns()

    def counted(self) -> SelectorState:
        """Return the state, in which the steps that are under way count."""
        self._count_pruned_steps()
        return self.state

    def go_on_from(self, state: SelectorState, homes: Mapping[str, Columns] | None = None) -> None:
        """Go on from the :meth:`counted` state of a selector of the same layers, and hold the columns that it tells of.

        Args:
            state: whose layers have as many columns as there are homes.
            homes: as :attr:`homes`, of the columns when it was saved; None for those that are held now.
        """
        self.state = replace(state, columns={name: state.columns[name] for name in self.homes})  # in their order
        self.homes |= homes or {}
        self._order_columns()

    def _count_pruned_steps(self) -> None:
        for name, columns in self._under_way.columns.items():
            known = self.state.columns[name]
            known.pruned_steps[columns] += self._under_way.num_steps
            known.pruned_of_epoch[columns] += self._under_way.num_steps
        self._under_way.num_steps = 0

    def _order_columns(self) -> None:
        """Order the columns by what is known of them; nothing of the last order is selected any more."""
        config, epoch = self._config, self.state.epoch
        for position, (name, priority) in enumerate(self.state.columns.items()):
            order = order_of_homes(config, self.homes[name], self._num_at_home[name], epoch=epoch, layer=position)
            if config.mode in PRIORITY_MODES:
                order = priority.order(ageing=config.ageing, block=config.block, tie_break=order)
            self._orders[name] = order
        self._selected, self._under_way = None, _UnderWay()
        self.edition += 1
