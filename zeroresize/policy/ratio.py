"""How much a straggler prunes: Eq. (1) of the paper on full-work numbers and measured costs.

``T`` is a rank's busy time of an iteration, ``M`` the part of it spent multiplying matrices in the balanced layers,
both in seconds and as they would be with the full work.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.policy.times import RankTimes

#: A step that gets shorter by less than this share is not worth what is pruned for it.
_WORTHWHILE = 0.01


def reference_time(busy_s: Sequence[float], target: str) -> float:
    """The time that Eq. (1) compares with: the mean over the ranks, or their minimum.

    With five ranks or more ``"min"`` is the lowest quarter, or noise would make stragglers of everyone. Nothing is lost
    by it: a step takes as long as the slowest of the normal ranks anyway.
    """
    if target == "mean":
        return sum(busy_s) / len(busy_s)
    return sorted(busy_s)[(len(busy_s) - 1) // 4]


def find_stragglers(
    busy_s: Sequence[float], reference_s: float, tolerance: float, were_stragglers: Sequence[bool]
) -> tuple[bool, ...]:
    """Who exceeds the reference by more than ``tolerance``; who was one already is let go at half of it."""
    return tuple(
        time > reference_s * (1.0 + (tolerance / 2 if was else tolerance))
        for time, was in zip(busy_s, were_stragglers, strict=True)
    )


def slowest_normal_s(times: Sequence[RankTimes], are_stragglers: Sequence[bool]) -> float:
    """Busy time of the slowest rank that is no straggler, seconds; 0 if all are."""
    return max((rank.busy_s for rank, slow in zip(times, are_stragglers, strict=True) if not slow), default=0.0)


def pruning_ratios(
    times: Sequence[RankTimes], are_stragglers: Sequence[bool], reference_s: float, headroom: float = 0.0
) -> list[float]:
    """γ of every rank, 0 for those that are no stragglers: the least that brings a rank to the target time.

    With cost proportional to FLOPs this is Eq. (1), γ = (T − reference) / M. The target is the reference time, but
    never below what the slowest rank can reach: pruning past that would drop work without shortening the step. Nor is
    the last hundredth of the step pursued: a rank that is slow outside its products would prune all it can for nothing.

    Args:
        times, are_stragglers: of every rank.
        reference_s: what a straggler is compared with, seconds.
        headroom: share by which a straggler aims below that. Ranks that take equally long on average still wait for
            each other at every collective, now this one, now that one.
    """
    pairs = list(zip(times, are_stragglers, strict=True))
    normal_s = slowest_normal_s(times, are_stragglers)
    least_s = max((rank.least_busy_s for rank, is_straggler in pairs if is_straggler), default=0.0)
    target_s = max((1.0 - headroom) * max(reference_s, normal_s), least_s * (1.0 + _WORTHWHILE))
    return [rank.ratio_to_reach(target_s) if is_straggler else 0.0 for rank, is_straggler in pairs]
