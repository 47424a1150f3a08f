"""For many ranks and many busy times at once: how much each rank must be spared to take so long at most.

S ranks, P points of what pruning costs, L levels: busy times that are tried.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def ratios_to_reach(levels_s_L: Floats, ratios_SP: Floats, busy_s_SP: Floats) -> Floats:
    """[S, L] the least ratios, as :meth:`~zeroresize.policy.times.RankTimes.ratio_to_reach` has them.

    Args:
        levels_s_L: seconds.
        ratios_SP: of every rank, ascending.
        busy_s_SP: what the rank takes at them, seconds.
    """
    is_reached_SPL = busy_s_SP[:, :, None] <= levels_s_L
    first_SL = np.where(is_reached_SPL.any(axis=1), is_reached_SPL.argmax(axis=1), busy_s_SP.argmin(axis=1)[:, None])
    before_SL = np.maximum(first_SL - 1, 0)
    slow_s, fast_s = (np.take_along_axis(busy_s_SP, point_SL, axis=1) for point_SL in (before_SL, first_SL))
    low, high = (np.take_along_axis(ratios_SP, point_SL, axis=1) for point_SL in (before_SL, first_SL))
    part = np.clip((slow_s - levels_s_L) / np.where(slow_s > fast_s, slow_s - fast_s, 1.0), 0.0, 1.0)
    return np.where(first_SL == 0, ratios_SP[:, :1], low + (high - low) * part)
