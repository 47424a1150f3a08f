"""What a ratio γ means on one rank: which columns of which layer it prunes or lends. They change at epochs' ends only.

Each layer has an order of its columns for the epoch; a ratio prunes the first of them, so a change of γ adds to or
takes from the same set.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroresize.config import BalanceConfig
from zeroresize.config.keys import PRIORITY_MODES
from zeroresize.plan.group import Relief
from zeroresize.policy.tensor.columns.differentiated import budget_ratios, paper_ratios, relative_scores
from zeroresize.policy.tensor.columns.order import decided_columns, num_lent, order_without_priority, pruned_of_order
from zeroresize.policy.tensor.columns.priority import ColumnPriority
from zeroresize.utils.state_checks import Check, any_number, count, each, flag, keyed, row, share

Columns = NDArray[np.int64]
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


class ColumnSelector:
    """Decide for one rank which columns a ratio prunes and which it lends, by ``config.mode``.

    Args:
        config: how to balance.
        rank: this rank within the group, for the seed of random orders.
        num_columns: K of every layer by name, in the order of the model.
        costs: of every layer's products, in any unit.
        segments: None for all layers in one.

    Attributes:
        epoch: number of epochs that have ended.
        steps_of_epoch: iterations of the epoch so far.
    """

    def __init__(
        self,
        config: BalanceConfig,
        rank: int,
        num_columns: Mapping[str, int],
        costs: Mapping[str, float],
        segments: Segments | None = None,
    ) -> None:
        self._config, self._rank, self._costs = config, rank, dict(costs)
        self._segments: Segments = [list(num_columns)] if segments is None else segments
        self._priorities = {name: ColumnPriority(columns) for name, columns in num_columns.items()}
        self._steps: Counter[Relief] = Counter()
        self._steps_of_last_epoch = self.steps_of_epoch = 0
        self.epoch = 0
        self._pruned_steps = {name: np.zeros(columns, dtype=np.int64) for name, columns in num_columns.items()}
        self._selected: tuple[Relief, dict[str, Columns]] | None = None
        self._under_way = _UnderWay()
        self._orders = self._orders_of_epoch()
        coarse = [name for name, columns in num_columns.items() if 2 * config.block > columns]
        if coarse and config.mode != "off":
            names = ", ".join(coarse)
            logger.warning("block=%d is more than half of the columns of %s: never pruned", config.block, names)

    def layer_ratios(self, relief: Relief) -> dict[str, float]:
        """Return γ_k that every layer prunes, before rounding to blocks.

        Time that is spared in one segment makes up for nothing in another, so each prunes γ; the paper's rule for
        PriDiff is one for all layers.
        """
        ratios = dict.fromkeys(self._costs, relief.pruned)
        if self._config.differentiates_layers and relief.pruned > 0.0:
            for names in [list(ratios)] if self._config.paper.pridiff_rule == "paper" else self._segments:
                ratios |= zip(names, self._differentiated(names, relief), strict=True)
        return ratios

    def _differentiated(self, names: Sequence[str], relief: Relief) -> list[float]:
        """γ_k of the layers ``names`` that are to prune γ together; what is lent counts towards γ_max."""
        config, max_ratio = self._config, max(self._config.max_ratio - relief.lent, 0.0)
        ratio = min(relief.pruned, max_ratio)
        w_vars = [self._priorities[name].w_var for name in names]
        if config.paper.pridiff_rule == "paper":
            theta = config.paper.theta_iter * self._steps_of_last_epoch
            return paper_ratios(w_vars, ratio, theta=theta, alpha=config.paper.alpha, max_ratio=max_ratio)
        if config.priority == "activation":
            w_vars = [relative_scores(w_var) for w_var in w_vars]
        return budget_ratios(w_vars, [self._costs[name] for name in names], ratio, max_ratio=max_ratio)

    def pruned_columns(self, relief: Relief) -> dict[str, Columns]:
        """Return the columns of every layer that are pruned, least important first; empty where none.

        Unless a ratio is forced, those that are lent count towards γ_max.
        """
        if self._selected is None or self._selected[0] != relief:
            self._selected = (
                relief,
                {name: self._pruned_of(name, g, relief) for name, g in self.layer_ratios(relief).items()},
            )
        return self._selected[1]

    def _pruned_of(self, name: str, ratio: float, relief: Relief) -> Columns:
        order, block = self._orders[name], self._config.block
        if relief.is_forced:
            return pruned_of_order(order, ratio, block)
        lent_share = num_lent(len(order), relief.lent, is_forced=False) / len(order)
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
        self._steps[relief] += 1
        self.steps_of_epoch += 1
        if self._config.mode in PRIORITY_MODES and self.epoch == 0 and self.steps_of_epoch == _LONG_EPOCH:
            logger.warning(
                "%d steps and no epoch has ended: columns stay drawn at random until Balancer.epoch_end() is called or "
                "iters_per_epoch is set",
                _LONG_EPOCH,
            )

    @property
    def pruned_steps(self) -> dict[str, NDArray[np.int64]]:
        """Return, for every layer, [K] in how many steps so far each column was pruned."""
        self._count_pruned_steps()
        return self._pruned_steps

    def end_epoch(self, fresh: Mapping[str, NDArray[np.float64]], *, incremental: bool) -> None:
        """Learn from the epoch that ends and order the columns for the next.

        Args:
            fresh: the statistic of every layer's columns; empty where none is taken.
            incremental: see :meth:`~zeroresize.policy.tensor.columns.priority.ColumnPriority.update`.
        """
        self._count_pruned_steps()
        pruned = self.pruned_columns(self._relief_of_most_steps())
        for name, values in fresh.items():
            priority = self._priorities[name]
            was_pruned = np.zeros(priority.num_columns, dtype=bool)
            was_pruned[pruned[name]] = True
            priority.update(values, was_pruned, incremental=incremental)
        self._steps_of_last_epoch = self.steps_of_epoch or self._steps_of_last_epoch
        self._steps.clear()
        self.steps_of_epoch = 0
        self.epoch += 1
        self._order_columns()

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; they are this rank's own, unlike the controller's."""
        return {
            "epoch": self.epoch,
            "steps": [(one.pruned, one.lent, one.is_forced, steps) for one, steps in self._steps.items()],
            "steps_of_last_epoch": self._steps_of_last_epoch,
            "pruned_steps": {name: steps.tolist() for name, steps in self.pruned_steps.items()},
            "w_var": {name: priority.w_var.tolist() for name, priority in self._priorities.items()},
            "age": {name: priority.age.tolist() for name, priority in self._priorities.items()},
        }

    @property
    def state_check(self) -> Check:
        """Return the check of what :meth:`load_state_dict` can take over."""
        columns = {name: priority.num_columns for name, priority in self._priorities.items()}
        return keyed(
            {
                "epoch": count,
                "steps": each(row(share, share, flag, count)),
                "steps_of_last_epoch": count,
                "pruned_steps": keyed({name: each(count, number_of) for name, number_of in columns.items()}),
                "w_var": keyed({name: each(any_number, number_of) for name, number_of in columns.items()}),
                "age": keyed({name: each(count, number_of) for name, number_of in columns.items()}),
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same layers."""
        self.epoch = state["epoch"]
        self._steps = Counter(
            {Relief(pruned, lent, is_forced=is_forced): steps for pruned, lent, is_forced, steps in state["steps"]}
        )
        self.steps_of_epoch = sum(self._steps.values())
        self._steps_of_last_epoch = state["steps_of_last_epoch"]
        for name, priority in self._priorities.items():
            self._pruned_steps[name] = np.asarray(state["pruned_steps"][name], dtype=np.int64)
            priority.w_var = np.asarray(state["w_var"][name], dtype=np.float64)
            priority.age = np.asarray(state["age"][name], dtype=np.int64)
        self._order_columns()

    def _count_pruned_steps(self) -> None:
        for name, columns in self._under_way.columns.items():
            self._pruned_steps[name][columns] += self._under_way.num_steps
        self._under_way.num_steps = 0

    def _relief_of_most_steps(self) -> Relief:
        """Whose columns were pruned in more than half of the epoch's iterations: the lower median.

        Sets grow with γ, so a column was pruned in most iterations exactly if it is pruned at the median.
        """
        steps_before = (self.steps_of_epoch - 1) // 2
        for relief, steps in sorted(self._steps.items()):
            steps_before -= steps
            if steps_before < 0:
                return relief
        return Relief()

    def _order_columns(self) -> None:
        """Order the columns of the epoch that begins; nothing of the last one's is selected any more."""
        self._orders, self._selected, self._under_way = self._orders_of_epoch(), None, _UnderWay()

    def _orders_of_epoch(self) -> dict[str, Columns]:
        config = self._config
        orders = {}
        for position, (name, priority) in enumerate(self._priorities.items()):
            order = order_without_priority(
                config, priority.num_columns, epoch=self.epoch, rank=self._rank, layer=position
            )
            if config.mode in PRIORITY_MODES:
                order = priority.order(ageing=config.ageing, block=config.block, tie_break=order)
            orders[name] = order
        return orders
