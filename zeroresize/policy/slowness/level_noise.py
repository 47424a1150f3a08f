"""How a rank's level varies from window to window while it is not slow: what slowness must stand out of.

The noise of :mod:`zeroresize.policy.speed.noise` tells measuring from drifting by products of two
differences in a row, for a filter that follows every drift. Here a level is compared over up to 16 windows, and how
much the median of so many varies must be known well: from more windows, and with their correlation.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from zeroresize.policy.speed.noise import LEAST_NOISE, USUAL_NOISE

#: So many windows are kept, and what is believed before any were seen counts as so many.
_MEMORY, _PRIOR = 64, 6.0
#: A window counts once so many have followed it, or as many as came before: a slowness that begins is no noise.
_DELAY = 16
#: Before so many windows were seen, the standard deviation of one may be as large as this.
_FEW, _UNKNOWN_NOISE = 8, 0.1
#: Windows further apart are taken for independent.
_MOST_LAG = 4
#: Variance of a median to that of a mean, of normal noise.
_MEDIAN = 1.57


class LevelNoise:
    """Learns the standard deviation of the usual level of some windows."""

    def __init__(self) -> None:
        self._levels: deque[float] = deque(maxlen=_MEMORY + _DELAY)
        self._known: tuple[float, list[float]] | None = None

    def learn(self, level: float) -> None:
        """Take the level of a window in which the rank is not slow as far as is known."""
        self._levels.append(level)
        self._known = None

    def forget_newest(self, num_windows: int) -> None:
        """Forget so many windows, and what may have begun in the one before: they belong to a slowness."""
        for _ in range(min(num_windows + 1, len(self._levels))):
            self._levels.pop()
        self._known = None

    @property
    def _num_counting(self) -> int:
        return max(len(self._levels) - _DELAY, len(self._levels) // 2)

    def deviation(self, num_windows: int) -> float:
        """Return the standard deviation of the median of so many windows; of two, of the smaller or the larger."""
        variance, correlations = self._learned()
        spread = 1.0 + 2.0 * sum(
            max(correlation, 0.0) * (1.0 - lag / num_windows)
            for lag, correlation in enumerate(correlations, 1)
            if lag < num_windows
        )
        return math.sqrt(variance * spread * (_MEDIAN if num_windows > 2 else 1.0) / num_windows)

    def _learned(self) -> tuple[float, list[float]]:
        """Variance of a single window, and the correlation of windows that are 1, 2, … apart."""
        if self._known is None:
            self._known = _learn(list(self._levels)[: self._num_counting])
        return self._known


def _learn(levels: Sequence[float]) -> tuple[float, list[float]]:
    mean = sum(levels) / max(len(levels), 1)
    distances = [level - mean for level in levels]
    square = sum(distance**2 for distance in distances) + _PRIOR * USUAL_NOISE**2
    correlations = [
        sum(first * second for first, second in zip(distances, distances[lag:], strict=False)) / square
        for lag in range(1, _MOST_LAG + 1)
    ]
    least = LEAST_NOISE if len(levels) >= _FEW else _UNKNOWN_NOISE
    return max(square / (len(levels) + _PRIOR), least**2), correlations
