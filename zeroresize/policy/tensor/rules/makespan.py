"""Our rule, for SEMI and for migrating only: first how short a step can be, then the least pruning that reaches it.

Where nothing may be pruned that is water-filling: all ranks take equally long, as far as handing over products can make
them and pays. Shares are in units of one rank's full products. Sums are taken one after the other, so that ranks on
different machines find the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.tensor.costs import LEAST_SHARE, MigrationCost
from zeroresize.policy.tensor.estimation.curves import Floats, GroupTimes, done_within, ratios_to_reach
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.sharing import WorkDivision

#: Busy times that are tried between the fastest and the slowest; then again between the neighbours of the best.
_NUM_LEVELS, _NUM_PASSES = 64, 3
#: Less than so much of one rank's products is nothing.
_NOTHING = 2e-3
#: What a step gains by less than this share is not worth more pruning. Where the goal is out of reach, a plan may take
#: longer than the fastest by it. Little: what pruning costs is corrected only where something is pruned, so a plan that
#: stays away from the fastest never learns that it is faster.
WORTHWHILE = 0.02
#: Where nothing is pruned a straggler lends no more than this: what is left is what tells that it has recovered.
_MOST_LENT = 0.99


def makespan_division(
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    *,
    reference_s: float,
    tolerance: float,
    migration: MigrationCost | None,
    budget: float,
) -> WorkDivision:
    """Return the division that prunes least among those whose predicted step is no longer than the goal.

    The goal is ``tolerance`` more than the reference, or a little more than the fastest step there is. The predicted
    step is the busy time of the slowest rank and the communication of what is lent. For each number of migrating
    stragglers, slowest first, and each busy time t, every straggler is relieved until it takes t; those that migrate
    lend as much of that as fits into the other ranks' time until t and into the goal, and prune the rest; the others
    prune.

    Args:
        times, are_stragglers: of every rank.
        reference_s: the normal ranks' time, seconds.
        tolerance: a share of it.
        migration: Φ1, what lending costs; None where no work may be handed over: then stragglers only prune.
        budget: the largest share of the group's products that may be pruned, 0 to 1; 0 is exact.
    """
    if not any(are_stragglers):
        return WorkDivision.nothing(len(times))
    exact = _Search(GroupTimes.of(times), are_stragglers, migration, 0.0)
    fastest_exact = exact.best()
    if budget == 0.0:
        return exact.division(fastest_exact, fastest_exact.step_s)
    pruning = _Search(GroupTimes.of(times), are_stragglers, migration, budget)
    fastest = pruning.best()
    goal_s = min(fastest.step_s, fastest_exact.step_s) * (1.0 + WORTHWHILE)
    goal_s = max(reference_s * (1.0 + tolerance), goal_s)
    if fastest_exact.step_s <= goal_s:  # without pruning, and where nothing is pruned γ_max is no bound
        return exact.division(fastest_exact, goal_s)
    return pruning.division(fastest, goal_s)


class _Plan(NamedTuple):
    """A plan that was tried: how many stragglers migrate, the slowest rank's busy time, and what follows."""

    merit: float  # the least is the best; inf is not possible
    num_migrating: int
    level_s: float
    pruned: float  # in all, as what is lent
    lent: float
    step_s: float


class _Search:
    """Tries busy times for several numbers of migrating ranks at once; tables are [numbers, levels].

    Args:
        budget: the share of the group's products that may be pruned; of 0 only what a straggler may lend bounds it.
        migration: Φ1; None where none of them migrates.
    """

    def __init__(
        self,
        times: GroupTimes,
        are_stragglers: Sequence[bool],
        migration: MigrationCost | None,
        budget: float,
    ) -> None:
        slow = np.flatnonzero(are_stragglers)
        self._num_ranks, self._migration, self._budget = len(times), migration or MigrationCost(), budget * len(times)
        self._owned_R = times.owned_R  # amounts are in units of products at even shares, to be added up over ranks
        self._slowest_first = slow[np.argsort(-times.busy_s[slow], kind="stable")]
        self._counts = np.arange(min(len(slow), len(times) - 1) + 1 if migration is not None else 1)
        ratios, busy = times.ratios, times.busy_at_points
        if budget == 0.0:
            ratios = np.append(ratios, np.maximum(ratios[:, -1:], _MOST_LENT), axis=1)
            busy = times.busy_at(ratios)
        self._ratios, self._busy = (ratios * self._owned_R[:, None])[self._slowest_first], busy[self._slowest_first]
        self._borrows_from_s = np.where(self._owned_R > 0.0, busy[:, 0], np.inf)
        self._borrowed = times.borrowed_points * self._owned_R[:, None]
        self._borrowed_s = np.maximum.accumulate(times.borrowing_s(times.borrowed_points), axis=1)
        self._highest_s = float(busy[:, 0].max())
        least = np.where(np.array(are_stragglers, dtype=bool), busy.min(axis=1), busy[:, 0])
        self._lowest_s = min(float(least.max()), self._highest_s)

    def best(self, goal_s: float | None = None, hint_s: float | None = None) -> _Plan:
        """The fastest step; or of the steps within the goal the one that prunes least, of equals the fastest.

        Args:
            hint_s: a level to look at in any case.
        """
        low_s, high_s = self._lowest_s, max(min(goal_s or math.inf, self._highest_s), self._lowest_s)
        chosen = _Plan(math.inf, 0, high_s, 0.0, 0.0, math.inf)
        for _ in range(_NUM_PASSES):
            levels_s = np.linspace(low_s, high_s, _NUM_LEVELS)
            if hint_s is not None:
                levels_s = np.sort(np.append(levels_s, hint_s))
            merit, pruned, lent, step_s = self._tried(levels_s, goal_s)
            row, level = divmod(int(np.argmin(merit)), len(levels_s))
            if merit[row, level] < chosen.merit:
                figures = (float(table[row, level]) for table in (pruned, lent, step_s))
                chosen = _Plan(float(merit[row, level]), int(self._counts[row]), float(levels_s[level]), *figures)
            low_s, high_s = levels_s[max(level - 1, 0)], levels_s[min(level + 1, len(levels_s) - 1)]
        return chosen

    def _tried(self, levels_s: Floats, goal_s: float | None) -> tuple[Floats, Floats, Floats, Floats]:
        """(merit, what is pruned and lent in all, seconds of a step) of all plans."""
        spared = np.cumsum(ratios_to_reach(levels_s, self._ratios, self._busy), axis=0)
        wanted, total = np.concatenate([np.zeros((1, len(levels_s))), spared])[self._counts], spared[-1]
        ranks = np.flatnonzero(self._borrows_from_s < levels_s.max())
        slack = np.cumsum(self._slack(ranks, levels_s), axis=0)[-1] if len(ranks) else np.zeros(len(levels_s))
        fitting = np.minimum(wanted, slack)
        fixed_s = self._migration.fixed_s * self._counts[:, None]
        if goal_s is None:
            lent = np.broadcast_to(np.maximum(total - self._budget, 0.0), wanted.shape)
        else:
            affordable = (goal_s - levels_s - fixed_s) / max(self._migration.per_share_s, LEAST_SHARE)
            lent = np.minimum(affordable, fitting)
            lent = np.where(lent > _NOTHING, lent, 0.0)
        pruned = total - lent
        step_s = levels_s + np.where(lent > 0.0, fixed_s + self._migration.per_share_s * lent, 0.0)
        if goal_s is None:
            return np.where(lent <= fitting + LEAST_SHARE, step_s, np.inf), pruned, lent, step_s
        # What is no more than nothing counts as nothing: of such plans the fastest is taken.
        merit = np.maximum(pruned, _NOTHING) + _NOTHING**2 * step_s / goal_s
        is_possible = (step_s <= goal_s * (1.0 + LEAST_SHARE)) & (pruned <= self._budget + _NOTHING / 2)
        return np.where(is_possible, merit, np.inf), pruned, lent, step_s

    def _slack(self, ranks: NDArray[np.int64], levels_s: Floats) -> Floats:
        """[ranks, levels] how much these ranks can borrow until then."""
        time_s = np.maximum(levels_s - self._borrows_from_s[ranks, None], 0.0)
        borrowed, borrowed_s = self._borrowed[ranks], self._borrowed_s[ranks]
        return done_within(time_s, borrowed, borrowed_s) * np.maximum(time_s / borrowed_s[:, -1:], 1.0)

    def division(self, fastest: _Plan, goal_s: float) -> WorkDivision:
        """The best within the goal; those that migrate lend the same part of what they are relieved of."""
        best = self.best(goal_s, fastest.level_s)
        plan = best if best.merit < math.inf else fastest
        level_s = np.array([plan.level_s])
        pruned = np.zeros(self._num_ranks)
        lent, slack = pruned.copy(), pruned.copy()
        pruned[self._slowest_first] = ratios_to_reach(level_s, self._ratios, self._busy)[:, 0]
        migrating = self._slowest_first[: plan.num_migrating]
        prunes = plan.pruned > _NOTHING
        if plan.lent > 0.0:
            wanted = float(np.cumsum(pruned[migrating])[-1])
            lent[migrating] = pruned[migrating] * (plan.lent / wanted if prunes and wanted > 0.0 else 1.0)
            pruned[migrating] -= lent[migrating]
        if not prunes:
            pruned[:] = 0.0
        for amount in (pruned, lent):  # as shares of what each owns
            np.divide(amount, self._owned_R, out=amount, where=self._owned_R > 0.0)
        able = np.flatnonzero(self._borrows_from_s < plan.level_s)
        slack[able] = self._slack(able, level_s)[:, 0]
        return WorkDivision(tuple(pruned.tolist()), tuple(lent.tolist()), tuple(slack.tolist()))
