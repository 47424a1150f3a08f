"""How a rank's γ is divided among its layers: alike in every segment, and within a segment so that it hurts least.

A segment is what ranks compute between two of their synchronisations: a step takes as long as the slowest rank of each
segment, summed over all of them. What is pruned in one segment beyond the straggler's need makes up for nothing in
another, so every segment prunes γ. Within it, what is pruned of one layer hurts more than the same of another: queries
and keys are multiplied with each other, and what is left out there changes which tokens attend to which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Segments = Sequence[Sequence[str]]


def group_ratios(
    costs: Mapping[str, float], segments: Segments, ratio: float, *, prune_last: Sequence[str], max_ratio: float
) -> dict[str, float]:
    """γ_k of every layer with Σ cost_k γ_k = γ Σ cost_k over each segment.

    Args:
        costs: of every layer's products by name, in any unit.
        segments: the names of the layers of each, every layer in one of them.
        ratio: γ of the rank.
        prune_last: a layer whose name holds one of these is pruned only once the others of its segment are at γ_max.
        max_ratio: γ_max; a γ beyond it is every layer's own.
    """
    ratios: dict[str, float] = {}
    for segment in segments:
        last = [name for name in segment if any(part in name for part in prune_last)]
        cost_of_last = sum(costs[name] for name in last)
        cost_of_first = sum(costs[name] for name in segment) - cost_of_last
        of_first = of_last = ratio
        if cost_of_last and cost_of_first and ratio < max_ratio:
            wanted = ratio * (cost_of_first + cost_of_last)
            of_first = min(max_ratio, wanted / cost_of_first)
            of_last = max(0.0, (wanted - of_first * cost_of_first) / cost_of_last)
        ratios |= {name: of_last if name in last else of_first for name in segment}
    return {name: ratios[name] for name in costs}
