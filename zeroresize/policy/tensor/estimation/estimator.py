"""One rank's times at full work and what pruning costs there, each with how sure it is, from the steps of training.

A step has two parts: the multiplications of the balanced layers, and the rest. A :class:`SpeedMeter` follows each under
the plan in force. Steps under one plan tell the speed; two plans beside each other tell the curve of what plans cost
(:class:`CostCurve`), by which the times at full work follow from those under the plan. Of the rest the share ρ moves
along with units: a rank that owns f takes (1 − ρ + ρ f) of it.

What surprises under a new plan more than noise and all that is unknown of the curve is a jump of speed. What surprises
less informs the curve. Products compared after a move
(:meth:`RankEstimator.compare`) tell the curve: then surprises are speed. Of a rank that owns nothing a reference
product tells the speed (:meth:`RankEstimator.learn_reference`), by what it took when steps told it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroresize.plan.group import Workshares
from zeroresize.policy.speed.change_of_level import change_of_level
from zeroresize.policy.speed.meter import Reading, SpeedMeter, bounded
from zeroresize.policy.speed.noise import JUMP
from zeroresize.policy.tensor.costs import MOST, UNKNOWN, ResizingCost
from zeroresize.policy.tensor.estimation.cost_curve import CostCurve
from zeroresize.policy.tensor.estimation.times import (
    DURATION,
    LEAST_PART,
    LEAST_SECONDS,
    MOST_MOVING_REST,
    MOST_SECONDS,
    MOVING_REST,
    RankTimes,
    StepTimes,
    log_parts,
    usual_step,
)
from zeroresize.utils.usual import usual_of

#: Of a share s(f) that was measured by comparing products apart from training, and of a reference product.
_COMPARISON_ERROR, _REFERENCE_ERROR = 0.04, 0.1


@dataclass(eq=False)
class RankEstimator:
    """Estimate one rank's times and what pruning costs there, from the steps between two updates.

    Attributes:
        calibrated: what pruning costs as it was calibrated apart from training.
        usual_step: of the last interval, as it was measured; None before the first.
    """

    calibrated: ResizingCost
    _curve: CostCurve = field(init=False)
    _rest: SpeedMeter = field(default_factory=SpeedMeter, init=False)
    _gemm: SpeedMeter = field(default_factory=SpeedMeter, init=False)
    _gather_fill: SpeedMeter = field(default_factory=SpeedMeter, init=False)
    #: The plan of the last multiplications, whether it was forced, and what the rank owned when the rest was measured.
    _shares: Workshares = field(default_factory=Workshares, init=False)
    _owned: float = field(default=1.0, init=False)
    _is_forced: bool = field(default=False, init=False)
    #: Whether the speed of the multiplications has jumped since the rest was measured.
    _has_jumped: bool = field(default=False, init=False)
    #: Mean and variance of ρ, and of log(reference / M); the logarithm of a reference before that was known.
    _moving_rest: tuple[float, float] = field(default=(MOVING_REST, UNKNOWN**2), init=False)
    _reference: tuple[float, float] = field(default=(0.0, UNKNOWN**2), init=False)
    _first_reference: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._curve = CostCurve(self.calibrated)
        self.usual_step: StepTimes | None = None

    @property
    def cost(self) -> ResizingCost:
        """Return what pruning and borrowing cost, as far as is known."""
        return self._curve.cost

    @property
    def times(self) -> RankTimes | None:
        """Return the rank's times at full work; None before any were measured."""
        if not (self._gemm.is_known and self._rest.is_known):
            return None
        executed, gradient = self._curve.executed(self._shares)
        part, slope = self._rest_part(self._owned)
        gemm_s = math.exp(bounded(self._gemm.level - executed))
        rest_s = math.exp(bounded(self._rest.level - math.log(part)))
        gemm_variance = self._gemm.variance + DURATION * self._gemm.noise.drift + self._curve.variance(gradient)
        rest_variance = self._rest.variance + DURATION * self._rest.noise.drift + slope**2 * self._moving_rest[1]
        spread_s = math.hypot(rest_s * math.sqrt(rest_variance), gemm_s * math.sqrt(gemm_variance))
        deviation = min(spread_s / (rest_s + gemm_s), MOST)
        scale = math.exp(self._gather_fill.level) if self._gather_fill.is_known else 1.0
        return RankTimes(rest_s, gemm_s, scale, self.cost, deviation, self._moving_rest[0])

    def learn(self, steps: Sequence[StepTimes], *, by_moves: bool = False, moving_weights: float = 0.0) -> None:
        """Take the steps of an interval, plan by plan in the order in which they were made.

        Left out are times that no step can have taken, and of a rank that computes no products what these take.

        Args:
            by_moves: whether training alone tells what products take at other shares, as of hosts' own forwards: what a
                move changes beside the rest is then the curve, unless the rest has changed alike.
            moving_weights: share of the weights that are updated in which units can change hands.
        """
        steps = [step for step in steps if step.is_possible]
        if steps:
            last = steps[-1].shares.work
            self.usual_step = usual_step([step for step in steps if step.shares.work == last])
        steps = [step for step in steps if step.gemm_s >= LEAST_SECONDS or not step.shares.computes]
        for meter in (self._rest, self._gemm, self._gather_fill) if steps else ():
            meter.pass_interval()
        for _, alike in itertools.groupby(steps, key=lambda step: step.shares.work):
            for level in self._levels(list(alike)):
                self._learn_level(level, by_moves, moving_weights)

    def compare(self, owned: float, ratio: float) -> None:
        """Learn from products at even shares and at those in force that were timed in turn, apart from training.

        Args:
            owned: what the rank owns, > 0.
            ratio: how many times as long the latter took; nothing is learned of what no products can take.
        """
        if not (owned > 0.0 and LEAST_SECONDS < ratio < MOST_SECONDS) or owned == 1.0:
            return
        executed, gradient = self._curve.executed(Workshares(owned=owned))
        surprise, variance = math.log(ratio) - executed, _COMPARISON_ERROR**2
        if surprise**2 > JUMP**2 * (self._curve.variance(gradient) + variance):  # what was seen outweighs beliefs
            self._curve.widen(surprise**2)
        self._curve.learn(gradient, surprise, variance)

    def learn_reference(self, seconds: float, owned: float) -> None:
        """Learn from a reference product timed apart from training: always the same, whatever the rank owns.

        Of a rank that owns nothing it tells the speed; of another only how long a reference takes beside its products.

        Args:
            seconds: that a step's products would take if they were as fast; nothing is learned of what none can take.
            owned: what the rank owns.
        """
        if not LEAST_SECONDS < seconds < MOST_SECONDS:
            return
        if owned > 0.0:
            self._first_reference = math.log(seconds)
        else:
            mean, variance = self._reference
            before, now = self._gemm.level - self._curve.executed(self._shares)[0], math.log(seconds) - mean
            self._has_jumped |= abs(now - before) > 2.0 * _REFERENCE_ERROR
            self._gemm.put(now, variance + _REFERENCE_ERROR**2)
            self._shares, self._is_forced = Workshares(), False

    def _levels(self, steps: list[StepTimes]) -> list[list[StepTimes]]:
        """Steps under one plan, split where the rank's speed changed.

        A rank that has become slower is taken at its word when it was so for half of the steps: what is shorter may be
        over before any plan could meet it.
        """
        meters = (self._rest, self._gemm) if steps[-1].shares.computes else (self._rest,)
        parts = list(zip(*(log_parts(step)[: len(meters)] for step in steps), strict=True))
        place = change_of_level(parts, [meter.noise for meter in meters])
        if place is None:
            return [steps]
        before, after = steps[:place], steps[place:]
        is_slower = usual_of([step.busy_s for step in after]) > usual_of([step.busy_s for step in before])
        return [before] if is_slower and 2 * len(after) < len(steps) else [before, after]

    def _learn_level(self, steps: Sequence[StepTimes], by_moves: bool, moving_weights: float) -> None:
        """Steps of one plan at one speed."""
        shares = steps[-1].shares
        rest, gemm = zip(*map(log_parts, steps), strict=True)
        if shares.owned == 1.0 and self._moving_rest[1] >= UNKNOWN**2:  # no move has told yet
            update = usual_of([step.update_s / math.exp(log_s) for step, log_s in zip(steps, rest, strict=True)])
            self._moving_rest = MOVING_REST + (moving_weights - MOVING_REST) * min(update, 1.0), UNKNOWN**2
        (part, slope), (part_before, slope_before) = map(self._rest_part, (shares.owned, self._owned))
        change, change_variance = math.log(part / part_before), (slope - slope_before) ** 2 * self._moving_rest[1]
        is_first = not self._rest.is_known  # which stands beside no other plan
        reading = self._rest.take(rest, change, change_variance, is_alike=shares.owned == self._owned)
        if shares.computes:
            self._learn_gemm(gemm, steps[-1], reading, by_moves)
            self._learn_gather_fill(steps)
        if not (is_first or reading.has_jumped or self._has_jumped):
            self._learn_moving_rest(math.exp(change + reading.surprise), reading.variance, shares.owned)
        self._owned, self._has_jumped = shares.owned, False

    def _learn_gemm(self, values: Sequence[float], step: StepTimes, rest: Reading, by_moves: bool) -> None:
        """Logarithms of the seconds of multiplying, of the plan of ``step``."""
        if not self._gemm.is_known or step.shares.work == self._shares.work:
            has_jumped = self._gemm.take(values).has_jumped
        else:
            has_jumped = self._learn_plan(values, step, rest, by_moves)
        if has_jumped:
            self._has_jumped = True
            self._curve.widen()
        self._shares, self._is_forced = step.shares, step.is_forced
        if self._first_reference is not None:
            full, variance = self._gemm.level - self._curve.executed(step.shares)[0], self._gemm.variance
            self._reference = self._first_reference - full, _REFERENCE_ERROR**2 + variance
            self._first_reference = None

    def _learn_plan(self, values: Sequence[float], step: StepTimes, rest: Reading, by_moves: bool) -> bool:
        """The same, of a plan unlike the one before. Whether the speed has jumped, and not the curve been wrong."""
        (executed, gradient), (before, gradient_before) = map(self._curve.executed, (step.shares, self._shares))
        contrast = gradient - gradient_before
        if by_moves and step.shares.owned != self._shares.owned and contrast.any() and not rest.has_jumped:
            surprise = usual_of(values) - self._gemm.level - executed + before
            self._curve.widen(surprise**2 / float(contrast @ contrast))
        reading = self._gemm.take(values, executed - before, self._curve.variance(contrast), is_alike=False)
        # Where the rest, which pruning does not touch, has jumped alike, or no curve is so, it was the speed.
        has_jumped = reading.has_jumped or (rest.has_jumped and 0.5 < reading.surprise / rest.surprise < 2.0)
        is_forced = step.is_forced or self._is_forced  # odd numbers of columns cost more, which tells nothing of others
        has_jumped |= not (is_forced or self._curve.explains(contrast, reading.surprise, reading.variance))
        if not (has_jumped or is_forced):
            self._curve.learn(contrast, reading.surprise, reading.variance)
        return has_jumped

    def _learn_gather_fill(self, steps: Sequence[StepTimes]) -> None:
        """How many times as long as in the calibration gathers and fills take, where there are enough to tell."""
        shares, cost = steps[-1].shares, self.cost
        expected_s = shares.owned * cost.gather_fill_at(shares.spared)
        if shares.spared >= cost.ratios[1] and expected_s > 0.0:
            least_s = LEAST_PART * usual_of([step.busy_s for step in steps])
            gathers_s = (max(step.gather_fill_s, least_s, LEAST_SECONDS) for step in steps)
            self._gather_fill.take([math.log(seconds / expected_s) for seconds in gathers_s])

    def _rest_part(self, owned: float) -> tuple[float, float]:
        """The rest of a rank that owns so much, as a share of that at even shares; its logarithm's slope by ρ."""
        part = 1.0 - self._moving_rest[0] * (1.0 - owned)
        return part, (owned - 1.0) / part

    def _learn_moving_rest(self, ratio: float, variance: float, owned: float) -> None:
        """ρ, by how many times as long the rest takes as before, at the same speed, and how sure its logarithm is."""
        divisor = 1.0 - owned - ratio * (1.0 - self._owned)
        if owned != self._owned and divisor:
            mean, own_variance = self._moving_rest
            measured_variance = ((owned - self._owned) * ratio / divisor**2) ** 2 * variance
            gain = own_variance / (own_variance + measured_variance)
            measured = min(max((1.0 - ratio) / divisor, 0.0), MOST_MOVING_REST)
            self._moving_rest = mean + gain * (measured - mean), own_variance * (1.0 - gain)
