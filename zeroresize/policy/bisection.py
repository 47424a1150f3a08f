"""Where on an interval something begins or ceases to hold."""

from __future__ import annotations

from collections.abc import Callable

#: Halvings of an interval: to a millionth of it.
_BISECTIONS = 20


def largest(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """The largest value between for which ``holds``, if it holds up to some value; ``low`` if nowhere."""
    if holds(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def smallest(low: float, high: float, holds: Callable[[float], bool]) -> float:
    """The smallest value between for which ``holds``, if it holds from some value on; ``high`` if nowhere."""
    if holds(low):
        return low
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
