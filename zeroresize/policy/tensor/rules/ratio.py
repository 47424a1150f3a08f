"""How much a straggler prunes: Eq. (1) of the paper on full-work numbers and measured costs.

``T`` is a rank's busy time of an iteration, ``M`` the part of it spent multiplying matrices in the balanced layers,
both in seconds and as they would be with the full work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zeroresize.policy.tensor.costs import HALVINGS
from zeroresize.policy.tensor.estimation.curves import Floats, GroupTimes, ratios_to_reach
from zeroresize.policy.tensor.estimation.times import RankTimes

#: A step that gets shorter by less than this share is not worth what is pruned for it.
_WORTHWHILE = 0.01


def reference_time(busy_s: Sequence[float], target: str) -> float:
    """Return the time that Eq. (1) compares with: the mean over the ranks, or their minimum.

    With five ranks or more ``"min"`` is the lowest quarter, or noise would make stragglers of everyone. Nothing is lost
    by it: a step takes as long as the slowest of the normal ranks anyway.
    """
    if target == "mean":
        return sum(busy_s) / len(busy_s)
    return sorted(busy_s)[(len(busy_s) - 1) // 4]


def find_stragglers(
    busy_s: Sequence[float],
    reference_s: float,
    tolerance: float,
    were_stragglers: Sequence[bool],
    surely_s: Sequence[float] | None = None,
) -> tuple[bool, ...]:
    """Find who exceeds the reference by more than ``tolerance``; who was one already is let go at half of it.

    Args:
        surely_s: what every rank takes at least, as far as is known: who may be as fast as the reference is none.
    """
    return tuple(
        time > reference_s * (1.0 + (tolerance / 2 if was else tolerance)) and surely > reference_s
        for time, was, surely in zip(busy_s, were_stragglers, surely_s or busy_s, strict=True)
    )


def slowest_normal_s(times: Sequence[RankTimes], are_stragglers: Sequence[bool]) -> float:
    """Return the busy time of the slowest rank that is no straggler, seconds; 0 if all are."""
    return max((rank.busy_s for rank, slow in zip(times, are_stragglers, strict=True) if not slow), default=0.0)


def pruning_ratios(
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    reference_s: float,
    headroom: float = 0.0,
    *,
    budget: float = 1.0,
    min_gain: float = 0.0,
) -> list[float]:
    """Return γ of every rank, 0 for those that are no stragglers: the least that brings a rank to the target time.

    With cost proportional to FLOPs this is Eq. (1), γ = (T − reference) / M. The target is the reference time, but
    never below what the slowest rank can reach: pruning past that would drop work without shortening the step. Nor is
    the last hundredth of the step pursued: a rank that is slow outside its products would prune all it can for nothing.
    Where that takes more than ``budget``, the target is the least time that does not. Where that saves less than
    ``min_gain`` asks for, nothing is pruned.

    Args:
        times, are_stragglers: of every rank.
        reference_s: what a straggler is compared with, seconds.
        headroom: share by which a straggler aims below that. Ranks that take equally long on average still wait for
            each other at every collective, now this one, now that one.
        budget: the largest share of the group's products that may be pruned.
        min_gain: what share of a step must be saved for all of the stragglers' products, and of less in proportion.
    """
    group, are_slow = GroupTimes.of(times), np.array(are_stragglers, dtype=bool)
    normal_s = slowest_normal_s(times, are_stragglers)
    least_s = float(group.busy_at_points.min(axis=1)[are_slow].max(initial=0.0))
    target_s = max((1.0 - headroom) * max(reference_s, normal_s), least_s * (1.0 + _WORTHWHILE))
    if budget < 1.0 or min_gain > 0.0:
        amounts_SP = (group.ratios * group.owned_R[:, None])[are_slow]  # which can be added up
        target_s = _worthwhile(target_s, amounts_SP, group.busy_at_points[are_slow], len(times), budget, min_gain)
    return np.where(are_slow, group.ratios_to_reach(target_s), 0.0).tolist()


def _worthwhile(
    target_s: float, ratios_SP: Floats, busy_s_SP: Floats, num_ranks: int, budget: float, min_gain: float
) -> float:
    """The time that stragglers should reach: ``target_s``, what the budget allows, or where that is too little the
    slowest one's."""
    slowest_s = float(busy_s_SP[:, 0].max(initial=0.0))

    def pruned_for(level_s: float) -> float:
        return math.fsum(ratios_to_reach(np.array([level_s]), ratios_SP, busy_s_SP)[:, 0])

    level_s = min(target_s, slowest_s)
    if pruned_for(level_s) > budget * num_ranks:
        low_s, level_s = level_s, slowest_s
        for _ in range(HALVINGS):
            middle_s = (low_s + level_s) / 2
            low_s, level_s = (middle_s, level_s) if pruned_for(middle_s) > budget * num_ranks else (low_s, middle_s)
    asked = min_gain * pruned_for(level_s) / max(len(ratios_SP), 1)
    return level_s if slowest_s - level_s >= asked * slowest_s else slowest_s
