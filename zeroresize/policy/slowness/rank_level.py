"""Whether one rank is slow: the level of its times against the others', window after window, beyond learned noise.

``y`` is the logarithm of a rank's busy time as a multiple of the usual busy time of the others, once a window.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from zeroresize.policy.speed.meter import SpeedMeter
from zeroresize.policy.speed.noise import ALIKE, JUMP, USUAL_NOISE

Change = Literal["begins", "changes", "ends"]

#: So many standard deviations a level must be from another one to be told apart: of 40,000 windows of noise alone none
#: is told, and with 4 some are.
_SURE = 4.5
#: A level that begins must stand out by so many standard deviations of what levels were while the rank was not slow:
#: noise that lasts for several windows moves the level without making it less sure.
_OUTSTANDING = 3.5
#: Windows in a row that must show a change, unless more are wanted.
_LASTING = 2
#: A slowness is told to have begun at most so many windows ago.
MOST_KEPT = 16
#: While the noise is not known, in the first ``MOST_KEPT`` windows, only a level above this logarithm of times is told.
_LEAST_OF_NEW = JUMP * ALIKE
#: A slowness that was over within so many windows was short: the next must last twice as long to be told, for no more
#: than ``MOST_KEPT`` windows, and half as long again after so many windows without any.
_SHORT, _FORGOTTEN = MOST_KEPT // 2, 2 * MOST_KEPT


@dataclass(frozen=True)
class LevelChange:
    """Describe what has just changed: the level, times, before and after; 1 stands for as fast as the others."""

    kind: Change
    before: float
    after: float
    num_windows: int  # that have shown it, the newest included


@dataclass
class RankLevel:
    """Follow one rank's y, and say when it becomes slow, slower or less so, and when it has recovered."""

    tolerance: float  # by which share of their time a rank must be slower than the others, at least
    lasting: int = _LASTING
    meter: SpeedMeter = field(default_factory=SpeedMeter)  # of y
    seems_recovered: bool = False  # by the newest window
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_KEPT))
    _level: float | None = None  # what was told last; None where the rank is not slow
    _num_windows: int = 0  # so many have been seen
    _lasts: int = 0  # so many windows in a row show another level than was told
    _since: int = 0  # windows since the last slowness has begun, or ended
    _must_last: int = 0  # more than ``lasting``, after slowness that was soon over
    _levels: deque[float] = field(default_factory=deque)  # of the last windows, in none of which it was slow
    _mean: float = 0.0  # of levels before these, of the last ``_FORGOTTEN`` or so
    _variance: float = USUAL_NOISE**2
    _num_learned: int = 1

    @property
    def is_slow(self) -> bool:
        """Whether it was told to be slow, and not yet that this is over."""
        return self._level is not None

    @property
    def seems_slow(self) -> bool:
        """Whether it is slow, or the newest window shows that it may be."""
        return self.is_slow or self._lasts > 0

    @property
    def times(self) -> float:
        """How many times as long as the others the rank takes; 1 where it is not slow."""
        return 1.0 if self._level is None else math.exp(self.meter.level)

    def update(self, y: float) -> LevelChange | None:
        """Take the next window's y; return what it changes, None where nothing."""
        self.meter.pass_interval()
        self.meter.take([y])
        self._recent.append(y)
        self._num_windows += 1
        self._since += 1
        level, sure = self.meter.level, _SURE * math.sqrt(self.meter.variance)
        is_new = self._num_windows <= MOST_KEPT
        outstanding = _LEAST_OF_NEW if is_new else _OUTSTANDING * math.sqrt(self._variance)
        least = max(math.log1p(self.tolerance), sure, outstanding)
        self.seems_recovered = level < least / 2.0
        if self._level is None:
            if level > -least and not is_new:  # else another rank is slow
                self._learn(level)
            if self._since % _FORGOTTEN == 0:
                self._must_last //= 2
            return self._begin() if self._has_lasted(level > least, max(self._must_last, self.lasting)) else None
        before = math.exp(self._level)
        differs = abs(level - self._level) > max(ALIKE, math.sqrt(2.0) * sure)
        if not self._has_lasted(self.seems_recovered or differs, self.lasting):
            return None
        if not self.seems_recovered:
            self._level = level
            return LevelChange("changes", before, self.times, self.lasting)
        if self._since - self.lasting < _SHORT:
            self._must_last = min(2 * max(self._must_last, self.lasting), MOST_KEPT)
        self._level, self._since = None, 0
        return LevelChange("ends", before, 1.0, self.lasting)

    def _learn(self, level: float) -> None:
        """Learn how levels vary where the rank is not slow: of windows so long ago that they belong to no slowness."""
        self._levels.append(level)
        if len(self._levels) > MOST_KEPT:
            self._num_learned = min(self._num_learned + 1, _FORGOTTEN)
            distance = self._levels.popleft() - self._mean
            self._mean += distance / self._num_learned
            self._variance += (distance**2 - self._variance) / self._num_learned

    def _has_lasted(self, shows: bool, num_windows: int) -> bool:
        self._lasts = self._lasts + 1 if shows else 0
        if self._lasts < num_windows:
            return False
        self._lasts = 0
        return True

    def _begin(self) -> LevelChange:
        """The slowness began after the last of the recent windows that was nearer to the others than to it."""
        self._level = self.meter.level
        self._levels.clear()
        newest_first = enumerate(reversed(self._recent))
        self._since = next((back for back, y in newest_first if y < self._level / 2.0), len(self._recent))
        self._since = max(self._since, self.lasting)
        return LevelChange("begins", 1.0, self.times, self._since)
