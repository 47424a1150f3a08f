"""How a rank's γ is divided among its layers.

What is pruned of one layer hurts more than the same of another: queries and keys are multiplied with each other, so
what is left out there changes which tokens attend to which. Layers that hurt are pruned last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def group_ratios(
    costs: Mapping[str, float], ratio: float, *, prune_last: Sequence[str], max_ratio: float
) -> dict[str, float]:
    """γ_k of every layer with Σ cost_k γ_k = γ Σ cost_k: layers to be pruned last only give what others cannot.

    Args:
        costs: of every layer's products by name, in any unit.
        ratio: γ of the rank.
        prune_last: a layer whose name holds one of these is pruned only once all others are at γ_max.
        max_ratio: γ_max; a γ beyond it is every layer's own.
    """
    last = {name for name in costs if any(part in name for part in prune_last)}
    cost_of_last = sum(costs[name] for name in last)
    cost_of_first = sum(costs.values()) - cost_of_last
    if not cost_of_last or not cost_of_first or ratio >= max_ratio:
        return dict.fromkeys(costs, ratio)
    wanted = ratio * (cost_of_first + cost_of_last)
    of_first = min(max_ratio, wanted / cost_of_first)
    of_last = max(0.0, (wanted - of_first * cost_of_first) / cost_of_last)
    return {name: of_last if name in last else of_first for name in costs}
