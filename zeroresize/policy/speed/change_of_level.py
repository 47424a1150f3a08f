"""Where within an interval a rank's speed changed: the steps under one plan, split at one change of level.

A median over the interval would show a change that came late only at the next update, and put down to the next plan
what had happened before it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np

from zeroresize.policy.speed.noise import ALIKE, JUMP, Noise
from zeroresize.utils.usual import usual_of

#: Steps on either side of a change, at least: one alone is a hiccup.
_FEWEST = 2
#: So many places of a long interval are tried.
_MOST_PLACES = 32


def change_of_level(parts: Sequence[Sequence[float]], noises: Sequence[Noise]) -> int | None:
    """Return after how many steps the level of any part changed.

    The place is that with the least distance of all steps from the usual time of their side, each part in units of
    its own scatter; the change counts if it is more than ``JUMP`` times the scatter of single steps.
    """
    number = len(parts[0])
    if number < 2 * _FEWEST:
        return None
    scatters = [math.sqrt(noise.of_one_step) for noise in noises]
    least = [max(JUMP * scatter, ALIKE) for scatter in scatters]
    if all(max(values) - min(values) <= change for values, change in zip(parts, least, strict=True)):
        return None
    places = sorted({*np.linspace(_FEWEST, number - _FEWEST, _MOST_PLACES).round().astype(int).tolist()})

    def distance(place: int) -> float:
        total = 0.0
        for values, scatter in zip(parts, scatters, strict=True):
            for side in (values[:place], values[place:]):
                usual = usual_of(side)
                total += math.fsum(abs(value - usual) for value in side) / scatter
        return total

    place = min(places, key=distance)
    changes = [abs(usual_of(values[place:]) - usual_of(values[:place])) for values in parts]
    return place if any(map(operator.gt, changes, least)) else None
