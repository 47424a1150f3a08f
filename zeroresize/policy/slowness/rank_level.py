"""Whether one rank is slow: its usual time against that of the others, window after window, told with hysteresis.

``y`` is the logarithm of a rank's busy time as a multiple of the usual busy time of the others, once a window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zeroresize.policy.slowness.level_noise import LevelNoise
from zeroresize.utils.usual import usual_of

Change = Literal["begins", "changes", "ends"]

#: Over so many windows in a row a level is compared; slowness that lasts for less than the fewest is not told.
_SPANS = (2, 4, 8, 16)
#: A level stands out of the noise by so many standard deviations where slowness begins or changes, and where it ends.
_BEGINS, _ENDS = 4.5, 3.0
#: A change of level is at least so large: the logarithm of times.
_LEAST_CHANGE = 0.1
#: A slowness that is over after fewer windows was short: after each the next one must have lasted twice as long to be
#: told, until so many windows have passed without any.
_SHORT, _FORGOTTEN = 8, 64
#: So many windows of a slowness are kept, of which its level is the median.
_MOST_KEPT = 64


@dataclass(frozen=True)
class LevelChange:
    """Describe what has just changed.

    Attributes:
        kind: what it is.
        before, after: the level, times; 1 stands for as fast as the others.
        num_windows: how many windows, the newest included, have shown it.
    """

    kind: Change
    before: float
    after: float
    num_windows: int


class RankLevel:
    """Follows one rank's y and says when it becomes slow, slower or less so, and when it has recovered.

    Args:
        tolerance: by which share of their time a rank must be slower than the others, at least.
    """

    def __init__(self, tolerance: float) -> None:
        self._least = math.log1p(tolerance)
        self._noise = LevelNoise()
        self._recent: deque[float] = deque(maxlen=max(_SPANS))
        self._level = 0.0  # what was told last
        self._values: list[float] | None = None  # of the slowness at its present level; None where there is none
        self._num_slow = self._num_well = 0  # windows since the last change to slow, and to well
        self._num_short = 0  # of the spans, how many are too short to tell

    @property
    def times(self) -> float:
        """How many times as long as the others the rank takes; 1 where it is not slow."""
        return math.exp(usual_of(self._values)) if self._values else 1.0

    def update(self, level: float, *, learns: bool = True) -> LevelChange | None:
        """Take the next window's y.

        Args:
            level: y.
            learns: whether it tells how y varies: not where it is another rank that is slow, of few.

        Returns:
            What it changes; None where nothing.
        """
        if self._values is None:
            self._recent.append(level)
            self._num_well += 1
            if self._num_well % _FORGOTTEN == 0:
                self._num_short = max(self._num_short - 1, 0)
            change = self._begin() if level > self._least / 2.0 else None
            if learns and change is None:
                self._noise.learn(level)
            return change
        self._num_slow += 1
        self._values = [*self._values, level][-_MOST_KEPT:]
        return self._end() or self._follow()

    def forget_newest(self, num_windows: int) -> None:
        """Forget the newest windows as noise: this rank, or another of few, has become slow meanwhile."""
        self._noise.forget_newest(num_windows)

    def _least_level(self, num_windows: int) -> float:
        return max(self._least, _BEGINS * self._noise.deviation(num_windows))

    def _begin(self) -> LevelChange | None:
        recent = list(self._recent)
        for span in _SPANS[self._num_short :]:
            if len(recent) < span or usual_of(recent[-span:]) < self._least_level(span):
                continue
            least = usual_of(recent[-span:]) / 2.0
            begins = next((at for at in range(len(recent), 0, -1) if recent[at - 1] < least), 0)
            # Slowness that comes and goes may be low in the last two windows, though the span is usually high.
            if len(recent) - begins < 2 or usual_of(recent[begins:]) < self._least:
                begins = len(recent) - span
            self._values = recent[begins:]
            self._recent.clear()
            self.forget_newest(len(self._values) - 1)  # but for the newest, which was not learned
            self._num_slow = len(self._values)
            self._level = usual_of(self._values)
            return LevelChange("begins", 1.0, self.times, len(self._values))
        return None

    def _end(self) -> LevelChange | None:
        assert self._values is not None
        for span in _SPANS:
            recent, earlier = self._values[-span:], self._values[:-span]
            if len(recent) < span:
                return None
            level = usual_of(earlier) if earlier else self._level
            highest = _highest_usual(recent)
            if highest < self._least_level(span) / 2.0 and level - highest > _ENDS * self._noise.deviation(span):
                self._values = None
                self._recent.extend(recent)
                self._num_well = 0
                if self._num_slow - span < _SHORT:
                    self._num_short = min(self._num_short + 1, len(_SPANS) - 1)
                return LevelChange("ends", math.exp(level), 1.0, span)
        return None

    def _follow(self) -> LevelChange | None:
        assert self._values is not None
        for span in _SPANS[:-1]:
            recent, earlier = self._values[-span:], self._values[:-span]
            if len(earlier) < 2:
                return None
            least = max(_LEAST_CHANGE, _BEGINS * math.sqrt(2.0) * self._noise.deviation(span))
            rise, fall = usual_of(recent) - usual_of(earlier), usual_of(earlier) - _highest_usual(recent)
            if max(rise, fall) > least and abs(usual_of(recent) - self._level) > _LEAST_CHANGE:
                before = math.exp(usual_of(earlier))
                self._values = recent
                self._level = usual_of(recent)
                return LevelChange("changes", before, self.times, span)
        return None


def _highest_usual(values: Sequence[float]) -> float:
    """The median, and of two the larger."""
    return -usual_of([-value for value in values])
