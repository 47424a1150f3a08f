"""Noise out, changes in: an exponential average that starts anew on a jump."""

from __future__ import annotations

import math

#: A sample that differs from the average by more than this share is a change of speed, not noise.
JUMP = 0.25


def smoothed(average: float, sample: float, weight: float) -> float:
    """The new average. A missing (NaN) sample leaves it, a missing average or a jump takes the sample as it is.

    Args:
        average: the average so far, NaN before the first sample.
        sample: the newest value.
        weight: of the newest sample, 0 to 1.
    """
    if math.isnan(sample):
        return average
    if math.isnan(average) or abs(sample - average) > JUMP * abs(average):
        return sample
    return weight * sample + (1.0 - weight) * average
