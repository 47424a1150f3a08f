"""What each mode wants, from the times of a group: who owns what, and what is pruned and lent of that."""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.config import BalanceConfig
from zeroresize.plan.ownership import SegmentWork, owned_shares
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.curves import GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules import paper
from zeroresize.policy.tensor.rules.makespan import WORTHWHILE, makespan_division
from zeroresize.policy.tensor.rules.ownership import fitting_shares, owned_step_s, wanted_shares
from zeroresize.policy.tensor.rules.ratio import pruning_ratios, slowest_normal_s
from zeroresize.policy.tensor.rules.sharing import WorkDivision

#: How far below the fastest rank's time a straggler aims, as a share; with target "mean" (the paper's) not at all.
HEADROOM = 0.05
#: So many times are tried for which ranks that are not slow may be busy.
_NUM_LEVELS = 8


def wanted_division(
    config: BalanceConfig,
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    reference_s: float,
    migration: MigrationCost | None,
    normal_s: float | None = None,
) -> WorkDivision:
    """Return how ``config`` would divide the work of a group among ranks that own what they own.

    Args:
        times, are_stragglers: of every rank; the times are those of what it owns.
        reference_s: what stragglers are compared with, seconds.
        migration: Φ1; None where nobody can lend, or it is not known: then nothing is lent.
        normal_s: of the slowest rank that is none, before units moved for others; None where that is in ``times``.
    """
    if config.mode == "off":
        return WorkDivision.nothing(len(times))
    if config.forced_ratio is not None:
        return forced_division(config, are_stragglers)
    if paper.is_chosen(config):
        return paper.paper_division(config, times, are_stragglers, reference_s, migration)
    if not any(are_stragglers):
        return WorkDivision.nothing(len(times))
    if config.mode in ("exact", "mig"):
        return _balanced_division(times, are_stragglers, migration)
    if config.mode == "semi":
        normal_s = slowest_normal_s(times, are_stragglers) if normal_s is None else normal_s
        return _semi_division(config, times, are_stragglers, max(reference_s, normal_s), migration)
    headroom = HEADROOM if config.target == "min" else 0.0
    ratios = pruning_ratios(
        times, are_stragglers, reference_s, headroom, budget=config.budget, min_gain=config.min_gain
    )
    return WorkDivision(tuple(ratios), (0.0,) * len(times))


def wanted_ownership(
    config: BalanceConfig,
    times: GroupTimes,
    are_stragglers: Sequence[bool],
    reference_s: float,
    migration: MigrationCost | None,
    segments: Sequence[SegmentWork],
    *,
    noise: float = 0.0,
    are_pruning: bool = False,
    most_shares: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Return what every rank should own, mean 1; all 1 is home.

    All ranks take equally long. In mode "semi" the others take only half the tolerance longer than the normal ranks do,
    or so much more that what is left can be pruned, where that is worth it: where it saves enough, by
    ``config.min_gain``, of the shortest step without pruning.

    Args:
        times: at even shares.
        are_stragglers, reference_s, migration: as of :func:`wanted_division`.
        segments: in which units can change hands.
        noise: share of a time that says nothing.
        are_pruning: whether something is pruned now, which goes on for less.
        most_shares: for how much each rank has the memory; None where all have for everything.
    """
    exact = wanted_shares(times, are_stragglers, segments, noise=noise, most_shares=most_shares)
    if config.mode != "semi" or config.budget == 0.0 or exact == fitting_shares(len(times), most_shares):
        return exact
    normal_s = slowest_normal_s(times, are_stragglers)
    goal_s = max(reference_s, normal_s) * (1.0 + config.tolerance / 2)
    exact_s = owned_step_s(times, exact, segments)
    if exact_s <= goal_s:
        return exact
    best: tuple[float, tuple[float, ...], float] | None = None
    for part in range(_NUM_LEVELS):
        most_s = goal_s + (exact_s - goal_s) * (part / _NUM_LEVELS) ** 2  # the first ones matter most
        shares = wanted_shares(times, are_stragglers, segments, noise=noise, most_s=most_s, most_shares=most_shares)
        if shares == exact:
            break
        owned = owned_shares(shares, segments)
        division = _semi_division(config, times.owning(owned), are_stragglers, max(reference_s, normal_s), migration)
        step_s = owned_step_s(times, shares, segments, division, migration)
        if best is None or step_s < best[0] * (1.0 - WORTHWHILE):
            best = step_s, shares, division.dropped(owned)
        if best[0] <= goal_s * (1.0 + WORTHWHILE):
            break
    if best is None:
        return exact
    step_s, shares, dropped = best
    least_gain = config.min_gain / (2.0 if are_pruning else 1.0) * dropped / sum(are_stragglers)
    return shares if dropped and exact_s - step_s >= max(least_gain, WORTHWHILE) * exact_s else exact


def forced_division(config: BalanceConfig, are_stragglers: Sequence[bool]) -> WorkDivision:
    """Return the ratio that the user forces on stragglers, on all or on named ranks.

    Before the first measurement nobody is known to be a straggler: it is in force on the others only.
    """
    nothing = (0.0,) * len(are_stragglers)
    forced, ranks = config.forced_ratio, config.ranks
    is_alone = config.mode == "mig" and len(are_stragglers) == 1
    if forced is None or config.mode == "off" or is_alone:
        return WorkDivision.nothing(len(are_stragglers))
    shares = tuple(
        forced if (is_straggler if ranks == "stragglers" else ranks == "all" or rank in ranks) else 0.0
        for rank, is_straggler in enumerate(are_stragglers)
    )
    return WorkDivision(nothing, shares) if config.mode == "mig" else WorkDivision(shares, nothing)


def _balanced_division(
    times: Sequence[RankTimes], are_stragglers: Sequence[bool], migration: MigrationCost | None
) -> WorkDivision:
    """All ranks take equally long without pruning; nothing moves where moving takes longer than it saves."""
    if migration is None:
        return WorkDivision.nothing(len(times))
    division = makespan_division(times, are_stragglers, reference_s=0.0, tolerance=0.0, migration=migration, budget=0.0)
    saves = division.step_s(times, migration) < max(rank.busy_s for rank in times)
    return division if saves else WorkDivision.nothing(len(times))


def _semi_division(
    config: BalanceConfig,
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    goal_s: float,
    migration: MigrationCost | None,
) -> WorkDivision:
    """Nothing is pruned where pruning and lending together save too little for it."""
    division = makespan_division(
        times,
        are_stragglers,
        reference_s=goal_s,
        tolerance=config.tolerance / 2,
        migration=migration,
        budget=config.budget,
    )
    if not any(division.pruned):
        return division
    saved = 1.0 - division.step_s(times, migration) / max(rank.busy_s for rank in times)
    if saved >= config.min_gain * division.dropped(GroupTimes.of(times).owned) / sum(are_stragglers):
        return division
    return _balanced_division(times, are_stragglers, migration)
