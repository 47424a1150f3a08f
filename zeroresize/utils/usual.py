"""What is usual among a few measurements, so that interruptions do not count: of two the shorter, else the middle."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def usual_of(values: Sequence[float]) -> float:
    """Return what is usual among a few: the median, and of two the smaller.

    It forgives a hiccup, an evaluation or a checkpoint.
    """
    return min(values) if len(values) == 2 else median(values)


def usual_of_others(values: Sequence[float]) -> list[float]:
    """Return for each of some values, of two at least, what is usual among the others: :func:`usual_of`."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ascending, last = [values[index] for index in order], len(values) - 2  # of the others, from 0 on
    usual = [0.0] * len(values)
    for place, index in enumerate(order):
        lower, upper = (0, 0) if last == 1 else (last // 2, (last + 1) // 2)
        lower, upper = lower + (lower >= place), upper + (upper >= place)
        usual[index] = ascending[lower] if lower == upper else (ascending[lower] + ascending[upper]) / 2
    return usual
