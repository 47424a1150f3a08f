"""What is usual among a few measurements: interruptions lengthen steps, and must not look like slowness.

Units and strategies filter single interruptions by this one rule: of two the shorter, of three the middle one. Units
take it over the steps of an interval under one plan (:mod:`zeroresize.policy.speed.change_of_level` splits them where
the level changes), strategies over the newest steps of each rank. Of layers two profiles must want a move.

What comes after it differs, as the questions do:

- **Units**: a meter (:mod:`zeroresize.policy.speed.meter`) follows each part of a step and learns its noise, so a jump
  is what exceeds so many standard deviations. What two plans take beside each other tells what pruning costs
  (:mod:`zeroresize.policy.tensor.estimation.estimator`).
- **Layers**: work varies as routed tokens do, or jumps as a freeze does: the same meter follows each layer from profile
  to profile (:mod:`zeroresize.policy.pipeline.profiles`).
- **Strategies**: work changes its layout at each switch, and only a rank's speed is asked for: the same meter follows
  seconds per unit of work, and what is told of it changes by no little
  (:mod:`zeroresize.policy.strategy.stragglers.rank_speeds`).
"""

from __future__ import annotations

from collections.abc import Sequence


def usual_of(values: Sequence[float]) -> float:
    """Return what is usual among a few: the median, and of two the smaller.

    It forgives a hiccup, an evaluation or a checkpoint.
    """
    return min(values) if len(values) == 2 else middle_of(values)


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


def middle_of(values: Sequence[float]) -> float:
    """Return the median."""
    ascending, half = sorted(values), len(values) // 2
    return ascending[half] if len(ascending) % 2 else (ascending[half - 1] + ascending[half]) / 2
