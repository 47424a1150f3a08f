"""One rank's speed and what pruning costs there, each with how sure it is: an extended Kalman filter over logarithms.

State: log r (seconds outside the balanced products), log M (seconds of their multiplications at full work), log ω (how
many times as long as in the calibration gathers and fills take), c_1 … c_P (corrections of the calibrated share of the
multiplications at each of P ratios), b (of borrowing) and w (of owning more than an even share). Between two intervals
all but the corrections walk at random. Measured under shares (γ, β) of a rank that owns f (1 at even shares), each with
the noise that the filter learns from its own innovations:

    log rest     = log r + log(1 − ρ + ρ f)
    log gemm     = log M + log(s(1 − f (1 − γ)) + e^b φ(β)),   s linear between the points s_p e^{c_p};
                                                              (1 + e^w (f − 1)) s(γ) for f > 1
    log gather_fill = log ω + log(f Ω(γ))

ρ is what moves along of the rest, such as activation functions. It has a filter of its own with log r, which it is told
nothing of at f = 1, so that there all is as if it were not. Its prior, 0.2 ± 0.3, is so wide that whatever moves along
of the rest, up to ρ = 0.8 of a rank that gives nearly all it has, is within ``JUMP`` standard deviations: no jump.

An innovation of more than ``JUMP`` standard deviations is a change of speed: the speeds' variances open up, the curve's
hardly. So a change of times under one plan informs the speed, also within an interval (``change_of_level.py``). A
change of plan alone tells nothing apart: the speed may have changed with it. When units have moved, the products are
timed at even shares and at those in force in turn (:meth:`RankEstimator.compare`), which tells s(f) at whatever speed;
what surprises under that plan is speed. Where that is not known, as of what is pruned or lent, a surprise is put down
to the curve, with the variance that it may have been the speed, until steps at full work tell.

A rank that owns nothing computes nothing that tells its speed: a reference product does
(:meth:`RankEstimator.learn_reference`), by what it took when steps told the speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.group import Shares
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.change_of_level import change_of_level
from zeroresize.policy.tensor.estimation.executed_products import BORROWING, WIDENING, executed_products
from zeroresize.policy.tensor.estimation.part_noise import JUMP, JUMP_SIZE, PartNoise, are_alike, share_of_jumps
from zeroresize.policy.tensor.estimation.times import (
    DURATION,
    LEAST_SECONDS,
    MOST_MOVING_REST,
    MOST_SECONDS,
    MOVING_REST,
    MOVING_REST_ERROR,
    RankTimes,
    StepTimes,
    log_parts,
    usual_step,
)
from zeroresize.utils.usual import usual_of

#: Standard deviation of what borrowing was taken to cost, and of a calibrated share s, times 1 − log s: its logarithm.
CURVE_ERROR = 0.3
#: And of what is owned beyond an even share, which is taken to be in proportion.
WIDENING_ERROR = 0.15
#: Of a share s(f) that was measured by comparing products apart from training, and of a reference product.
COMPARISON_ERROR, REFERENCE_ERROR = 0.04, 0.1
#: How well is known what a reference takes beside the products of a step, before both were measured at one speed.
_REFERENCE_PRIOR = 0.3
#: Share of its prior variance that ρ forgets in an interval.
_FORGOTTEN = 1 / 64
#: What a jump of speed adds to that: what made the rank slow may slow other sizes of products otherwise.
CURVE_CHANGE = 0.1
#: A calibration is not believed where columns take less than this part of their share of FLOPs.
LEAST_OF_FLOPS = 0.8
#: Parts of a step, in the order of the state; then the corrections.
_REST, _GEMM, _GATHER_FILL, _CURVE = 0, 1, 2, 3
_POINT_CURVE = slice(_CURVE, BORROWING)
#: Standard deviations of a part that was never measured.
_UNKNOWN = 10.0
#: Of seconds, and of how many times as long gathers take.
_LEAST_LOG, _MOST_LOG = math.log(2.0 * LEAST_SECONDS), math.log(0.5e6)
#: No correction of borrowing or widening is larger: a factor of 4.
_MOST_CORRECTION = math.log(4.0)
#: Fewer columns take at least this part of their share of FLOPs, and at most so many times as long as all of them.
_LEAST_SHARE_OF_FLOPS, _MOST_OF_WHOLE = 0.5, 1.25
#: Surprises make the curve no less certain than so many times its first variance.
_MOST_FORGOTTEN = 16.0
#: Correlation of neighbouring points' errors.
_NEIGHBOURS = 0.7
#: How often what is told of ρ is taken to be a straight line.
_ITERATIONS = 3
#: The scatter of fewer steps tells nothing.
_FEWEST = 3

Floats = NDArray[np.float64]


@dataclass(eq=False)
class RankEstimator:
    """Estimate one rank's times and what pruning costs there, from the steps between two updates.

    Attributes:
        calibrated: what pruning costs as it was calibrated apart from training.
        usual_step: of the last interval, as it was measured; None before the first.
    """

    calibrated: ResizingCost
    _is_known: bool = field(default=False, init=False)
    #: The mean and the covariance.
    _x: Floats = field(init=False)
    _p: Floats = field(init=False)
    #: Mean and variance of ρ, and its covariance with log r.
    _moving_rest: tuple[float, float, float] = field(default=(MOVING_REST, MOVING_REST_ERROR**2, 0.0), init=False)
    _noise: tuple[PartNoise, PartNoise, PartNoise] = field(init=False)
    _shares: Shares | None = field(default=None, init=False)
    #: What the rank owned when its products were compared last.
    _compared: float | None = field(default=None, init=False)
    #: Mean and variance of log(reference / M); the logarithm of a reference that came before any step; by how much
    #: references have changed log M since the rest was measured.
    _reference: tuple[float, float] = field(default=(0.0, _REFERENCE_PRIOR**2), init=False)
    _first_reference: float | None = field(default=None, init=False)
    _reference_change: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        calibrated = self.calibrated
        self._noise = PartNoise(), PartNoise(), PartNoise()
        self.usual_step: StepTimes | None = None
        self._cost: ResizingCost | None = None
        num_points = len(calibrated.ratios) - 1
        self._x = np.zeros(_CURVE + num_points + 2)
        self._p = np.zeros((len(self._x), len(self._x)))
        self._identity = np.eye(len(self._x))
        self._p[_REST, _REST] = self._p[_GEMM, _GEMM] = _UNKNOWN**2
        self._p[_GATHER_FILL, _GATHER_FILL] = _UNKNOWN**2
        distance = np.abs(np.subtract.outer(np.arange(num_points), np.arange(num_points)))
        least = LEAST_OF_FLOPS * (1.0 - np.array(calibrated.ratios[1:]))
        believed = np.maximum(calibrated.gemm_share[1:], least)
        self._x[_POINT_CURVE] = np.log(believed / calibrated.gemm_share[1:])
        errors = CURVE_ERROR * (1.0 - np.log(np.minimum(believed, 1.0)))
        self._p[_POINT_CURVE, _POINT_CURVE] = np.outer(errors, errors) * _NEIGHBOURS**distance
        self._p[BORROWING, BORROWING] = CURVE_ERROR**2
        self._p[WIDENING, WIDENING] = WIDENING_ERROR**2
        self._prior_variances = np.diag(self._p)[_CURVE:].copy()
        self._least, self._most = self._bounds()

    @property
    def cost(self) -> ResizingCost:
        """Return what pruning and borrowing cost, as far as is known."""
        if self._cost is None:
            points = np.exp(self._x[_POINT_CURVE]).tolist()
            others = (math.exp(self._x[part]) for part in (BORROWING, WIDENING))
            self._cost = self.calibrated.scaled([1.0, *points], *others)
        return self._cost

    @property
    def times(self) -> RankTimes | None:
        """Return the rank's times at full work; None before any were measured."""
        if not self._is_known:
            return None
        rest_s, gemm_s, scale = np.exp(self._x[:_CURVE]).tolist()
        variances = [self._p[part, part] + DURATION * self._noise[part].drift for part in (_REST, _GEMM)]
        spread_s = math.hypot(rest_s * math.sqrt(variances[0]), gemm_s * math.sqrt(variances[1]))
        deviation = min(spread_s / (rest_s + gemm_s), 1e3)
        return RankTimes(rest_s, gemm_s, scale, self.cost, deviation, self._moving_rest[0])

    def learn(self, steps: Sequence[StepTimes]) -> None:
        """Take the steps of an interval, plan by plan in the order in which they were made.

        Left out are times that no step can have taken, and what a rank tells that computes no products at all.
        """
        steps = [step for step in steps if step.is_possible]
        if steps:
            last = steps[-1].shares.work
            self.usual_step = usual_step([step for step in steps if step.shares.work == last])
        self._learn_rest_alone([step for step in steps if not step.shares.computes])
        steps = [step for step in steps if step.gemm_s >= LEAST_SECONDS]
        steps = [step for step in steps if step.shares.computes]
        is_new_interval = True
        for _, alike in itertools.groupby(steps, key=lambda step: step.shares.work):
            for level in self._levels(list(alike)):
                self._learn_level(level, is_new_interval=is_new_interval)
                is_new_interval = False

    def compare(self, owned: float, ratio: float) -> None:
        """Learn from products at even shares and at those in force that were timed in turn, apart from training.

        Args:
            owned: what the rank owns, > 0.
            ratio: how many times as long the latter took; nothing is learned of what no products can take.
        """
        if not (owned > 0.0 and LEAST_SECONDS < ratio < MOST_SECONDS) or owned == 1.0:
            return
        executed, of_curve = executed_products(Shares(owned=owned), self.cost)
        gradient = np.zeros(len(self._x))
        gradient[_CURVE:] = of_curve
        variance = COMPARISON_ERROR**2
        innovation = math.log(ratio) - executed
        curve_variance = float(gradient @ self._p @ gradient)
        if innovation**2 > JUMP**2 * (curve_variance + variance):  # what was seen outweighs what was believed
            curve = np.arange(_CURVE, len(self._x))
            self._p[curve, curve] += innovation**2
        self._correct(gradient, innovation, variance)
        self._compared = owned

    def learn_reference(self, seconds: float, owned: float) -> None:
        """Learn from a reference product timed apart from training: always the same, whatever the rank owns.

        Of a rank that owns nothing it tells the speed; of another only how long a reference takes beside its products.

        Args:
            seconds: that a step's products would take if they were as fast; nothing is learned of what none can take.
            owned: what the rank owns.
        """
        if not LEAST_SECONDS < seconds < MOST_SECONDS:
            return
        value = math.log(seconds)
        if not self._is_known:
            self._first_reference = value
        elif owned > 0.0:
            self._relate_reference(value)
        else:
            mean, variance = self._reference
            before = float(self._x[_GEMM])
            self._p[_GEMM, _GEMM] += JUMP_SIZE**2  # nothing else tells whether it is as fast as it was
            gradient = np.zeros(len(self._x))
            gradient[_GEMM] = 1.0
            self._correct(gradient, value - mean - before, variance + REFERENCE_ERROR**2)
            self._reference_change += float(self._x[_GEMM]) - before

    def _relate_reference(self, value: float) -> None:
        """The logarithm of a reference, timed while steps told the speed."""
        mean, variance = self._reference
        gain = variance / (variance + REFERENCE_ERROR**2 + float(self._p[_GEMM, _GEMM]))
        self._reference = (mean + gain * (value - float(self._x[_GEMM]) - mean), variance * (1.0 - gain))

    def _levels(self, steps: list[StepTimes]) -> list[list[StepTimes]]:
        """Steps under one plan, split where the rank's speed changed.

        A rank that has become slower is taken at its word when it was so for half of the steps: what is shorter may be
        over before any plan could meet it.
        """
        parts = list(zip(*(log_parts(step, 0.0) for step in steps), strict=True))
        place = change_of_level(parts, self._noise[: len(parts)])
        if place is None:
            return [steps]
        before, after = steps[:place], steps[place:]
        is_slower = usual_of([step.busy_s for step in after]) > usual_of([step.busy_s for step in before])
        return [before] if is_slower and 2 * len(after) < len(steps) else [before, after]

    def _learn_rest_alone(self, steps: Sequence[StepTimes]) -> None:
        """Of a rank that computes no products."""
        if not steps:
            return
        shares, noise = steps[-1].shares, self._noise[_REST]
        logarithms = [math.log(max(step.busy_s, LEAST_SECONDS)) for step in steps]
        if not self._is_known:
            if self._first_reference is None:
                return
            self._x[_REST] = logarithms[0] - math.log(self._rest_part(shares.owned))
            self._x[_GEMM], self._p[_GEMM, _GEMM] = self._first_reference, self._reference[1] + REFERENCE_ERROR**2
            self._first_reference, self._is_known = None, True
        place = change_of_level([logarithms], [noise])
        self._p[_REST, _REST] += noise.drift
        for level in (logarithms[:place], logarithms[place:]) if place is not None else (logarithms,):
            value, variance = usual_of(level), noise.of_steps(len(level))
            is_same = self._shares is not None and shares.owned == self._shares.owned
            self._measure_rest(value, variance, shares.owned, is_same=is_same, gemm_change=self._reference_change)
            noise.forget_last(value)
            self._shares, self._reference_change = shares, 0.0

    def _learn_level(self, steps: Sequence[StepTimes], *, is_new_interval: bool) -> None:
        """Steps of one plan at one speed."""
        shares, cost = steps[-1].shares, self.cost
        gathers = shares.spared >= cost.ratios[1]
        expected_s = shares.owned * cost.gather_fill_at(shares.spared) if gathers else 0.0
        values = list(zip(*(log_parts(step, expected_s) for step in steps), strict=True))  # by part, then by step
        if not self._is_known:
            self._x[_REST] = values[_REST][0] - math.log(self._rest_part(shares.owned))
            self._x[_GEMM] = values[_GEMM][0] - executed_products(shares, self.cost)[0]
        is_same = self._shares is not None and shares.work == self._shares.work
        usual, variances = [], []
        for part, measured in enumerate(values):
            noise = self._noise[part]
            if is_new_interval:
                self._p[part, part] += noise.drift
            if len(measured) >= _FEWEST:
                noise.learn_scatter(measured)
            usual.append(usual_of(measured))
            variances.append(noise.of_steps(len(measured)))
        rest_change = self._change_of_rest(usual[_REST], variances[_REST], shares.owned)
        before = float(self._x[_GEMM])
        jumps = [False] * len(usual)
        jumps[_GEMM] = self._measure_gemm(
            usual[_GEMM],
            variances[_GEMM],
            steps[-1],
            is_same=is_same,
            is_after_others=not is_new_interval,
            rest_change=rest_change,
        )
        gemm_change = float(self._x[_GEMM]) - before if jumps[_GEMM] and not is_same else 0.0
        is_same_owned = self._shares is not None and shares.owned == self._shares.owned
        jumps[_REST] = self._measure_rest(
            usual[_REST], variances[_REST], shares.owned, is_same=is_same_owned, gemm_change=gemm_change
        )
        if len(usual) > _GATHER_FILL:
            jumps[_GATHER_FILL] = self._measure(_GATHER_FILL, usual[_GATHER_FILL], variances[_GATHER_FILL])
        for noise, value, has_jumped in zip(self._noise, usual, jumps, strict=False):
            if has_jumped or not is_same:
                noise.forget_last(value)
            else:
                noise.learn(value)
        if self._first_reference is not None:
            self._relate_reference(self._first_reference)
            self._first_reference = None
        self._shares, self._is_known = shares, True

    def _rest_part(self, owned: float) -> float:
        """The rest of a rank that owns so much, as a share of that at even shares."""
        return 1.0 - self._moving_rest[0] * (1.0 - owned)

    def _change_of_rest(self, value: float, variance: float, owned: float) -> float:
        """By how much the logarithm of the rest has jumped, of which nothing is learned yet; 0 if it has not."""
        _, own_variance, covariance = self._moving_rest
        part = self._rest_part(owned)
        innovation = value - float(self._x[_REST]) - math.log(part)
        gradient = (owned - 1.0) / part
        known = float(self._p[_REST, _REST]) + gradient * (2.0 * covariance + gradient * own_variance)
        return innovation if innovation**2 > JUMP**2 * (known + variance) else 0.0

    def _measure_rest(
        self, value: float, variance: float, owned: float, *, is_same: bool, gemm_change: float = 0.0
    ) -> bool:
        """Seconds of the rest under ``owned``. Whether the rank's speed has jumped.

        Args:
            is_same: whether the rank owned as much before.
            gemm_change: by how much the logarithm of the products has jumped as the plan changed; 0 if it has not. A
                rest that has changed alike is no evidence for ρ.
        """
        moving, own_variance, covariance = self._moving_rest
        if owned == 1.0:
            own_variance += _FORGOTTEN * (MOVING_REST_ERROR**2 - own_variance)
        before, speed = float(self._x[_REST]), float(self._p[_REST, _REST])
        surprise = value - before - math.log(self._rest_part(owned))
        has_jumped = self._change_of_rest(value, variance, owned) != 0.0 or are_alike(surprise, gemm_change)
        if has_jumped:
            speed += max(JUMP_SIZE, abs(surprise)) ** 2
        corrected = moving
        for _ in range(_ITERATIONS):  # the logarithm bends: anew around what was found
            part = 1.0 - corrected * (1.0 - owned)
            gradient = (owned - 1.0) / part
            innovation = value - before - math.log(part) - gradient * (moving - corrected)
            # Covariances of log r, and of ρ, with what is measured.
            of_speed, of_moving = speed + gradient * covariance, covariance + gradient * own_variance
            total = of_speed + gradient * of_moving + variance
            corrected = min(max(moving + of_moving / total * innovation, 0.0), MOST_MOVING_REST)
        change = of_speed / total * innovation
        self._x[_REST] = min(max(before + change, _LEAST_LOG), _MOST_LOG)
        speed = max(speed - of_speed**2 / total, 0.0) if gradient else speed * variance / total
        own_variance = max(own_variance - of_moving**2 / total, 0.0)
        covariance -= of_speed * of_moving / total
        if gradient and not is_same and not has_jumped:
            # Or the speed has jumped just then and ρ is as it was: how far that is from what is believed now.
            likely = share_of_jumps(surprise, total)
            of_speed, of_moving = surprise - change, moving - corrected
            speed += likely * of_speed**2
            own_variance += likely * of_moving**2
            covariance += likely * of_speed * of_moving
        self._p[_REST, _REST] = speed
        self._moving_rest = (corrected, own_variance, covariance)
        return has_jumped

    def _measure(self, part: int, value: float, variance: float) -> bool:
        """How many times as long gathers take: nothing else is told by it. Whether that has jumped."""
        innovation = value - float(self._x[part])
        before = float(self._p[part, part])
        has_jumped = innovation**2 > JUMP**2 * (before + variance)
        if has_jumped:
            before += max(JUMP_SIZE, abs(innovation)) ** 2
        self._x[part] = min(max(self._x[part] + before / (before + variance) * innovation, _LEAST_LOG), _MOST_LOG)
        self._p[part, part] = before * variance / (before + variance)
        return has_jumped

    def _measure_gemm(
        self,
        value: float,
        variance: float,
        step: StepTimes,
        *,
        is_same: bool,
        is_after_others: bool,
        rest_change: float,
    ) -> bool:
        """Seconds of multiplying. Whether the rank's speed has jumped, and not the curve been found wrong.

        Args:
            is_same: whether the steps before had the same shares.
            is_after_others: whether these lie in the same interval.
            rest_change: by how much the logarithm of the rest has jumped; 0 if it has not.
        """
        executed, of_curve = executed_products(step.shares, self.cost)
        gradient = np.zeros(len(self._x))
        gradient[_GEMM] = 1.0
        if step.is_forced:  # odd numbers of columns cost more: that tells nothing of others
            variance += float(of_curve @ self._p[_CURVE:, _CURVE:] @ of_curve)
        else:
            gradient[_CURVE:] = of_curve
        gain = self._p @ gradient
        own_variance = float(gradient @ gain) + variance
        innovation = value - float(self._x[_GEMM]) - executed
        has_rest_jumped = are_alike(innovation, rest_change)  # what no plan changes has: so the rank's speed has
        is_compared = step.shares.owned == self._compared and not step.shares.spared and not step.shares.borrowed
        is_ambiguous = (
            not is_same and not is_compared and not step.is_forced and bool(of_curve.any()) and not has_rest_jumped
        )
        has_jumped = not is_ambiguous and (has_rest_jumped or innovation**2 > JUMP**2 * own_variance)
        if not has_jumped:
            x, p = self._x.copy(), self._p
            gain, own_variance = self._correct(gradient, innovation, variance)
            left = value - float(self._x[_GEMM]) - executed_products(step.shares, self.cost)[0]
            is_at_bound = ((self._x <= self._least) | (self._x >= self._most)) & (gradient != 0.0)
            # No curve is so: it was the speed.
            if is_at_bound.any() and left**2 > JUMP**2 * (float(self._p[_GEMM, _GEMM]) + variance):
                self._x, self._p, self._cost, has_jumped = x, p, None, True
            elif is_ambiguous and not is_after_others:
                # Or the speed has jumped just then and the curve is right: how far that is from what is believed now.
                elsewhere = -gain * innovation
                elsewhere[_GEMM] += innovation
                self._p = self._p + share_of_jumps(innovation, own_variance) * elsewhere[:, None] * elsewhere
        if has_jumped:
            self._p[_GEMM, _GEMM] += max(JUMP_SIZE, abs(innovation)) ** 2
            curve = np.arange(_CURVE, len(self._x))
            self._p[curve, curve] += np.where(self._p[curve, curve] < CURVE_ERROR**2, CURVE_CHANGE**2, 0.0)
            self._correct(gradient, innovation, variance)
        self._keep_curve_known()
        return has_jumped

    def _keep_curve_known(self) -> None:
        """However many surprises may have been the curve, its variance stays near that before any measurement."""
        shrink = np.ones(len(self._x))
        variances = np.diag(self._p)[_CURVE:]
        shrink[_CURVE:] = np.sqrt(
            np.minimum(_MOST_FORGOTTEN * self._prior_variances / np.maximum(variances, 1e-300), 1.0)
        )
        self._p *= shrink[:, None] * shrink

    def _bounds(self) -> tuple[Floats, Floats]:
        """What the state can be: the least and the most of each entry."""
        calibrated = np.log(self.calibrated.gemm_share[1:])
        columns = 1.0 - np.array(self.calibrated.ratios[1:])
        least, most = (np.full(len(self._x), sign * _MOST_CORRECTION) for sign in (-1.0, 1.0))
        least[:_CURVE], most[:_CURVE] = _LEAST_LOG, _MOST_LOG
        least[_POINT_CURVE] = np.minimum(np.log(_LEAST_SHARE_OF_FLOPS * columns) - calibrated, self._x[_POINT_CURVE])
        most[_POINT_CURVE] = np.maximum(math.log(_MOST_OF_WHOLE) - calibrated, self._x[_POINT_CURVE])
        return least, most

    def _correct(self, gradient: Floats, innovation: float, variance: float) -> tuple[Floats, float]:
        """Take one measured number, of which the state told ``innovation`` less. Its gain, and variance in all."""
        gain = self._p @ gradient
        own_variance = float(gradient @ gain) + variance
        gain /= own_variance
        self._x += gain * innovation
        np.clip(self._x, self._least, self._most, out=self._x)
        self._cost = None
        # Joseph's form keeps the covariance positive whatever rounding does.
        keep = self._identity - gain[:, None] * gradient
        self._p = keep @ self._p @ keep.T + gain[:, None] * (variance * gain)
        return gain, own_variance
