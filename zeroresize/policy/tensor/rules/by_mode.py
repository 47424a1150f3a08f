"""What each mode wants, from the times of a group: who owns what, and what is pruned and lent of that."""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.config import BalanceConfig
from zeroresize.plan.ownership import SegmentWork, owned_shares
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.curves import GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.makespan import makespan_division
from zeroresize.policy.tensor.rules.ownership import fitting_shares, owned_step_s, wanted_shares
from zeroresize.policy.tensor.rules.ratio import pruning_ratios, slowest_normal_s
from zeroresize.policy.tensor.rules.semi import paper_division
from zeroresize.policy.tensor.rules.sharing import (
    WorkDivision,
    borrowed_shares,
    owned_by,
    paper_lending_ratios,
)

#: How far below the fastest rank's time a straggler aims, as a share; with target "mean" (the paper's) not at all.
HEADROOM = 0.05
#: Who prunes goes on where that saves this part of what it must save to begin.
KEPT_GAIN = 0.5
#: So many times are tried for which ranks that are not slow may be busy, and less than this share of a step is nothing.
_NUM_LEVELS, _WORTHWHILE = 8, 0.02


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
        migration: Φ1; None where it is not known, which mode "semi" takes for too much, "mig" and "exact" for nothing.
        normal_s: of the slowest rank that is none, before units moved for others; None where that is in ``times``.
    """
    nothing = (0.0,) * len(times)
    if config.mode == "off":
        return WorkDivision.nothing(len(times))
    if config.forced_ratio is not None:
        return forced_division(config, are_stragglers)
    if config.mode == "mig" and config.paper.mig_rule == "paper":
        return WorkDivision(nothing, tuple(paper_lending_ratios(times, are_stragglers, reference_s)))
    if config.mode in ("exact", "mig"):
        return _balanced_division(times, are_stragglers, reference_s, migration or MigrationCost())
    if config.mode == "semi":
        normal_s = slowest_normal_s(times, are_stragglers) if normal_s is None else normal_s
        return _semi_division(config, times, are_stragglers, reference_s, normal_s, migration)
    headroom = HEADROOM if config.target == "min" else 0.0
    ratios = pruning_ratios(
        times, are_stragglers, reference_s, headroom, budget=config.budget, min_gain=config.min_gain
    )
    return WorkDivision(tuple(ratios), nothing)


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
        in_force = times.owning(owned_shares(shares, segments))
        division = _semi_division(config, in_force, are_stragglers, reference_s, normal_s, migration)
        step_s = divided_step_s(times, shares, segments, division, migration)
        if best is None or step_s < best[0] * (1.0 - _WORTHWHILE):
            best = step_s, shares, division.dropped(in_force)
        if best[0] <= goal_s * (1.0 + _WORTHWHILE):
            break
    if best is None:
        return exact
    step_s, shares, dropped = best
    least_gain = config.min_gain * (KEPT_GAIN if are_pruning else 1.0) * dropped / sum(are_stragglers)
    return shares if dropped and exact_s - step_s >= max(least_gain, _WORTHWHILE) * exact_s else exact


def divided_step_s(
    times: Sequence[RankTimes],
    shares: Sequence[float],
    segments: Sequence[SegmentWork],
    division: WorkDivision,
    migration: MigrationCost | None,
) -> float:
    """Return the seconds of a step in which ranks own these shares, and their work is divided further.

    Args:
        times: at even shares.
        shares, segments: as of :func:`owned_step_s`.
        migration: what lending adds; None where nothing is lent.
    """
    owned = owned_shares(shares, segments)
    borrowed = borrowed_shares(division.loans, len(times), owned) if any(division.lent) else ()
    step_s = owned_step_s(times, shares, segments, pruned=division.pruned, lent=division.lent, borrowed=borrowed)
    lent = [share * of for share, of in zip(division.lent, owned, strict=True)]
    return step_s + (migration.seconds(lent) if migration is not None else 0.0)


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
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    reference_s: float,
    migration: MigrationCost,
) -> WorkDivision:
    """All ranks take equally long without pruning; nothing moves where moving takes longer than it saves."""
    division = makespan_division(
        times,
        are_stragglers,
        reference_s=reference_s,
        tolerance=0.0,
        migration=migration,
        budget=0.0,
    )
    saves = _step_s(times, division, migration) < max(rank.busy_s for rank in times)
    return division if saves else WorkDivision.nothing(len(times))


def _semi_division(
    config: BalanceConfig,
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    reference_s: float,
    normal_s: float,
    migration: MigrationCost | None,
) -> WorkDivision:
    """By our rule nothing is pruned where pruning and lending together save too little for it.

    A number of migrating ranks that is given is kept to by the paper's.
    """
    may_lend, migration = migration is not None, migration or MigrationCost()
    number = config.paper.num_migrating
    if config.paper.semi_rule == "paper" or not isinstance(number, str):
        num_migrating = 0 if not may_lend else None if isinstance(number, str) else number
        return paper_division(
            times,
            are_stragglers,
            reference_s=reference_s,
            migration=migration,
            max_ratio=config.max_ratio,
            num_migrating=num_migrating,
        )
    division = makespan_division(
        times,
        are_stragglers,
        reference_s=max(reference_s, normal_s),
        tolerance=config.tolerance / 2,
        migration=migration,
        budget=config.budget,
        may_lend=may_lend,
    )
    if not any(division.pruned):
        return division
    slowest_s = max(rank.busy_s for rank in times)
    saved = 1.0 - _step_s(times, division, migration) / slowest_s
    if saved >= config.min_gain * division.dropped(times) / sum(are_stragglers):
        return division
    if not may_lend:
        return WorkDivision.nothing(len(times))
    return _balanced_division(times, are_stragglers, reference_s, migration)


def _step_s(times: Sequence[RankTimes], division: WorkDivision, migration: MigrationCost) -> float:
    owned = owned_by(times) or (1.0,) * len(times)
    return max(division.busy_s(times)) + migration.seconds(
        [lent * share for lent, share in zip(division.lent, owned, strict=True)]
    )
