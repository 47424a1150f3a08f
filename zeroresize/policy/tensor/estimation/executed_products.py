"""What share of a rank's multiplications a plan makes, and how that follows from the corrections of the curve.

The corrections are c_1 … c_P of the calibrated share at each of P ratios, b of borrowing and w of owning more than an
even share, in this order, as in :mod:`~zeroresize.policy.tensor.estimation.estimator`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.group import Shares
from zeroresize.policy.tensor.costs import ResizingCost

Floats = NDArray[np.float64]
#: Where b and w are among the corrections.
BORROWING, WIDENING = -2, -1


def executed_products(shares: Shares, cost: ResizingCost) -> tuple[float, Floats]:
    """Return (logarithm of the multiplications' share under a plan, its gradient by the corrections)."""
    spared = shares.spared
    gradient = np.zeros(len(cost.ratios) + 1)
    more = cost.widening * max(shares.owned - 1.0, 0.0)
    if shares.owned < 1.0:
        spared = 1.0 - shares.owned * (1.0 - spared)
    own_products = (1.0 + more) * cost.gemm_share_at(spared)
    _add_gradient(gradient, cost, spared, 1.0 + more)
    gradient[WIDENING] = more * cost.gemm_share_at(spared)
    borrowed = cost.borrowed_at(shares.borrowed) if shares.borrowed > 0.0 else 0.0
    if borrowed:
        gradient[BORROWING] = borrowed
        if shares.borrowed < 1.0:
            _add_gradient(gradient, cost, 1.0 - shares.borrowed, cost.borrowing)
    executed = max(own_products + borrowed, 1e-9)
    return math.log(executed), gradient / executed


def _add_gradient(gradient: Floats, cost: ResizingCost, ratio: float, factor: float) -> None:
    """That of the share of the multiplications at γ, by the corrections of its two points."""
    ratios = cost.ratios
    if ratio >= ratios[-1]:
        gradient[len(ratios) - 2] += factor * cost.gemm_share_at(ratio)
        return
    above = next(point for point, one in enumerate(ratios) if one > ratio)
    part = (ratio - ratios[above - 1]) / (ratios[above] - ratios[above - 1])
    gradient[above - 1] += factor * part * cost.gemm_share[above]
    if above > 1:
        gradient[above - 2] += factor * (1.0 - part) * cost.gemm_share[above - 1]
