"""Gradients of replicated parameters that are parts of a sum over the ranks, told from those that differ otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroresize.checks.replicated import distance_of_sums

#: Small is a gradient whose norm is below this part of the largest; alike are two that differ by less.
_SMALL, _ALIKE = 1e-3, 1e-6


def differing_gradients(sums: Mapping[str, Sequence[Sequence[float]]], tolerance: float) -> tuple[list[str], bool]:
    """Name parameters whose gradients differ between ranks by more than rounding, the largest difference first.

    A factor that all gradients of a rank have, as clipping gives, does not count.

    Args:
        sums: of each parameter's gradient, in the model's order, every rank's plain one, that by place, and norm.
        tolerance: what they may differ by, of their norm, or of what is small beside the largest.

    Returns:
        The names, and whether gradients of the last layer are alike, so that what enters it is, too: then what differs
        is a part of a sum. Else other targets, or random draws, may be the cause.
    """
    least = _SMALL * max(each[-1] for of_ranks in sums.values() for each in of_ranks) or 1.0
    last = ([name for name, of_ranks in sums.items() if of_ranks[0][-1] >= least] or [*sums])[-1]
    factors = [each[-1] / (sums[last][0][-1] or 1.0) or 1.0 for each in sums[last]]
    distances = {
        name: max(
            distance_of_sums([number / factor for number in each], of_ranks[0], least)
            for each, factor in zip(of_ranks, factors, strict=True)
        )
        for name, of_ranks in sums.items()
    }
    differing = [name for name, distance in distances.items() if distance > tolerance]
    return sorted(differing, key=distances.__getitem__, reverse=True), distances[last] <= _ALIKE
