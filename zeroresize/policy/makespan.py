"""SEMI by our rule: how long has the step to be, and what is the least that must be pruned for that?

Shares are in units of one rank's full products. Sums are exact (``math.fsum``), so that ranks on different machines
find the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.bisection import largest, smallest
from zeroresize.policy.cost_model import MigrationCost
from zeroresize.policy.ratio import RankTimes
from zeroresize.policy.sharing import Division

Floats = NDArray[np.float64]

#: At most so many numbers of migrating ranks are compared at once; with more stragglers, from coarse to fine.
_MOST_CANDIDATES = 16
#: Steps that differ by less than this share are equally long.
_SAME_STEP = 1e-3
#: As many migrating ranks as there are now may take longer by this share before another number is taken.
_STAYING = 0.02
#: Less of the group's products than this is nothing.
_NOTHING = 1e-4


@dataclass(frozen=True)
class _Candidate:
    division: Division
    pruned_share: float
    step_s: float


def makespan_division(
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    *,
    reference_s: float,
    tolerance: float,
    migration: MigrationCost,
    budget: float,
    num_migrating: int | None = None,
    num_migrating_now: int | None = None,
) -> Division:
    """The division that prunes least among those whose predicted step is no longer than the goal.

    The goal is ``tolerance`` more than the reference, or than the fastest step there is. The predicted step is the busy
    time of the slowest rank and the communication of what is lent. For each number of migrating stragglers, slowest
    first, and a busy time t, every straggler is relieved until it takes t: those that migrate lend what fits into the
    normal ranks' time until t and prune the rest, the others prune. So the smaller t, the more is pruned.

    Args:
        times, are_stragglers: of every rank.
        reference_s: the normal ranks' time, seconds.
        tolerance: a share of it.
        migration: Φ1, what lending costs.
        budget: the largest share of the group's products that may be pruned, 0 to 1; 0 is exact.
        num_migrating: how many stragglers migrate; None tries all numbers.
        num_migrating_now: how many do now, which noise should not change; None where it does not matter.
    """
    group = _Group(times, are_stragglers)
    most = min(len(group.slowest_first), len(times) - 1)

    @cache
    def search(count: int) -> _Search:
        return _Search(group, group.slowest_first[:count], migration, budget)

    counts = _spread(0, most) if num_migrating is None else [min(num_migrating, most)]
    fastest_s = min(search(count).fastest.step_s for count in counts)
    goal_s = max(reference_s, fastest_s) * (1.0 + tolerance)
    tried: dict[int, tuple[int, int, float, int]] = {}
    while True:
        for count in counts:
            own_goal_s = goal_s * (1.0 + _STAYING) if count == num_migrating_now else goal_s
            tried[count] = (*_preference(search(count).best(own_goal_s), own_goal_s), count)
        best = min(tried, key=tried.__getitem__)
        place = counts.index(best)
        low, high = counts[max(place - 1, 0)], counts[min(place + 1, len(counts) - 1)]
        counts = sorted({*_spread(low, high), best})
        if tried.keys() >= set(counts):
            own_goal_s = goal_s * (1.0 + _STAYING) if best == num_migrating_now else goal_s
            return search(best).best(own_goal_s).division


def _spread(low: int, high: int) -> list[int]:
    """Numbers from low to high, all or a few."""
    steps = min(high - low, _MOST_CANDIDATES)
    return [low + round(place * (high - low) / steps) for place in range(steps + 1)] if steps else [low]


def _preference(candidate: _Candidate, goal_s: float) -> tuple[int, int, float]:
    """Smaller is better: no slower than the goal, then little pruned, then fast."""
    excess = max(candidate.step_s / goal_s, 1.0)
    return round(math.log(excess) / _SAME_STEP), round(candidate.pruned_share / _NOTHING), candidate.step_s


class _Group:
    """A group's times as arrays."""

    def __init__(self, times: Sequence[RankTimes], are_stragglers: Sequence[bool]) -> None:
        self._ratios = np.array([rank.cost.ratios for rank in times])
        self._busy = np.array([[rank.busy_at(ratio) for ratio in rank.cost.ratios] for rank in times])
        self._gemm_s = np.array([rank.gemm_s for rank in times])
        self._is_normal = ~np.array(are_stragglers, dtype=bool)
        stragglers = [rank for rank, is_straggler in enumerate(are_stragglers) if is_straggler]
        self.slowest_first = sorted(stragglers, key=lambda rank: -times[rank].busy_s)
        least = np.where(self._is_normal, self._busy[:, 0], self._busy.min(axis=1))
        self.highest_s = float(self._busy[:, 0].max())
        self.lowest_s = min(float(least.max()), self.highest_s)

    def relieved_to(self, level_s: float, migrating: Sequence[int], migration: MigrationCost) -> _Candidate:
        """Every straggler takes ``level_s`` at most, as far as it can."""
        spared = np.where(self._is_normal, 0.0, self._ratio_to_reach(level_s))
        room = np.where(self._is_normal, np.maximum((level_s - self._busy[:, 0]) / self._gemm_s, 0.0), 0.0)
        lent = np.zeros(len(spared))
        wanted = math.fsum(spared[list(migrating)])
        fitting = min(wanted, math.fsum(room))
        if fitting > 0.0:
            lent[list(migrating)] = spared[list(migrating)] * (fitting / wanted)
        pruned = np.maximum(spared - lent, 0.0)
        division = Division(tuple(pruned.tolist()), tuple(lent.tolist()), tuple(room.tolist()))
        pruned_share = math.fsum(pruned) / len(pruned)
        return _Candidate(division, pruned_share, level_s + migration.seconds(division.lent))

    def _ratio_to_reach(self, target_s: float) -> Floats:
        """``RankTimes.ratio_to_reach`` of all ranks at once."""
        rows = np.arange(len(self._busy))
        is_reached = self._busy <= target_s
        first = np.where(is_reached.any(axis=1), is_reached.argmax(axis=1), self._busy.argmin(axis=1))
        before = np.maximum(first - 1, 0)
        slow_s, fast_s = self._busy[rows, before], self._busy[rows, first]
        from_ratio, to_ratio = self._ratios[rows, before], self._ratios[rows, first]
        drop_s = np.where(slow_s > fast_s, slow_s - fast_s, 1.0)
        part = np.clip((slow_s - target_s) / drop_s, 0.0, 1.0)
        return np.where(first == 0, 0.0, from_ratio + (to_ratio - from_ratio) * part)


class _Search:
    """Looks for the best plan in which just these stragglers may lend."""

    def __init__(self, group: _Group, migrating: Sequence[int], migration: MigrationCost, budget: float) -> None:
        self._group, self._migrating, self._migration, self._budget = group, list(migrating), migration, budget

    @cached_property
    def fastest(self) -> _Candidate:
        """As fast as the budget allows."""
        return self._at(self._smallest(lambda one: one.pruned_share <= self._budget + 1e-9))

    def best(self, goal_s: float) -> _Candidate:
        """The one that prunes least and meets the goal, or else the fastest."""
        goal_level_s = self._largest(lambda one: one.step_s <= goal_s)
        exact_level_s = self._smallest(lambda one: one.pruned_share <= _NOTHING)
        found = self._at(min(goal_level_s, exact_level_s))
        return found if found.pruned_share <= self._budget + 1e-9 else self.fastest

    def _at(self, level_s: float) -> _Candidate:
        return self._group.relieved_to(level_s, self._migrating, self._migration)

    def _largest(self, holds: Callable[[_Candidate], bool]) -> float:
        return largest(self._group.lowest_s, self._group.highest_s, lambda level_s: holds(self._at(level_s)))

    def _smallest(self, holds: Callable[[_Candidate], bool]) -> float:
        return smallest(self._group.lowest_s, self._group.highest_s, lambda level_s: holds(self._at(level_s)))
