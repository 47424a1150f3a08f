"""Gradients of replicated parameters that are parts of a sum over the ranks, told from those that differ otherwise."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from zeroresize.checks.replicated import distance_of_sums

#: A gradient is small whose norm is below this part of the largest.
_SMALL = 1e-3
#: Below this they are alike.
_ALIKE = 1e-6


def differing_gradients(sums: Mapping[str, Sequence[Sequence[float]]], tolerance: float) -> tuple[list[str], bool]:
    """Name parameters whose gradients differ between ranks by more than rounding.

    A factor that all gradients of a rank have, as clipping gives, does not count.

    Args:
        sums: of each parameter's gradient on every rank those of even and of odd elements, and the norm; finite.
        tolerance: what they may differ by, of their norm, or of what is small beside the largest.

    Returns:
        The names, of the largest difference first, and whether those of the model's last layer are alike, so that what
        enters it is, too: then what differs is a part of a sum. Else other targets, or draws, may be the cause.
    """
    least = _SMALL * max(each[-1] for of_ranks in sums.values() for each in of_ranks) or 1.0
    ratios = [[each[-1] / of_ranks[0][-1] for each in of_ranks] for of_ranks in sums.values() if of_ranks[0][-1] > 0.0]
    even = [1.0] * max(map(len, sums.values()))
    factors = [statistics.median(of_rank) or 1.0 for of_rank in zip(*ratios or [even], strict=True)]
    last = ([name for name, of_ranks in sums.items() if of_ranks[0][-1] >= least] or [*sums])[-1]
    differing, is_last_alike = list(sums), False
    for divisors in (factors, even):
        distances = {
            name: max(
                distance_of_sums([number / by for number in each], of_ranks[0], least)
                for each, by in zip(of_ranks, divisors, strict=True)
            )
            for name, of_ranks in sums.items()
        }
        above = sorted((name for name in sums if distances[name] > tolerance), key=distances.__getitem__, reverse=True)
        differing = min(above, differing, key=len)
        is_last_alike |= distances[last] <= _ALIKE
    return differing, is_last_alike
