"""What each mode prunes and lends: from the times of a group to a division of its work."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.makespan import makespan_division
from zeroresize.policy.tensor.rules.ratio import pruning_ratios, slowest_normal_s
from zeroresize.policy.tensor.rules.semi import paper_division
from zeroresize.policy.tensor.rules.sharing import WorkDivision, paper_lending_ratios

#: How far below the fastest rank's time a straggler aims, as a share; with target "mean" (the paper's) not at all.
HEADROOM = 0.05


def wanted_division(
    config: BalanceConfig,
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    reference_s: float,
    migration: MigrationCost | None,
) -> WorkDivision:
    """Return how ``config`` would divide the work of a group.

    Args:
        times, are_stragglers: of every rank.
        reference_s: what stragglers are compared with, seconds.
        migration: Φ1; None where it is not known, which mode "semi" takes for too much, "mig" and "exact" for nothing.
    """
    nothing = (0.0,) * len(times)
    if config.mode == "off":
        return WorkDivision(nothing, nothing)
    if config.forced_ratio is not None:
        return forced_division(config, are_stragglers)
    if config.mode == "mig" and config.paper.mig_rule == "paper":
        return WorkDivision(nothing, tuple(paper_lending_ratios(times, are_stragglers, reference_s)))
    if config.mode in ("exact", "mig"):
        return _balanced_division(times, are_stragglers, reference_s, migration or MigrationCost())
    if config.mode == "semi":
        return _semi_division(config, times, are_stragglers, reference_s, migration)
    headroom = HEADROOM if config.target == "min" else 0.0
    ratios = pruning_ratios(
        times, are_stragglers, reference_s, headroom, budget=config.budget, min_gain=config.min_gain
    )
    return WorkDivision(tuple(ratios), nothing)


def forced_division(config: BalanceConfig, are_stragglers: Sequence[bool]) -> WorkDivision:
    """Return the ratio that the user forces on stragglers, on all or on named ranks.

    Before the first measurement nobody is known to be a straggler: it is in force on the others only.
    """
    nothing = (0.0,) * len(are_stragglers)
    forced, ranks = config.forced_ratio, config.ranks
    is_alone = config.mode == "mig" and len(are_stragglers) == 1
    if forced is None or config.mode == "off" or is_alone:
        return WorkDivision(nothing, nothing)
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
    nothing = (0.0,) * len(times)
    division = makespan_division(
        times,
        are_stragglers,
        reference_s=reference_s,
        tolerance=0.0,
        migration=migration,
        budget=0.0,
    )
    saves = _step_s(times, division, migration) < max(rank.busy_s for rank in times)
    return division if saves else WorkDivision(nothing, nothing)


def _semi_division(
    config: BalanceConfig,
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    reference_s: float,
    migration: MigrationCost | None,
) -> WorkDivision:
    """By our rule nothing is pruned where pruning and lending together save too little for it."""
    may_lend = migration is not None
    num_migrating = None if isinstance(config.paper.num_migrating, str) else config.paper.num_migrating
    if migration is None:
        num_migrating, migration = 0, MigrationCost()
    if config.paper.semi_rule == "paper":
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
        reference_s=max(reference_s, slowest_normal_s(times, are_stragglers)),
        tolerance=config.tolerance / 2,
        migration=migration,
        budget=config.budget,
        num_migrating=num_migrating,
    )
    if not any(division.pruned) or config.paper.num_migrating != "auto":
        return division
    slowest_s = max(rank.busy_s for rank in times)
    saved = 1.0 - _step_s(times, division, migration) / slowest_s
    if saved >= config.min_gain * math.fsum(division.pruned) / sum(are_stragglers):
        return division
    if not may_lend:
        return WorkDivision((0.0,) * len(times), (0.0,) * len(times))
    return _balanced_division(times, are_stragglers, reference_s, migration)


def _step_s(times: Sequence[RankTimes], division: WorkDivision, migration: MigrationCost) -> float:
    return max(division.busy_s(times)) + migration.seconds(division.lent)
