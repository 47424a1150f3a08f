"""ZERO-Pri: a layer's columns in the order in which they may be pruned, least important first (paper, section III-B);
and ZERO-PriDiff: how many of them.

A column's importance is its ``w_var``: how much it moved in the last epoch in which it was computed, or another
statistic of the same kind. Equal inputs give equal orders, on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.tensor.columns.order import columns_of_blocks
from zeroresize.policy.tensor.costs import LEAST_SHARE

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass
class ColumnPriority:
    """Hold what is known of one layer's K columns.

    Attributes:
        num_columns: K.
        w_var: [K], the statistic of each column; NaN as long as none was taken while it was computed.
        age: [K], for how many epochs in a row each column has been pruned.
        pruned_steps, pruned_of_epoch: [K], in how many steps so far, and of this epoch, each column was pruned.
    """

    num_columns: int
    w_var: Floats = field(init=False)
    age: Counts = field(init=False)
    pruned_steps: Counts = field(init=False)
    pruned_of_epoch: Counts = field(init=False)

    def __post_init__(self) -> None:
        self.w_var = np.full(self.num_columns, np.nan)
        self.age, self.pruned_steps, self.pruned_of_epoch = np.zeros((3, self.num_columns), dtype=np.int64)

    def after_loading(self) -> None:
        """Check that all numbers are there; ValueError if not."""
        if any(row.shape != (self.num_columns,) for row in self.rows):
            raise ValueError(f"rows of {self.num_columns} numbers are needed")

    @property
    def rows(self) -> tuple[Floats, Counts, Counts, Counts]:
        """Return all that is known, [K] each."""
        return self.w_var, self.age, self.pruned_steps, self.pruned_of_epoch

    def update(self, fresh: Floats, was_pruned: NDArray[np.bool_], *, incremental: bool) -> None:
        """Take the statistic of the epoch that ends.

        Args:
            fresh: [K], not negative. A value that is not finite leaves what was known.
            was_pruned: [K], whether each column was pruned in most of the epoch's iterations.
            incremental: leave ``w_var`` of pruned columns as it was. Their weights hardly moved *because* they were
                pruned, so a fresh value would prune them for ever. False for a statistic that pruning does not touch.
        """
        is_new = np.isfinite(fresh) & ~(was_pruned & incremental)
        self.w_var = np.where(is_new, fresh, self.w_var)
        self.age = np.where(was_pruned, self.age + 1, 0)

    def scores(self, ageing: float) -> Floats:
        """Return [K] scores, smallest pruned first: w_var + ageing · age · mean(w_var), w_var 0 where nothing is known.

        So columns that were pruned before anything could be known of them go on being pruned: to swap them for those
        that were trained instead costs far more accuracy than any choice of columns wins (docs/benchmarks.md). The rule
        of keeping a pruned column's old w_var does not by itself end its pruning; its age does, for any ``ageing`` > 0.
        ``ageing`` = 0 is the paper's rule.
        """
        is_known = ~np.isnan(self.w_var)
        scale = self.w_var[is_known].mean() if is_known.any() else 1.0
        return np.where(is_known, self.w_var, 0.0) + ageing * self.age * scale

    def order(self, *, ageing: float, block: int, tie_break: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the columns, those to be pruned first at the front; a block's columns stay together.

        Among equals the one pruned for longer comes later, then ``tie_break`` decides.

        Args:
            ageing: how much each epoch of having been pruned raises a column's score, in means of w_var.
            block: so many neighbouring columns are ranked together, by their mean score.
            tie_break: [K], a permutation of the columns with blocks kept together, such as ``random_order``'s.
        """
        if self.num_columns == 0:
            return tie_break
        starts = np.arange(0, self.num_columns, block)
        sizes = np.diff(np.append(starts, self.num_columns))
        score = np.add.reduceat(self.scores(ageing), starts) / sizes
        age = np.add.reduceat(self.age, starts) / sizes
        rank = np.empty(self.num_columns, dtype=np.int64)
        rank[tie_break] = np.arange(self.num_columns)
        return columns_of_blocks(np.lexsort((rank[starts], age, score)), self.num_columns, block=block)


# ---- how many columns each layer prunes: more where weights move less (section III-C) -------------------------------
# The paper's rule counts columns below a fixed threshold θ and so may prune far more, or less, than was asked for. Ours
# finds the threshold at which all layers together prune just what was asked for.


def budget_ratios(w_vars: Sequence[Floats], costs: Sequence[float], ratio: float, *, max_ratio: float) -> list[float]:
    """Return γ_k = min(γ_max, share of layer k's columns with w_var < τ) with Σ cost_k γ_k = γ Σ cost_k, to one column.

    τ is found by sorting all columns of all layers. Where w_var is equal every layer gives the same share; a layer of
    which nothing is known gives γ.

    Args:
        w_vars: of each layer, [K_k]; NaN where nothing is known: such columns are left out of account.
        costs: of each layer's products, in any unit.
        ratio: γ, what the rank is to prune, at most ``max_ratio``.
        max_ratio: γ_max.
    """
    known = {layer: w_var[~np.isnan(w_var)] for layer, w_var in enumerate(w_vars) if not np.isnan(w_var).all()}
    shares = _shares_below_threshold(list(known.values()), [costs[k] for k in known], ratio, max_ratio) if known else []
    ratio_of = dict(zip(known, shares, strict=True))
    return [ratio_of.get(layer, ratio) for layer in range(len(w_vars))]


def relative_scores(scores: Floats) -> Floats:
    """Return a layer's scores [K] over their root mean square, NaN where nothing is known.

    Where a score is the size of a column's part in a product, its square is then the part's share of the product, so
    that columns of different layers compare: equal shares are equal errors of what the next layer gets.
    """
    known = scores[~np.isnan(scores)]
    size = float(np.sqrt(np.mean(known**2))) if len(known) else 0.0
    return scores / size if size > 0.0 else scores


def _shares_below_threshold(
    w_vars: Sequence[Floats], costs: Sequence[float], ratio: float, max_ratio: float
) -> list[float]:
    values, places, layers, column_costs = [], [], [], []
    for layer, (w_var, cost) in enumerate(zip(w_vars, costs, strict=True)):
        num_columns = len(w_var)
        num_allowed = int(max_ratio * num_columns + LEAST_SHARE)
        values.append(np.sort(w_var)[:num_allowed])
        places.append(np.arange(num_allowed) / num_columns)
        layers.append(np.full(num_allowed, layer))
        column_costs.append(np.full(num_allowed, cost / num_columns))
    layer_of = np.concatenate(layers)
    first = np.lexsort((layer_of, np.concatenate(places), np.concatenate(values)))
    cost_of = np.concatenate(column_costs)[first]
    num_taken = int(np.searchsorted(np.cumsum(cost_of) - cost_of / 2, ratio * sum(costs)))
    counts = np.bincount(layer_of[first[:num_taken]], minlength=len(w_vars))
    return [float(count) / len(w_var) for count, w_var in zip(counts, w_vars, strict=True)]
