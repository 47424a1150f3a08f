"""What slows ranks of a group alike, which no comparison with the others shows: each against its own past.

``R`` ranks, ``C`` numbers of each in a window: the busy time and the step first, counted work and inputs last.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.slowness.rank_level import MOST_KEPT, LevelChange, RankLevel
from zeroresize.policy.speed.noise import ALIKE
from zeroresize.utils.usual import usual_of

Rows: TypeAlias = NDArray[np.floating[Any]]

#: So many windows in a row must show a change: what disturbs all ranks alike, or links, comes and goes more often.
_LASTING = 4
#: A past is known from so many windows on, and of so many later.
_FEWEST, _MEMORY = MOST_KEPT // 2, 2 * MOST_KEPT


class Past:
    """Follows times against what they were, of windows that are neither new nor slow; a step must be longer, too.

    A window in which most ranks have another amount of work is passed over; after some of them the past begins anew.
    A little more work may take as much longer.

    Attributes:
        usual: [R, C] of the past; NaN where that is not known.
        ratios: [R] how many times as long each rank's busy time is in the newest window, NaN for other work; empty
            while the past is not known.
        level: that of most ranks.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.level = RankLevel(self._tolerance, _LASTING)
        self.ratios: Rows = np.empty(0)
        self._known, self._new = list[Rows](), list[Rows]()
        self._num_unlike = 0

    def update(self, rows: Rows, slow: Collection[int] = ()) -> LevelChange | None:
        """Take the next window [R, C]; return what it changes. Times of ``slow`` ranks belong to no past."""
        if len(self._known) < _FEWEST:
            self._learn(rows)
            return None
        works = rows[:, -2:] / self.usual[:, -2:]
        are_like: NDArray[np.bool_] = np.logical_not(np.any(abs(works - 1.0) > ALIKE, axis=1))
        if 2 * int(are_like.sum()) <= len(rows):
            self._num_unlike += 1
            if self._num_unlike >= _FEWEST:
                self._begin_anew()
            return None
        self._num_unlike = 0
        more_work = np.fmax(1.0, np.fmax(works[:, 0], works[:, 1]))
        ratios = rows[:, :2] / self.usual[:, :2] / more_work[:, None]
        self.ratios = np.where(are_like, ratios[:, 0], math.nan)
        change = self.level.update(math.log(min(usual_of(column.tolist()) for column in ratios[are_like].T)))
        if self.level.is_slow:
            self._new.clear()
            return change
        are_like[list(slow)] = False
        self._new.append(np.where(are_like[:, None], rows, self.usual))
        if len(self._new) > MOST_KEPT:
            self._learn(self._new.pop(0))
        return change

    def _learn(self, rows: Rows) -> None:
        """Take the middle of what is known; NaN, which sorts last, counts where there is nothing else."""
        self._known = [*self._known, rows][-_MEMORY:]
        ascending = np.sort(np.stack(self._known), axis=0)
        middle = (np.isfinite(ascending).sum(axis=0, keepdims=True) - 1) // 2
        self.usual: Rows = np.take_along_axis(ascending, middle, axis=0)[0]
