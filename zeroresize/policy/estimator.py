"""One rank's speed and what pruning costs there, each with how sure it is: an extended Kalman filter over logarithms.

State: log r (seconds outside the balanced products), log M (seconds of their multiplications at full work), log ω (how
many times as long as in the calibration gathers and fills take), c_1 … c_P (corrections of the calibrated share of the
multiplications at each of P ratios) and b (of borrowing). Between two intervals all but the corrections walk at random.
Measured under shares (γ, β) of a rank that owns f (1 at even shares), each with the noise that the filter learns from
its own innovations:

    log rest     = log r + log(1 − ρ + ρ f)
    log gemm     = log M + log(s(1 − f (1 − γ)) + e^b φ(β)),   s linear between the points s_p e^{c_p}; f s(γ) for f > 1
    log gather_fill = log ω + log Ω(γ)

ρ is what moves along of the rest, such as activation functions. It has a filter of its own with log r, which it is told
nothing of at f = 1, so that there all is as if it were not. Its prior, 0.2 ± 0.3, is so wide that whatever moves along
of the rest, up to ρ = 0.8 of a rank that gives nearly all it has, is within ``JUMP`` standard deviations: no jump.

An innovation of more than ``JUMP`` standard deviations is a change of speed: the speeds' variances open up, the curve's
hardly. So a change of plan at constant speed informs the curve, a change of times under one plan the speed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.group import Shares
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.times import (
    DURATION,
    LEAST_SECONDS,
    MOST_MOVING_REST,
    MOVING_REST,
    MOVING_REST_ERROR,
    RankTimes,
    StepTimes,
)
from zeroresize.utils.state_checks import each, flag, keyed, not_negative, number, optional, row, share

#: An innovation of so many standard deviations is a jump of the rank's speed.
JUMP = 4.0
#: Standard deviation of a jump's logarithm: a factor of 4.
JUMP_SIZE = math.log(4.0)
#: A rank's speed jumps in that share of the intervals.
HAZARD = 0.05
#: Standard deviation of what borrowing was taken to cost, and of a calibrated share s, times 1 − log s: its logarithm.
CURVE_ERROR = 0.3
#: What a jump of speed adds to that: what made the rank slow may slow other sizes of products otherwise.
CURVE_CHANGE = 0.1
#: A calibration is not believed where columns take less than this part of their share of FLOPs.
LEAST_OF_FLOPS = 0.8
#: Relative standard deviation of an interval's times before any were compared, and the least there is.
USUAL_NOISE, LEAST_NOISE = 0.03, 0.003
#: Innovations that the learned noise is the mean of, at most.
MEMORY = 24
#: Parts of a step, in the order of the state; then the corrections.
_REST, _GEMM, _GATHER_FILL, _CURVE = 0, 1, 2, 3
#: Of a step's busy time a part is not known more finely.
_LEAST_PART = 1e-4
#: Standard deviations of a part that was never measured.
_UNKNOWN = 10.0
#: Of seconds, and of how many times as long gathers take.
_LEAST_LOG, _MOST_LOG = math.log(2.0 * LEAST_SECONDS), math.log(0.5e6)
#: No correction is larger: a factor of 50.
_MOST_CORRECTION = math.log(50.0)
#: Correlation of neighbouring points' errors.
_NEIGHBOURS = 0.7
#: Variance of a median to that of a mean; standard deviation to the median deviation: both of normal noise.
_MEDIAN, _NORMAL = 1.57, 1.4826
#: How often what is told of ρ is taken to be a straight line.
_ITERATIONS = 3
#: The scatter of fewer steps tells nothing.
_FEWEST = 3
_POINTS = ("ratios", "gemm_share", "gather_fill_s")

Floats = NDArray[np.float64]


@dataclasses.dataclass
class PartNoise:
    """How one part's logarithm varies from interval to interval, under one plan at one speed.

    With y the measured logarithm and d its differences: E[d²] = q + 2r, E[d d'] = −r.

    Attributes:
        weight: how many differences were seen, at most ``MEMORY``.
        square, product: their mean square, and the mean product of two that follow each other.
        last: y of the last interval, and its difference to the one before; NaN where that cannot be compared.
        scatter: variance of a single step, by what it was within intervals; 0 where these were too short.
    """

    weight: float = 1.0
    square: float = 2.0 * USUAL_NOISE**2
    product: float = -(USUAL_NOISE**2)
    last: tuple[float, float] = (math.nan, math.nan)
    scatter: float = 0.0

    @property
    def white(self) -> float:
        """r, variance of one interval's measurement."""
        return max(min(-self.product, self.square / 2.0), LEAST_NOISE**2)

    @property
    def drift(self) -> float:
        """q, variance of the speed's change in an interval."""
        return max(self.square - 2.0 * self.white, (LEAST_NOISE / 2.0) ** 2)

    def of_steps(self, number: int) -> float:
        """Variance of the median of so many steps."""
        return max(self.white, self.scatter * (_MEDIAN if number > 2 else 1.0) / number)

    def learn_scatter(self, values: Sequence[float]) -> None:
        """Take the logarithms of an interval's steps."""
        middle = _middle(values)
        variance = (_NORMAL * _middle([abs(value - middle) for value in values])) ** 2
        if self.scatter == 0.0:
            self.scatter = variance
        else:  # an interval within which the speed jumps scatters widely
            self.scatter += (min(variance, 4.0 * self.scatter) - self.scatter) / 4.0

    def learn(self, value: float) -> None:
        """Take the next interval's y, measured under the same plan and at the same speed as the last."""
        last, difference_before = self.last
        difference = value - last
        if not math.isnan(difference):
            most = JUMP * math.sqrt(self.square + LEAST_NOISE**2)
            difference = min(max(difference, -most), most)
            self.weight = min(self.weight + 1.0, MEMORY)
            self.square += (difference**2 - self.square) / self.weight
            if not math.isnan(difference_before):
                self.product += (difference * difference_before - self.product) / self.weight
            else:
                self.product += (-0.5 * difference**2 - self.product) / self.weight
        self.last = value, difference

    def forget_last(self, value: float) -> None:
        """The next interval cannot be compared with what was before ``value``."""
        self.last = value, math.nan


class RankEstimator:
    """What is known of one rank, from the steps between two updates.

    Attributes:
        calibrated: what pruning costs as it was calibrated apart from training.
        usual_step: of the last interval, as it was measured; None before the first.
    """

    def __init__(self, calibrated: ResizingCost) -> None:
        self.calibrated = calibrated
        self.usual_step: StepTimes | None = None
        self._noise = [PartNoise(), PartNoise(), PartNoise()]
        self._shares: Shares | None = None
        self._is_known = False
        self._cost: ResizingCost | None = None
        num_points = len(calibrated.ratios) - 1
        self._x = np.zeros(_CURVE + num_points + 1)
        self._p = np.zeros((len(self._x), len(self._x)))
        self._identity = np.eye(len(self._x))
        self._p[_REST, _REST] = self._p[_GEMM, _GEMM] = _UNKNOWN**2
        self._p[_GATHER_FILL, _GATHER_FILL] = _UNKNOWN**2
        distance = np.abs(np.subtract.outer(np.arange(num_points), np.arange(num_points)))
        least = LEAST_OF_FLOPS * (1.0 - np.array(calibrated.ratios[1:]))
        believed = np.maximum(calibrated.gemm_share[1:], least)
        self._x[_CURVE:-1] = np.log(believed / calibrated.gemm_share[1:])
        errors = CURVE_ERROR * (1.0 - np.log(np.minimum(believed, 1.0)))
        self._p[_CURVE:-1, _CURVE:-1] = np.outer(errors, errors) * _NEIGHBOURS**distance
        self._p[-1, -1] = CURVE_ERROR**2
        # Mean and variance of ρ, and its covariance with log r.
        self._moving_rest = (MOVING_REST, MOVING_REST_ERROR**2, 0.0)

    @property
    def cost(self) -> ResizingCost:
        """What pruning and borrowing cost, as far as is known."""
        if self._cost is None:
            self._cost = self.calibrated.scaled([1.0, *np.exp(self._x[_CURVE:-1]).tolist()], math.exp(self._x[-1]))
        return self._cost

    @property
    def times(self) -> RankTimes | None:
        """The rank's times at full work; None before any were measured."""
        if not self._is_known:
            return None
        rest_s, gemm_s, scale = np.exp(self._x[:_CURVE]).tolist()
        variances = [self._p[part, part] + DURATION * self._noise[part].drift for part in (_REST, _GEMM)]
        spread_s = math.hypot(rest_s * math.sqrt(variances[0]), gemm_s * math.sqrt(variances[1]))
        deviation = min(spread_s / (rest_s + gemm_s), 1e3)
        return RankTimes(rest_s, gemm_s, scale, self.cost, deviation, self._moving_rest[0])

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "calibrated": dataclasses.asdict(self.calibrated),
            "is_known": self._is_known,
            # A tuple is one entry of a checkpoint.
            "mean": tuple(self._x.tolist()),
            "covariance": tuple(map(tuple, self._p.tolist())),
            "moving_rest": self._moving_rest,
            "noise": tuple(dataclasses.astuple(noise) for noise in self._noise),
            "shares": dataclasses.astuple(self._shares) if self._shares is not None else None,
        }

    @staticmethod
    def state_check(state: Any, where: str) -> None:
        """Check for what :meth:`load_state_dict` can take over."""
        points = dict.fromkeys(_POINTS, each(number))
        keyed({"calibrated": keyed({**points, "borrowing": number})})(state, where)
        try:
            cost = _cost_of(state["calibrated"])
        except ValueError as error:
            raise ValueError(f"{where}.calibrated: {error}") from error
        size = _CURVE + len(cost.ratios)
        noise = row(number, number, number, row(number, number), number)
        keyed(
            {
                "is_known": flag,
                "mean": each(number, size),
                "covariance": each(each(number, size), size),
                "moving_rest": row(share, not_negative, number),
                "noise": row(noise, noise, noise),
                "shares": optional(row(share, share, not_negative, not_negative)),
            }
        )(state, where)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; what was measured here before is forgotten."""
        self.calibrated = _cost_of(state["calibrated"])
        self._is_known = state["is_known"]
        self._x, self._p = np.array(state["mean"]), np.array(state["covariance"])
        self._identity, self._cost = np.eye(len(self._x)), None
        self._moving_rest = tuple(state["moving_rest"])
        self._noise = [
            PartNoise(weight, square, product, tuple(last), scatter)
            for weight, square, product, last, scatter in state["noise"]
        ]
        self._shares = Shares(*state["shares"]) if state["shares"] is not None else None
        self.usual_step = None

    def learn(self, steps: Sequence[StepTimes]) -> None:
        """Take the steps of an interval, plan by plan in the order in which they were made.

        Left out are times that no step can have taken, and what a rank tells that computes no products at all.
        """
        steps = [step for step in steps if step.is_possible]
        if steps:
            last = steps[-1].shares.work
            self.usual_step = _median([step for step in steps if step.shares.work == last])
        steps = [step for step in steps if step.gemm_s >= LEAST_SECONDS]
        steps = [step for step in steps if step.shares.computes]
        own = [list(alike) for _, alike in itertools.groupby(steps, key=lambda step: step.shares.work)]
        for alike in own:
            self._learn_plan(alike, is_new_interval=alike is own[0])

    def _learn_plan(self, steps: Sequence[StepTimes], *, is_new_interval: bool) -> None:
        shares, cost = steps[-1].shares, self.cost
        expected_s = cost.gather_fill_at(shares.spared) if shares.spared >= cost.ratios[1] else 0.0
        values = list(zip(*(_log_parts(step, expected_s) for step in steps), strict=True))  # by part, then by step
        if not self._is_known:
            self._x[_REST] = values[_REST][0] - math.log(self._rest_part(shares.owned))
            self._x[_GEMM] = values[_GEMM][0] - self._executed(shares)[0]
        is_same = self._shares is not None and shares.work == self._shares.work
        rest_change = 0.0
        for part, own in enumerate(values):
            noise = self._noise[part]
            if is_new_interval:
                self._p[part, part] += noise.drift
            if len(own) >= _FEWEST:
                noise.learn_scatter(own)
            value = usual_of(own)
            variance = noise.of_steps(len(own))
            if part == _GEMM:
                has_jumped = self._measure_gemm(
                    value,
                    variance,
                    steps[-1],
                    is_same=is_same,
                    is_after_others=not is_new_interval,
                    rest_change=rest_change,
                )
            elif part == _REST:
                change = value - float(self._x[part]) - math.log(self._rest_part(shares.owned))
                has_jumped = self._measure_rest(value, variance, shares.owned)
                rest_change = change if has_jumped else rest_change
            else:
                has_jumped = self._measure(part, value, variance)
            if has_jumped or not is_same:
                noise.forget_last(value)
            else:
                noise.learn(value)
        self._shares, self._is_known = shares, True

    def _rest_part(self, owned: float) -> float:
        """The rest of a rank that owns so much, as a share of that at even shares."""
        return 1.0 - self._moving_rest[0] * (1.0 - owned)

    def _measure_rest(self, value: float, variance: float, owned: float) -> bool:
        """Seconds of the rest under ``owned``. Whether the rank's speed has jumped."""
        moving, own_variance, covariance = self._moving_rest
        before, speed = float(self._x[_REST]), float(self._p[_REST, _REST])
        part = self._rest_part(owned)
        innovation = value - before - math.log(part)
        gradient = (owned - 1.0) / part
        told = speed + gradient * (2.0 * covariance + gradient * own_variance)
        has_jumped = innovation**2 > JUMP**2 * (told + variance)
        if has_jumped:
            speed += max(JUMP_SIZE, abs(innovation)) ** 2
        found = moving
        for _ in range(_ITERATIONS):  # the logarithm bends: anew around what was found
            part = 1.0 - found * (1.0 - owned)
            gradient = (owned - 1.0) / part
            innovation = value - before - math.log(part) - gradient * (moving - found)
            # Covariances of log r, and of ρ, with what is measured.
            of_speed, of_moving = speed + gradient * covariance, covariance + gradient * own_variance
            total = of_speed + gradient * of_moving + variance
            found = min(max(moving + of_moving / total * innovation, 0.0), MOST_MOVING_REST)
        self._x[_REST] = min(max(before + of_speed / total * innovation, _LEAST_LOG), _MOST_LOG)
        self._p[_REST, _REST] = max(speed - of_speed**2 / total, 0.0) if gradient else speed * variance / total
        self._moving_rest = (
            found,
            max(own_variance - of_moving**2 / total, 0.0),
            covariance - of_speed * of_moving / total,
        )
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
        executed, own = self._executed(step.shares)
        gradient = np.zeros(len(self._x))
        gradient[_GEMM] = 1.0
        if step.is_forced:  # odd numbers of columns cost more: that tells nothing of others
            variance += float(own @ self._p[_CURVE:, _CURVE:] @ own)
        else:
            gradient[_CURVE:] = own
        gain = self._p @ gradient
        own_variance = float(gradient @ gain) + variance
        innovation = value - float(self._x[_GEMM]) - executed
        # What no plan changes has changed as much, within a factor of 2: so the rank's speed has.
        has_rest_jumped = innovation**2 / 2.0 < rest_change * innovation < innovation**2 * 2.0
        is_ambiguous = not is_same and not step.is_forced and bool(own.any()) and not has_rest_jumped
        has_jumped = not is_ambiguous and (has_rest_jumped or innovation**2 > JUMP**2 * own_variance)
        if has_jumped:
            self._p[_GEMM, _GEMM] += max(JUMP_SIZE, abs(innovation)) ** 2
            curve = np.arange(_CURVE, len(self._x))
            self._p[curve, curve] += np.where(self._p[curve, curve] < CURVE_ERROR**2, CURVE_CHANGE**2, 0.0)
            gain = self._p @ gradient
            own_variance = float(gradient @ gain) + variance
        gain /= own_variance
        self._x += gain * innovation
        np.clip(self._x[:_CURVE], _LEAST_LOG, _MOST_LOG, out=self._x[:_CURVE])
        np.clip(self._x[_CURVE:], -_MOST_CORRECTION, _MOST_CORRECTION, out=self._x[_CURVE:])
        self._cost = None
        # Joseph's form keeps the covariance positive whatever rounding does.
        keep = self._identity - gain[:, None] * gradient
        self._p = keep @ self._p @ keep.T + gain[:, None] * (variance * gain)
        if is_ambiguous and not is_after_others:
            # Or the speed has jumped just then and the curve is right: how far that is from what is believed now.
            elsewhere = -gain * innovation
            elsewhere[_GEMM] += innovation
            self._p += _share_of_jumps(innovation, own_variance) * elsewhere[:, None] * elsewhere
        return has_jumped

    def _executed(self, shares: Shares) -> tuple[float, Floats]:
        """(logarithm of the multiplications' share under a plan, its gradient by the corrections)."""
        cost, spared, wider = self.cost, shares.spared, max(shares.owned, 1.0)
        gradient = np.zeros(len(self._x) - _CURVE)
        if shares.owned < 1.0:
            spared = 1.0 - shares.owned * (1.0 - spared)
        own = wider * cost.gemm_share_at(spared)
        _add_gradient(gradient, cost, spared, wider)
        borrowed = cost.borrowed_at(shares.borrowed) if shares.borrowed > 0.0 else 0.0
        if borrowed:
            gradient[-1] = borrowed
            if shares.borrowed < 1.0:
                _add_gradient(gradient, cost, 1.0 - shares.borrowed, cost.borrowing)
        executed = max(own + borrowed, 1e-9)
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


def _share_of_jumps(innovation: float, variance: float) -> float:
    """How likely an innovation under a new plan comes from a jump, by Bayes."""
    jump = HAZARD * _density(innovation, variance + JUMP_SIZE**2)
    return jump / (jump + (1.0 - HAZARD) * _density(innovation, variance) + 1e-300)


def _density(distance: float, variance: float) -> float:
    return math.exp(-0.5 * distance**2 / variance) / math.sqrt(variance)


def _cost_of(calibrated: Mapping[str, Any]) -> ResizingCost:
    return ResizingCost(**{name: tuple(calibrated[name]) for name in _POINTS}, borrowing=calibrated["borrowing"])


def _log_parts(step: StepTimes, expected_gather_fill_s: float) -> list[float]:
    """Of a step: its rest, its multiplications, and how many times as long as expected its gathers take, if any are."""
    least_s = max(_LEAST_PART * step.busy_s, LEAST_SECONDS)
    rest_s = max(step.busy_s - step.gemm_s - step.gather_fill_s, least_s)
    parts = [math.log(rest_s), math.log(step.gemm_s)]
    if expected_gather_fill_s > 0.0:
        parts.append(math.log(max(step.gather_fill_s, least_s) / expected_gather_fill_s))
    return parts


def usual_of(values: Sequence[float]) -> float:
    """What is usual among a few: the median forgives a hiccup, an evaluation or a checkpoint; of two the smaller."""
    return min(values) if len(values) == 2 else _middle(values)


def _middle(values: Sequence[float]) -> float:
    """The median."""
    ascending, half = sorted(values), len(values) // 2
    return ascending[half] if len(ascending) % 2 else (ascending[half - 1] + ascending[half]) / 2


def _median(steps: Sequence[StepTimes]) -> StepTimes:
    """A step's usual times."""
    return StepTimes(
        busy_s=usual_of([step.busy_s for step in steps]),
        gemm_s=usual_of([step.gemm_s for step in steps]),
        gather_fill_s=usual_of([step.gather_fill_s for step in steps]),
        shares=steps[-1].shares,
        is_forced=steps[-1].is_forced,
        wait_s=_middle([step.wait_s for step in steps]),
    )
