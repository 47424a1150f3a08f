"""How much a straggler prunes: Eq. (1) of the paper on full-work numbers and measured costs.

``T`` is a rank's busy time of an iteration, ``M`` the part of it spent multiplying matrices in the balanced layers,
both in seconds and as they would be with the full work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.policy.cost_model import ResizingCost

#: A step that gets shorter by less than this share is not worth what is pruned for it.
_WORTHWHILE = 0.01


@dataclass(frozen=True)
class RankTimes:
    """One rank's full-work times and what pruning costs there.

    Attributes:
        rest_s: T − M, busy seconds that pruning does not touch.
        gemm_s: M, seconds.
        overhead_scale: how many times as long as in the pre-test gathers and fills take now.
        cost: of pruning on this rank.
    """

    rest_s: float
    gemm_s: float
    overhead_scale: float
    cost: ResizingCost

    @property
    def busy_s(self) -> float:
        """T, seconds."""
        return self.rest_s + self.gemm_s

    def busy_at(self, ratio: float) -> float:
        """Busy seconds when a share ``ratio`` of the columns is pruned."""
        shrunk_s = self.gemm_s * self.cost.gemm_share_at(ratio)
        return self.rest_s + shrunk_s + self.overhead_scale * self.cost.overhead_at(ratio)

    @property
    def least_busy_s(self) -> float:
        """Busy seconds at the cheapest pruning ratio."""
        return min(self.busy_at(ratio) for ratio in self.cost.ratios)

    def ratio_to_reach(self, target_s: float) -> float:
        """The smallest γ with busy time ``target_s`` at most; where none gets there, the smallest of the cheapest."""
        points = [(ratio, self.busy_at(ratio)) for ratio in self.cost.ratios]
        if points[0][1] <= target_s:
            return 0.0
        for (low, busy_low), (high, busy_high) in itertools.pairwise(points):
            if busy_high <= target_s:
                return min(low + (high - low) * (busy_low - target_s) / (busy_low - busy_high), high)
        return min(points, key=lambda point: point[1])[0]


def full_work(
    busy_s: float,
    gemm_s: float,
    overhead_s: float,
    ratio: float,
    cost: ResizingCost,
    last_scale: float,
    borrowed: float = 0.0,
) -> RankTimes:
    """Times measured while a rank did not compute ``ratio`` of its columns, rescaled to the full work (Decided 2).

    Fed back as measured, they would oscillate: once a straggler prunes, it no longer looks like one.

    Args:
        busy_s, gemm_s, overhead_s: measured seconds an iteration: in all, multiplying, gathering and filling.
        ratio: γ in force in that iteration.
        cost: of pruning on this rank.
        last_scale: the overhead's scale as last known, kept where nothing was gathered.
        borrowed: what the rank computed for others, in units of its own products at full work.
    """
    executed = cost.gemm_share_at(ratio) + cost.borrowed_at(borrowed)
    is_measured = ratio >= cost.ratios[1]  # below, the overhead is only guessed to grow from nothing
    expected_overhead_s = cost.overhead_at(ratio) if is_measured else 0.0
    return RankTimes(
        rest_s=max(busy_s - gemm_s - overhead_s, 0.0),
        gemm_s=gemm_s / executed if executed > 0.0 < gemm_s else math.nan,  # who computed nothing tells nothing
        overhead_scale=overhead_s / expected_overhead_s if expected_overhead_s > 0 else last_scale,
        cost=cost,
    )


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
    normal_s = max((rank.busy_s for rank, is_straggler in pairs if not is_straggler), default=0.0)
    least_s = max((rank.least_busy_s for rank, is_straggler in pairs if is_straggler), default=0.0)
    target_s = max((1.0 - headroom) * max(reference_s, normal_s), least_s * (1.0 + _WORTHWHILE))
    return [rank.ratio_to_reach(target_s) if is_straggler else 0.0 for rank, is_straggler in pairs]
