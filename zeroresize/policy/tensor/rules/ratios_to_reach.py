"""For many ranks and many busy times at once: how much each rank must be spared to take so long at most.

S ranks, P points of what pruning costs, L levels: busy times that are tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ratios_to_reach(levels_s_L: Floats, ratios_SP: Floats, busy_s_SP: Floats) -> Floats:
    """Return [S, L] the least ratios.

    They are those of :meth:`~zeroresize.policy.tensor.estimation.times.RankTimes.ratio_to_reach`.

    Args:
        levels_s_L: seconds.
        ratios_SP: of every rank, ascending.
        busy_s_SP: what the rank takes at them, seconds.
    """
    first_SL = np.broadcast_to(busy_s_SP.argmin(axis=1)[:, None], (len(busy_s_SP), len(levels_s_L)))
    for point in range(busy_s_SP.shape[1] - 1, -1, -1):
        first_SL = np.where(busy_s_SP[:, point, None] <= levels_s_L, point, first_SL)
    row_S1 = busy_s_SP.shape[1] * np.arange(len(busy_s_SP))[:, None]
    before_SL, at_SL = row_S1 + np.maximum(first_SL - 1, 0), row_S1 + first_SL
    slow_s, fast_s = busy_s_SP.take(before_SL), busy_s_SP.take(at_SL)
    low, high = ratios_SP.take(before_SL), ratios_SP.take(at_SL)
    part = np.clip((slow_s - levels_s_L) / np.where(slow_s > fast_s, slow_s - fast_s, 1.0), 0.0, 1.0)
    return np.where(first_SL == 0, ratios_SP[:, :1], low + (high - low) * part)
