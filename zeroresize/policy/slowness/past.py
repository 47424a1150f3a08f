"""What slows ranks of a group alike, which no comparison with the others shows: each against its own past.

``R`` ranks, ``C`` times of each in a window: the busy time and the step first, which are compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.slowness.rank_level import MOST_KEPT, LevelChange, RankLevel
from zeroresize.policy.speed.noise import ALIKE
from zeroresize.utils.usual import usual_of

Times: TypeAlias = NDArray[np.floating[Any]]

#: So many windows in a row must show a change: what disturbs all ranks alike, or links, comes and goes more often.
_LASTING = 4
#: A past is the usual of so many windows at first, and the mean of so many later.
_FEWEST, _MEMORY = MOST_KEPT // 2, 2 * MOST_KEPT


class Past:
    """Follows times against what they were, of windows that are neither new nor slow; a step must be longer, too.

    A window in which most ranks have another amount of work is passed over; after some of them the past begins anew.

    Attributes:
        times: [R, C] of the past; None while they are not known.
        ratios: [R] how many times as long each rank's busy time is in the newest window; empty while that is not known.
        level: that of most ranks.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget what was: times are not comparable any more."""
        self.times: Times | None = None
        self.level = RankLevel(self._tolerance, _LASTING)
        self._works: Times | None = None
        self.ratios: Times = np.empty(0)
        self._new = deque[tuple[Times, Times]]()
        self._num_learned, self._num_unlike = _FEWEST, 0

    def update(
        self, times: Times, works: Times, beside_s: float = 0.0, are_slow: Sequence[int] = ()
    ) -> LevelChange | None:
        """Take the next window; return what it changes.

        Args:
            times: [R, C], seconds.
            works: [R, any], what times depend on, such as counted work, by which times are priced, and the elements of
                the model's inputs; NaN where that is not known.
            beside_s: of a step, which stays as it is; with it all times are above 0.
            are_slow: ranks whose times belong to no past.
        """
        if self.times is None or self._works is None:
            self._new.append((times, works))
            if len(self._new) == _FEWEST:
                self.times, self._works = (np.sort(each, axis=0)[_FEWEST // 2] for each in zip(*self._new, strict=True))
                self._new.clear()
            return None
        ratios = works / self._works
        are_like: NDArray[np.bool_] = np.logical_not(np.any(abs(ratios - 1.0) > ALIKE, axis=1))
        if 2 * int(are_like.sum()) <= len(are_like):
            self._num_unlike += 1
            if self._num_unlike >= _FEWEST:
                self.begin_anew()
            return None
        self._num_unlike = 0
        if not math.isnan(ratios[0, 0]):
            times = times / ratios[:, :1]
        compared = (times[:, :2] + beside_s) / (self.times[:, :2] + beside_s)
        self.ratios = compared[:, 0]
        change = self.level.update(math.log(min(usual_of(column.tolist()) for column in compared[are_like].T)))
        if self.level.is_slow:
            self._new.clear()
            return change
        if are_slow or not are_like.all():
            are_like[list(are_slow)] = False
            times = np.where(are_like[:, None], times, self.times)
        self._new.append((times, works))
        if len(self._new) > MOST_KEPT:
            self._num_learned = min(self._num_learned + 1, _MEMORY)
            self.times = self.times + (self._new.popleft()[0] - self.times) / self._num_learned
        return change
