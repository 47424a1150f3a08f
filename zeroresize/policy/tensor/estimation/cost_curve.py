"""What share of a rank's products a plan makes: the calibrated curve, corrected by what plans took beside each other.

The corrections are logarithms: c_1 … c_P of the calibrated share of the multiplications at each of P ratios, b of
borrowing and w of owning more than an even share, in this order. A plan (γ, β) of a rank that owns f makes

    s(1 − f (1 − γ)) + e^b φ(β),   s linear between the points s_p e^{c_p};   (1 + e^w (f − 1)) s(γ) for f > 1

of the products at full work. What two plans took beside each other at one speed corrects the points that they differ
in, and points near those as far as they were not measured themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.group import Workshares
from zeroresize.policy.speed.noise import JUMP
from zeroresize.policy.tensor.costs import LEAST_SHARE, UNKNOWN, ResizingCost

Floats = NDArray[np.float64]

#: Of what borrowing was taken to cost, and of a calibrated share s, times 1 − log s, :data:`~.UNKNOWN` is the standard
#: deviation of the logarithm; and this of what is owned beyond an even share, which is taken to be in proportion.
_WIDENING_ERROR = 0.15
#: Correlation of neighbouring points' errors.
_NEIGHBOURS = 0.7
#: What a jump of speed adds to the error: what made the rank slow may slow other sizes of products otherwise.
_CURVE_CHANGE = 0.1
#: A calibration is not believed where columns take less than this part of their share of FLOPs; fewer columns take at
#: least so much of it, whatever was measured, and at most as much longer than all of them.
_LEAST_CALIBRATED, _LEAST_SHARE_OF_FLOPS = 0.8, 0.5
#: No correction of borrowing or widening is larger: a factor of 4.
_MOST_CORRECTION = math.log(4.0)
#: Where b and w are among the corrections.
_BORROWING, _WIDENING = -2, -1


@dataclass(eq=False)
class CostCurve:
    """Hold what is known of one rank's curve.

    Attributes:
        calibrated: what pruning costs as it was calibrated apart from training.
    """

    calibrated: ResizingCost
    #: The corrections and their covariance.
    _x: Floats = field(init=False)
    _p: Floats = field(init=False)

    def __post_init__(self) -> None:
        columns, shares = 1.0 - np.array(self.calibrated.ratios[1:]), np.array(self.calibrated.gemm_share[1:])
        believed = np.maximum(shares, _LEAST_CALIBRATED * columns)
        self._x = np.append(np.log(believed / shares), [0.0, 0.0])
        errors = UNKNOWN * (1.0 - np.log(np.minimum(believed, 1.0)))
        distance = np.abs(np.subtract.outer(np.arange(len(columns)), np.arange(len(columns))))
        self._p = np.diag(np.append(np.zeros(len(columns)), [UNKNOWN**2, _WIDENING_ERROR**2]))
        self._p[:_BORROWING, :_BORROWING] = np.outer(errors, errors) * _NEIGHBOURS**distance
        least, most = np.log(_LEAST_SHARE_OF_FLOPS * columns / shares), -np.log(_LEAST_CALIBRATED * shares)
        self._least = np.append(np.minimum(least, self._x[:_BORROWING]), [-_MOST_CORRECTION] * 2)
        self._most = np.append(np.maximum(most, self._x[:_BORROWING]), [_MOST_CORRECTION] * 2)
        self._cost: ResizingCost | None = None

    @property
    def cost(self) -> ResizingCost:
        """Return what pruning and borrowing cost, as far as is known."""
        if self._cost is None:
            *points, borrowing, widening = np.exp(self._x).tolist()
            self._cost = self.calibrated.scaled([1.0, *points], borrowing, widening)
        return self._cost

    def executed(self, shares: Workshares) -> tuple[float, Floats]:
        """Return (logarithm of the multiplications' share under a plan, its gradient by the corrections)."""
        cost, spared = self.cost, shares.spared
        gradient = np.zeros(len(self._x))
        more = cost.widening * max(shares.owned - 1.0, 0.0)
        if shares.owned < 1.0:
            spared = 1.0 - shares.owned * (1.0 - spared)
        executed = (1.0 + more) * cost.gemm_share_at(spared)
        _add_gradient(gradient, cost, spared, 1.0 + more)
        gradient[_WIDENING] = more * cost.gemm_share_at(spared)
        if shares.borrowed > 0.0:
            gradient[_BORROWING] = cost.borrowed_at(shares.borrowed)
            executed += cost.borrowed_at(shares.borrowed)
            if shares.borrowed < 1.0:
                _add_gradient(gradient, cost, 1.0 - shares.borrowed, cost.borrowing)
        executed = max(executed, LEAST_SHARE)
        return math.log(executed), gradient / executed

    def variance(self, gradient: Floats) -> float:
        """Return the variance of what has this gradient."""
        return float(gradient @ self._p @ gradient)

    def explains(self, gradient: Floats, surprise: float, variance: float) -> bool:
        """Whether a curve within the bounds can be behind what :meth:`learn` would be told."""
        change = self._p @ gradient * (surprise / (self.variance(gradient) + variance))
        left = surprise - gradient @ (np.clip(self._x + change, self._least, self._most) - self._x)
        return bool(left**2 <= JUMP**2 * variance)

    def learn(self, gradient: Floats, surprise: float, variance: float) -> None:
        """Take what two plans took beside each other.

        Args:
            gradient: of one plan less that of the other.
            surprise: by how much the logarithm of their ratio is more than expected.
            variance: of what was measured.
        """
        gain = self._p @ gradient / (self.variance(gradient) + variance)
        self._x = np.clip(self._x + gain * surprise, self._least, self._most)
        # Joseph's form keeps the covariance positive whatever rounding does.
        keep = np.eye(len(gain)) - gain[:, None] * gradient
        self._p = keep @ self._p @ keep.T + variance * gain[:, None] * gain
        self._cost = None

    def widen(self, variance: float = _CURVE_CHANGE**2) -> None:
        """Know each correction less by ``variance``, as after a jump of speed; what is unknown stays so."""
        known = np.diag(self._p) < max(UNKNOWN**2, variance)
        self._p += np.diag(np.where(known, variance, 0.0))


def _add_gradient(gradient: Floats, cost: ResizingCost, ratio: float, factor: float) -> None:
    """That of the share of the multiplications at γ, by the corrections of its two points."""
    ratios = cost.ratios
    if ratio >= ratios[-1]:
        gradient[len(ratios) - 2] += factor * cost.gemm_share_at(ratio)
        return
    above = next(point for point, at in enumerate(ratios) if at > ratio)
    part = (ratio - ratios[above - 1]) / (ratios[above] - ratios[above - 1])
    gradient[above - 1] += factor * part * cost.gemm_share[above]
    if above > 1:
        gradient[above - 2] += factor * (1.0 - part) * cost.gemm_share[above - 1]
