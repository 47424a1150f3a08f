"""How the logarithm of what is timed varies between intervals and between steps, learned from what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from zeroresize.policy import FEW

#: What differs by more standard deviations is a jump of the speed.
JUMP = 4.0
#: What is timed is taken to be alike where it differs by a smaller share: there are other reasons for that than speed.
ALIKE = 0.1
#: Relative standard deviation of an interval's times before any were compared, and the least there is.
USUAL_NOISE = 0.03
LEAST_NOISE = ALIKE * USUAL_NOISE
#: Differences of intervals that the learned noise is the mean of, at most.
_MEMORY = 24
#: Of normal noise: the variance of a median to that of a mean, the standard deviation to the median deviation.
MEDIAN, _NORMAL = math.pi / 2.0, 1.4826


@dataclass
class Noise:
    """Estimate how a logarithm varies from interval to interval, at one speed.

    With y the measured logarithm and d its differences: E[d²] = q + 2r, E[d d'] = −r.

    Attributes:
        weight: how many differences were seen, at most ``_MEMORY``.
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
        """Return r, the variance of one interval's measurement."""
        return max(min(-self.product, self.square / 2.0), LEAST_NOISE**2)

    @property
    def drift(self) -> float:
        """Return q, the variance of the speed's change in an interval."""
        return max(self.square - 2.0 * self.white, (LEAST_NOISE / 2.0) ** 2)

    @property
    def of_one_step(self) -> float:
        """Return the variance of a single step."""
        return max(self.scatter, self.white)

    def of_steps(self, number: int) -> float:
        """Return the variance of the median of so many steps."""
        return max(self.white, self.scatter * (MEDIAN if number > 2 else 1.0) / number)

    def learn_scatter(self, values: Sequence[float]) -> None:
        """Take the logarithms of an interval's steps."""
        if len(values) < FEW:
            return
        middle = median(values)
        variance = (_NORMAL * median([abs(value - middle) for value in values])) ** 2
        if self.scatter == 0.0:
            self.scatter = variance
        else:  # an interval within which the speed jumps scatters widely
            self.scatter += (min(variance, JUMP * self.scatter) - self.scatter) / JUMP

    def learn(self, value: float) -> None:
        """Take the next interval's y, at the same speed as the last."""
        last, difference_before = self.last
        difference = value - last
        if not math.isnan(difference):
            most = JUMP * math.sqrt(self.square + LEAST_NOISE**2)
            difference = min(max(difference, -most), most)
            self.weight = min(self.weight + 1.0, _MEMORY)
            self.square += (difference**2 - self.square) / self.weight
            if not math.isnan(difference_before):
                self.product += (difference * difference_before - self.product) / self.weight
            else:
                self.product += (-(difference**2) / 2.0 - self.product) / self.weight
        self.last = value, difference

    def forget_last(self, value: float) -> None:
        """Forget what was before ``value``: the next interval cannot be compared with that."""
        self.last = value, math.nan
