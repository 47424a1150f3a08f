"""The order of a step's strategies that takes the least time to switch: a travelling salesman's tour, solved exactly.

``S`` strategies. A tour begins and ends under the optimizer's strategy, where the optimizer's weights are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.strategy import Strategy

#: So many strategies take a tenth of a second; each further one more than doubles it.
MOST_STRATEGIES = 12


def cheapest_order(seconds: Sequence[Sequence[float]] | NDArray[np.float64], start: int) -> list[int]:
    """Return the strategies in the order of the shortest tour, ``start`` first; the way back to it is not named.

    By Held and Karp's dynamic programming over sets of strategies; the same numbers give the same order.

    Args:
        seconds: [S, S] of switching from the strategy of the row to that of the column, infinite where that is not
            possible.
        start: the optimizer's strategy.

    Raises:
        ValueError: for more than 12 strategies, or if no tour is possible.
    """
    times_SS = np.array(seconds, dtype=np.float64)
    size = len(times_SS)
    if size > MOST_STRATEGIES:
        raise ValueError(
            f"{size} strategies are too many to find the shortest tour: {MOST_STRATEGIES} is the largest number"
        )
    others = [one for one in range(size) if one != start]
    out, back = times_SS[start, others], times_SS[others, start]
    between = times_SS[np.ix_(others, others)]
    # Of every set of others, as bits: the shortest way from ``start`` through the set that ends at each of its members.
    ways = np.full((1 << len(others), len(others)), np.inf)
    for last in range(len(others)):
        ways[1 << last, last] = out[last]
    for visited in range(1, 1 << len(others)):
        for last in range(len(others)):
            before = visited & ~(1 << last)
            if before and before != visited:
                ways[visited, last] = np.min(ways[before] + between[:, last])
    order: list[int] = []
    visited, remaining_s = (1 << len(others)) - 1, back
    while visited:
        last = int(np.argmin(ways[visited] + remaining_s))
        if not np.isfinite(ways[visited, last] + remaining_s[last]):
            raise ValueError("no order of the strategies has only switches that are possible")
        order.append(others[last])
        visited, remaining_s = visited & ~(1 << last), between[:, last]
    return [start, *reversed(order)]


def visiting_order(
    strategies: Sequence[Strategy],
    optimizer_strategy: Strategy,
    seconds_between: Callable[[list[Strategy]], Sequence[Sequence[float]] | NDArray[np.float64]],
    *,
    overlap: bool,
) -> list[Strategy]:
    """Return the order in which a step visits strategies, the optimizer's first where it is one of them.

    Args:
        seconds_between: gives [S, S] seconds of switching between strategies, as of :func:`cheapest_order`.
        overlap: whether what travels to the next strategy does so while the present one trains. Where the optimizer's
            strategy trains, the first switch of a tour is then taken to cost nothing: a strategy whose weights are many
            is best visited then.
    """
    stops = [optimizer_strategy, *(one for one in strategies if one != optimizer_strategy)]
    seconds = seconds_between(stops)
    if overlap and optimizer_strategy in strategies:
        seconds = hide_first_switch(seconds)
    return [stops[number] for number in cheapest_order(seconds, 0) if stops[number] in strategies]


def hide_first_switch(seconds: Sequence[Sequence[float]] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [S, S] seconds of switching where the first switch of a tour, from the first strategy, takes none."""
    times_SS = np.array(seconds, dtype=np.float64)
    times_SS[0] = np.where(np.isfinite(times_SS[0]), 0.0, times_SS[0])
    return times_SS


def tour_seconds(seconds: Sequence[Sequence[float]] | NDArray[np.float64], order: Sequence[int]) -> float:
    """Return what the switches of a tour take, the way back to its first strategy included; 0 for a single strategy."""
    if len(order) < 2:
        return 0.0
    times_SS = np.asarray(seconds, dtype=np.float64)
    return float(sum(times_SS[one, other] for one, other in itertools.pairwise([*order, order[0]])))
