"""Fits a + b · tokens + c · Σ length² to measured points, and tells how far it and the grid are from others."""

from __future__ import annotations

import numpy as np

from zeroresize.policy.microbatches.closed_form import ClosedForm, features
from zeroresize.policy.microbatches.grid_costs import LayerGrid, grid_points
from zeroresize.policy.microbatches.micro_batch import Floats, Indices
from zeroresize.policy.microbatches.stage_costs import LayerCosts


def fitted_closed_form(grid: LayerGrid) -> ClosedForm:
    """Return the closed form with the least sum of squared relative errors at the grid's points, no factor negative.

    Raises:
        ImportError: without SciPy.
    """
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        raise ImportError("fitting costs needs SciPy: pip install 'zeroresize[search]'") from error
    sizes, seen = grid_points(grid.sizes, grid.lengths)
    columns = features(sizes, seen, tuple(range(seen.shape[1])))
    scale = columns.max(axis=0)
    factors = []
    for values in (grid.forward_s, grid.backward_s, grid.activation_bytes, grid.workspace_bytes):
        flat = values.ravel()
        known = np.isfinite(flat) & (flat > 0.0)
        scaled = columns[known] / scale / flat[known, None]
        factors.append(nnls(scaled, np.ones(int(known.sum())))[0] / scale if known.any() else np.zeros(len(scale)))
    return ClosedForm(grid.axes, np.stack(factors))


def relative_errors(costs: LayerCosts, sizes_K: Indices, lengths_KA: Indices, measured: Floats) -> Floats:
    """Return [4, K] |predicted − measured| / measured, of all that a layer takes; NaN where nothing is or was measured.

    Args:
        measured: [4, K], as of :meth:`LayerCosts.values
            <zeroresize.policy.microbatches.stage_costs.LayerCosts.values>`.
    """
    predicted = costs.values(sizes_K, lengths_KA)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors: Floats = np.abs(predicted - measured) / measured
    return np.where(np.isfinite(errors), errors, np.nan)
