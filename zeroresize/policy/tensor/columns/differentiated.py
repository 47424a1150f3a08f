"""ZERO-PriDiff: how many columns each layer prunes, more where weights move less (paper, section III-C).

The paper's rule counts columns below a fixed threshold θ and so may prune far more, or less, than was asked for. Ours
finds the threshold at which all layers together prune just what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.tensor.costs import LEAST_SHARE

Floats = NDArray[np.float64]


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
