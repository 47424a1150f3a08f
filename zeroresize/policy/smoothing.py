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


#: A change of γ as large as this is carried out at once; a smaller one has to be wanted twice.
LARGE_CHANGE = 0.1
#: A rank that prunes nothing starts at once with a γ as large as this, that of χ = 2; a smaller one has to be wanted
#: twice: on a shared machine a rank takes 1.3 times as long for a second or two now and then.
LARGE_START = 0.5
#: A γ that falls by so much, to less than so much, falls to 0.
_FAR = 0.3


def steadied(current: float, wanted: float, wanted_before: float, dead_band: float) -> float:
    """The ratio γ to use, so that noise does not make it wander.

    Letting go, large starts and large changes happen at once. Smaller ones happen when two updates in a row want them
    in the same direction, and then go as far as both do; within ``dead_band`` nothing changes. A fall from far above to
    a small γ is letting go: of the little that was computed up there nothing finer can be told.
    """
    change, change_before = wanted - current, wanted_before - current
    if change <= -_FAR and wanted < _FAR:
        return 0.0
    if wanted == 0.0 or abs(change) >= (LARGE_CHANGE if current > 0.0 else LARGE_START):
        return wanted
    if current == 0.0:
        return min(wanted, wanted_before)
    if min(abs(change), abs(change_before)) < dead_band or change * change_before < 0:
        return current
    return current + min(change, change_before, key=abs)
