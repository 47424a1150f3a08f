"""What samples of different lengths take: by their lengths and the squares of these, as this rank's steps tell."""

from __future__ import annotations

import itertools
import math
from collections import deque

import numpy as np

#: Of so many steps what they took is fitted, and of so many at least.
_NEWEST, _LEAST = 128, 24
#: Least share by which lengths of steps must vary to tell anything.
_LEAST_VARIED = 0.02


class LengthTimes:
    """Fits seconds of steps by a constant, the sum of samples' lengths, and that of their squares; none negative."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, float, float]] = deque(maxlen=_NEWEST)

    def take(self, length: float, square: float, seconds: float) -> None:
        """Take a step's sums, and its busy seconds."""
        if 0.0 < seconds < math.inf:
            self._rows.append((length, square, seconds))

    @property
    def squares(self) -> float:
        """What the square of a length takes, of what the length takes; NaN where steps do not tell."""
        rows = np.array(self._rows)
        if len(rows) < _LEAST or rows[:, 0].std() < _LEAST_VARIED * rows[:, 0].mean() or not rows[:, 1].any():
            return math.nan
        scale = rows[:, :2].mean(axis=0)
        # Of relative errors a step that was interrupted has at most 1.
        known = np.column_stack([np.ones(len(rows)), rows[:, :2] / scale]) / rows[:, 2:]
        best = math.inf, np.zeros(3)
        for size in (3, 2, 1):  # least squares without negative ones: of all choices of columns
            for columns in itertools.combinations(range(3), size):
                fitted, *_ = np.linalg.lstsq(known[:, columns], np.ones(len(rows)), rcond=None)
                error = float(((known[:, columns] @ fitted - 1.0) ** 2).sum())
                if (fitted >= 0.0).all() and error < best[0]:
                    best = error, np.zeros(3)
                    best[1][list(columns)] = fitted
        _, by_length, by_square = best[1]
        return float(by_square / scale[1] / (by_length / scale[0])) if by_length > 0.0 else math.nan
