"""Our rule, for SEMI and for migrating only: first how short a step can be, then the least pruning that reaches it.

Where nothing may be pruned that is water-filling: all ranks take equally long, as far as handing over products can make
them and pays. Shares are in units of one rank's full products. Sums are taken one after the other, so that ranks on
different machines find the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.curves import Curves, Floats, ratios_to_reach
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.sharing import WorkDivision, owned_by

#: Busy times that are tried between the fastest and the slowest; then again between the neighbours of the best.
_NUM_LEVELS = 65
_NUM_PASSES = 3
#: Less than so much of one rank's products is nothing.
_NOTHING = 2e-3
#: Where the goal is out of reach, a plan may take longer than the fastest by this share. Little: what pruning costs is
#: corrected only where something is pruned, so a plan that stays away from the fastest never learns that it is faster.
_WORTHWHILE = 0.02
#: Where nothing is pruned a straggler lends no more than this: what is left is what tells that it has recovered.
_MOST_LENT = 0.99


def makespan_division(
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    *,
    reference_s: float,
    tolerance: float,
    migration: MigrationCost,
    budget: float,
    may_lend: bool = True,
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
        migration: Φ1, what lending costs.
        budget: the largest share of the group's products that may be pruned, 0 to 1; 0 is exact.
        may_lend: whether work may be handed over at all; else stragglers only prune.
    """
    if not any(are_stragglers):
        return WorkDivision.nothing(len(times))
    exact = _Search(_Group(times, are_stragglers, may_lend, _MOST_LENT), migration, 0.0)
    fastest_exact = exact.fastest()
    if budget == 0.0:
        return exact.division(fastest_exact, goal_s=fastest_exact.step_s)
    pruning = _Search(_Group(times, are_stragglers, may_lend), migration, budget * len(times))
    fastest = pruning.fastest()
    goal_s = min(fastest.step_s, fastest_exact.step_s) * (1.0 + _WORTHWHILE)
    goal_s = max(reference_s * (1.0 + tolerance), goal_s)
    if fastest_exact.step_s <= goal_s:  # without pruning, and where nothing is pruned γ_max is no bound
        return exact.division(fastest_exact, goal_s)
    return pruning.division(fastest, goal_s)


@dataclass(frozen=True)
class _Candidates:
    """Plans for every number of migrating ranks and every busy time that is tried, each array [numbers, levels].

    Attributes:
        merit: the least is the best; inf is not possible.
        pruned, lent: in all.
        step_s: seconds.
    """

    merit: Floats
    pruned: Floats
    lent: Floats
    step_s: Floats


@dataclass(frozen=True)
class _Chosen:
    """One of the candidates, of the number in row ``row``."""

    row: int
    level_s: float
    pruned: float
    lent: float
    step_s: float


class _Group:
    """A group's times as arrays.

    Args:
        may_lend: whether any number of stragglers migrates, or none does.
        most_spared: how much of its products a straggler may be relieved of; None as far as pruning was measured.

    Attributes:
        slowest_first: the stragglers.
        counts: numbers of migrating ranks to be tried.
        lowest_s, highest_s: between them lies the time of the slowest rank.
    """

    def __init__(
        self,
        times: Sequence[RankTimes],
        are_stragglers: Sequence[bool],
        may_lend: bool,
        most_spared: float | None = None,
    ) -> None:
        curves = Curves.of(times)
        stragglers = [rank for rank, is_straggler in enumerate(are_stragglers) if is_straggler]
        self.slowest_first = sorted(stragglers, key=lambda rank: -times[rank].busy_s)
        self.counts = np.arange(min(len(stragglers), len(times) - 1) + 1 if may_lend else 1)
        owned_R = owned_by(times)
        #: What each rank owns: amounts here are in units of products at even shares, to be added up over ranks.
        self._owned_R = np.ones(len(times)) if owned_R is None else np.array(owned_R)
        self._ratios = curves.ratios
        if most_spared is not None:
            self._ratios = np.append(self._ratios, np.maximum(self._ratios[:, -1:], most_spared), axis=1)
        self._busy = curves.busy_at(self._ratios)
        self._borrows_from_s = self._busy[:, 0].copy()
        self._ratios = self._ratios * self._owned_R[:, None]
        self._borrowed = curves.borrowed_points
        borrowed_s = curves.gemm_s[:, None] * curves.borrowed_at(self._borrowed)
        self._borrowed_s = np.maximum.accumulate(borrowed_s, axis=1)
        self._borrowed = self._borrowed * self._owned_R[:, None]
        self._borrows_from_s[self._owned_R == 0.0] = np.inf
        is_normal = ~np.array(are_stragglers, dtype=bool)
        least = np.where(is_normal, self._busy[:, 0], self._busy.min(axis=1))
        self.highest_s = max(
            float(curves.busy_s.max()), float(self._busy[:, 0].max())
        )  # gathering may take longer than what it spares
        self.lowest_s = min(float(least.max()), self.highest_s)

    @property
    def num_ranks(self) -> int:
        return len(self._busy)

    def spared(self, levels_s: Floats) -> Floats:
        """[stragglers, levels] what each, slowest first, must be relieved of to take so long at most."""
        rows = np.array(self.slowest_first, dtype=np.int64)
        return ratios_to_reach(levels_s, self._ratios[rows], self._busy[rows])

    def slack(self, levels_s: Floats) -> Floats:
        """[ranks, levels] how much every rank can borrow until then."""
        slack = np.zeros((self.num_ranks, len(levels_s)))
        able = np.flatnonzero(self._borrows_from_s < levels_s.max())
        slack[able] = self._slack_of(able, levels_s)
        return slack

    def slack_in_all(self, levels_s: Floats) -> Floats:
        """[levels] how much all ranks together can borrow until then."""
        able = np.flatnonzero(self._borrows_from_s < levels_s.max())
        return np.cumsum(self._slack_of(able, levels_s), axis=0)[-1] if len(able) else np.zeros(len(levels_s))

    def _slack_of(self, ranks: NDArray[np.int64], levels_s: Floats) -> Floats:
        time_s = np.maximum(levels_s - self._borrows_from_s[ranks, None], 0.0)
        borrowed, borrowed_s = self._borrowed[ranks], self._borrowed_s[ranks]
        above = np.ones(time_s.shape, dtype=np.intp)
        for point in range(1, borrowed.shape[1] - 1):  # the first is 0, and beyond the last it is another line
            above += borrowed_s[:, point, None] <= time_s
        above += borrowed.shape[1] * np.arange(len(ranks))[:, None]
        low_s, high_s = borrowed_s.take(above - 1), borrowed_s.take(above)
        low, high = borrowed.take(above - 1), borrowed.take(above)
        between = low + (high - low) * (time_s - low_s) / np.where(high_s > low_s, high_s - low_s, 1.0)
        all_s, everything = borrowed_s[:, -1:], borrowed[:, -1:]
        return np.where(time_s < all_s, between, everything * np.maximum(time_s / all_s, 1.0))

    def division(self, num_migrating: int, chosen: _Chosen) -> WorkDivision:
        """Those that migrate lend the same part of what they are relieved of."""
        pruned, lent = np.zeros(self.num_ranks), np.zeros(self.num_ranks)
        level_s = np.array([chosen.level_s])
        spared = self.spared(level_s)[:, 0]
        pruned[self.slowest_first] = spared
        migrating = self.slowest_first[:num_migrating]
        wanted = _sum(spared[:num_migrating])
        prunes = chosen.pruned > _NOTHING
        if chosen.lent > 0.0:
            lent[migrating] = pruned[migrating] * (chosen.lent / wanted if prunes and wanted > 0.0 else 1.0)
            pruned[migrating] -= lent[migrating]
        if not prunes:
            pruned[:] = 0.0
        for amount in (pruned, lent):  # as shares of what each owns
            np.divide(amount, self._owned_R, out=amount, where=self._owned_R > 0.0)
        return WorkDivision(tuple(pruned.tolist()), tuple(lent.tolist()), tuple(self.slack(level_s)[:, 0].tolist()))


class _Search:
    """Tries busy times for several numbers of migrating ranks at once; tables are [numbers, levels].

    Args:
        group: of which the work is divided.
        budget: what may be pruned, in ranks' full products.
    """

    def __init__(self, group: _Group, migration: MigrationCost, budget: float) -> None:
        self._group, self._counts, self._migration, self._budget = group, group.counts, migration, budget

    def division(self, fastest: _Chosen, goal_s: float) -> WorkDivision:
        """The best within the goal."""
        best = self.least_pruned(goal_s, fastest) or fastest
        return self._group.division(int(self._counts[best.row]), best)

    def fastest(self) -> _Chosen:
        """The fastest step that the budget allows."""

        def look(levels_s: Floats) -> _Candidates:
            wanted, total, fitting = self._amounts(levels_s)
            lent = np.broadcast_to(np.maximum(total - self._budget, 0.0), wanted.shape)
            step_s = self._step_s(levels_s, lent)
            return _Candidates(np.where(lent <= fitting + 1e-12, step_s, np.inf), total - lent, lent, step_s)

        chosen = self._best(look, self._group.highest_s)
        assert chosen is not None  # at the slowest rank's time nothing is lent or pruned
        return chosen

    def least_pruned(self, goal_s: float, fastest: _Chosen) -> _Chosen | None:
        """Of the steps within the goal the one that prunes least, of equals the fastest; None if none is within it.

        Args:
            fastest: a level to look at in any case.
        """

        def look(levels_s: Floats) -> _Candidates:
            _, total, fitting = self._amounts(levels_s)
            affordable_s = goal_s - levels_s - self._migration.fixed_s * self._counts[:, None]
            per_share_s = max(self._migration.per_share_s, 1e-12)
            lent = np.maximum(np.minimum(affordable_s / per_share_s, fitting), 0.0)
            lent = np.where(lent > _NOTHING, lent, 0.0)
            pruned, step_s = total - lent, self._step_s(levels_s, lent)
            is_possible = (step_s <= goal_s * (1.0 + 1e-9)) & (pruned <= self._budget + _NOTHING / 2)
            is_possible &= lent <= fitting + 1e-12
            # What is no more than nothing counts as nothing: of such plans the fastest is taken.
            merit = np.maximum(pruned, _NOTHING) + 1e-3 * _NOTHING * step_s / goal_s
            merit = np.where(is_possible, merit, np.inf)
            return _Candidates(merit, pruned, lent, step_s)

        return self._best(look, min(goal_s, self._group.highest_s), fastest.level_s)

    def _best(
        self, look: Callable[[Floats], _Candidates], highest_s: float, hint_s: float | None = None
    ) -> _Chosen | None:
        low_s, high_s = self._group.lowest_s, max(highest_s, self._group.lowest_s)
        chosen: _Chosen | None = None
        best_merit = np.inf
        for _ in range(_NUM_PASSES):
            levels_s = np.linspace(low_s, high_s, _NUM_LEVELS)
            if hint_s is not None:
                levels_s = np.sort(np.append(levels_s, hint_s))
            tried = look(levels_s)
            row, level = divmod(int(np.argmin(tried.merit)), len(levels_s))
            if tried.merit[row, level] < best_merit:
                best_merit = tried.merit[row, level]
                amounts = (float(table[row, level]) for table in (tried.pruned, tried.lent, tried.step_s))
                chosen = _Chosen(int(row), float(levels_s[level]), *amounts)
            low_s, high_s = levels_s[max(level - 1, 0)], levels_s[min(level + 1, len(levels_s) - 1)]
        return chosen

    def _amounts(self, levels_s: Floats) -> tuple[Floats, Floats, Floats]:
        """([numbers, levels] what those that migrate want to be relieved of, [levels] all stragglers, what fits)."""
        spared = self._group.spared(levels_s)
        upto = np.concatenate([np.zeros((1, len(levels_s))), np.cumsum(spared, axis=0)])
        slack = self._group.slack_in_all(levels_s)
        wanted = upto[self._counts]
        return wanted, upto[-1], np.minimum(wanted, slack)

    def _step_s(self, levels_s: Floats, lent: Floats) -> Floats:
        communication_s = self._migration.fixed_s * self._counts[:, None] + self._migration.per_share_s * lent
        return levels_s + np.where(lent > 0.0, communication_s, 0.0)


def _sum(values: Floats) -> float:
    return float(np.cumsum(values)[-1]) if len(values) else 0.0
