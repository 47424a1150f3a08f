"""Strategies to choose from, and lengths at which ranges may end."""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.plan.strategy import Strategy
from zeroresize.utils.value_checks import at_least


def candidate_strategies(
    num_ranks: int, num_layers: int, units: Sequence[int], ranks_per_node: int | None = None
) -> list[Strategy]:
    """Return all (dp, tp, pp) on the first ``num_ranks`` ranks whose layers and units divide.

    Args:
        num_layers: every stage has at least one.
        units: of the layers' segments, such as heads and feed-forward neurons: tp divides each number.
        ranks_per_node: where given, a tensor-parallel group lies in one node or fills whole ones.

    Raises:
        ValueError: for numbers below 1.
    """
    for key, value in (("num_ranks", num_ranks), ("num_layers", num_layers), *(("units", one) for one in units)):
        at_least(key, value, 1)
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    at_least("ranks_per_node", per_node, 1)
    strategies = []
    for tp in _divisors(num_ranks):
        is_whole = per_node % tp == 0 or tp % per_node == 0
        if is_whole and not any(one % tp for one in units):
            stages = [pp for pp in _divisors(num_ranks // tp) if pp <= num_layers]
            strategies += [Strategy(num_ranks // (tp * pp), tp, pp) for pp in stages]
    return strategies


def default_thresholds(longest: int, shortest: int = 256) -> list[int]:
    """Return the longest length and its halves, rising, down to ``shortest``."""
    at_least("longest", longest, 1)
    thresholds = [longest]
    while thresholds[-1] // 2 >= max(shortest, 1):
        thresholds.append(thresholds[-1] // 2)
    return thresholds[::-1]


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
