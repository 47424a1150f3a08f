"""What share of a rank's products a plan makes: the calibrated curve, corrected by what plans took beside each other.

There are three corrections, all logarithms: k of the curve's exponent, b of borrowing, w of owning more than an even
share. A plan (γ, β) of a rank that owns f makes, of the products at full work,

    s(1 − f (1 − γ)) + e^b φ(β),   s the calibrated curve to the power of e^k;   (1 + e^w (f − 1)) s(γ) for f > 1.

What two plans took beside each other at one speed corrects what they differ in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroresize.plan.group import Shares
from zeroresize.policy.speed.noise import JUMP
from zeroresize.policy.tensor.costs import ResizingCost

#: Standard deviations of k, b and w before anything was measured.
_ERRORS = (0.5, 0.3, 0.15)
#: None is ever surer: what is true of one ratio need not be so of another.
_LEAST_VARIANCE = 0.1**2
#: What a jump of speed adds to a variance: what made the rank slow may slow other sizes of products otherwise.
_CURVE_CHANGE = 0.1**2
#: A calibration is not believed where columns take less than this part of their share of FLOPs.
_LEAST_CALIBRATED = 0.8
#: Fewer columns take at least so much of their share of FLOPs, whatever was measured, and at most so many times as long
#: as all of them.
_LEAST_SHARE_OF_FLOPS, _MOST_OF_WHOLE = 0.5, 1.25
#: No correction is larger: a factor of 4.
_MOST_CORRECTION = math.log(4.0)
#: By so much a correction is changed to see what depends on it.
_STEP = 1e-3


@dataclass(eq=False)
class CostCurve:
    """Hold what is known of one rank's curve.

    Attributes:
        calibrated: what pruning costs as it was calibrated apart from training.
    """

    calibrated: ResizingCost
    #: Means and variances of k, b and w.
    _means: tuple[float, ...] = field(default=(0.0, 0.0, 0.0), init=False)
    _variances: tuple[float, ...] = field(default=tuple(error**2 for error in _ERRORS), init=False)

    @property
    def cost(self) -> ResizingCost:
        """Return what pruning and borrowing cost, as far as is known."""
        return self._corrected(self._means)

    def _corrected(self, corrections: Sequence[float]) -> ResizingCost:
        exponent, borrowing, widening = map(math.exp, corrections)
        factors = [1.0]
        for ratio, share in zip(self.calibrated.ratios[1:], self.calibrated.gemm_share[1:], strict=True):
            believed = max(share, _LEAST_CALIBRATED * (1.0 - ratio))
            least, most = min(_LEAST_SHARE_OF_FLOPS * (1.0 - ratio), believed), max(_MOST_OF_WHOLE, believed)
            factors.append(min(max(believed**exponent, least), most) / share)
        return self.calibrated.scaled(factors, borrowing, widening)

    def executed(self, shares: Shares) -> tuple[float, tuple[float, ...]]:
        """Return (logarithm of the multiplications' share under a plan, its gradient by the corrections)."""
        executed = _log_executed(self.cost, shares)
        gradient = []
        for place, mean in enumerate(self._means):
            changed = (*self._means[:place], mean + _STEP, *self._means[place + 1 :])
            gradient.append((_log_executed(self._corrected(changed), shares) - executed) / _STEP)
        return executed, tuple(gradient)

    def variance(self, gradient: Sequence[float]) -> float:
        """Return the variance of what has this gradient."""
        return math.fsum(slope**2 * variance for slope, variance in zip(gradient, self._variances, strict=True))

    def explains(self, gradient: Sequence[float], surprise: float, variance: float) -> bool:
        """Whether a curve within the bounds can be behind what :meth:`learn` would be told."""
        after = self._learned(gradient, surprise, variance)
        changes = zip(gradient, after, self._means, strict=True)
        left = surprise - math.fsum(slope * (new - mean) for slope, new, mean in changes)
        return left**2 <= JUMP**2 * variance

    def learn(self, gradient: Sequence[float], surprise: float, variance: float, doubt: float = 0.0) -> None:
        """Take what two plans took beside each other.

        Args:
            gradient: of one plan less that of the other.
            surprise: by how much the logarithm of their ratio is more than expected.
            variance: of what was measured.
            doubt: how likely it was something else; by so much what is learned is less sure.
        """
        means, whole = self._learned(gradient, surprise, variance), self.variance(gradient) + variance
        self._variances = tuple(
            max(own * (1.0 - slope**2 * own / whole) + doubt * (new - mean) ** 2, min(own, _LEAST_VARIANCE))
            for slope, own, new, mean in zip(gradient, self._variances, means, self._means, strict=True)
        )
        self._means = means

    def _learned(self, gradient: Sequence[float], surprise: float, variance: float) -> tuple[float, ...]:
        whole = self.variance(gradient) + variance
        learned = (
            mean + own * slope * surprise / whole
            for mean, own, slope in zip(self._means, self._variances, gradient, strict=True)
        )
        return tuple(min(max(mean, -_MOST_CORRECTION), _MOST_CORRECTION) for mean in learned)

    def widen(self, variance: float = _CURVE_CHANGE) -> None:
        """Know each correction less by ``variance``, as after a jump of speed; what is unknown stays so."""
        self._variances = tuple(
            own + variance if own < max(error**2, variance) else own
            for own, error in zip(self._variances, _ERRORS, strict=True)
        )


def _log_executed(cost: ResizingCost, shares: Shares) -> float:
    executed = cost.executed_at(shares.owned, shares.spared)
    if shares.borrowed > 0.0:
        executed += cost.borrowed_at(shares.borrowed)
    return math.log(max(executed, 1e-9))
