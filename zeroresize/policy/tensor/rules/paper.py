"""The paper's own rules, beside ours: SEMI (section IV-B), Eq. (1) for migrating, and ZERO-PriDiff (section III-C).

``T`` is a rank's busy time, ``M`` the part of it spent multiplying, ``e`` the number of ranks. Shares are in units of
one rank's full products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.costs import HALVINGS, MigrationCost
from zeroresize.policy.tensor.estimation.curves import Floats, GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.sharing import WorkDivision


def is_chosen(config: BalanceConfig) -> bool:
    """Whether the configuration asks for the paper's division, and not for the shortest steps."""
    paper, mode = config.paper, config.mode
    follows_semi = mode == "semi" and (paper.semi_rule == "paper" or not isinstance(paper.num_migrating, str))
    return follows_semi or (mode == "mig" and paper.mig_rule == "paper")


def paper_division(
    config: BalanceConfig,
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    reference_s: float,
    migration: MigrationCost | None,
) -> WorkDivision:
    """Divide the work as the paper does, in mode "mig" or "semi".

    Args:
        times, are_stragglers: of every rank.
        reference_s: the paper's T_min (with ``target="mean"`` the mean), seconds.
        migration: Φ1; None where nobody can lend.
    """
    if config.mode == "mig":
        can_lend = [slow and migration is not None for slow in are_stragglers]
        return WorkDivision((0.0,) * len(times), tuple(lending_ratios(times, can_lend, reference_s)), is_rule=True)
    number = config.paper.num_migrating
    forced = 0 if migration is None else None if isinstance(number, str) else number
    return semi_division(times, are_stragglers, reference_s, migration or MigrationCost(), config.max_ratio, forced)


def lending_ratios(times: Sequence[RankTimes], are_stragglers: Sequence[bool], reference_s: float) -> list[float]:
    """Return γ = (T − T_ref) / M of Eq. (1), which leaves the receivers slower than the owner."""
    return [
        min(1.0, max(0.0, (rank.busy_s - reference_s) / rank.gemm_s)) if slow else 0.0
        for rank, slow in zip(times, are_stragglers, strict=True)
    ]


def semi_division(
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    reference_s: float,
    migration: MigrationCost,
    max_ratio: float,
    num_migrating: int | None = None,
) -> WorkDivision:
    """One straggler lends by Eq. (2). Of several, the x slowest of Eq. (3) lend γ of Eq. (1), evenly to all others.

    What remains to be pruned aims at the time of the normal ranks with the work that they took in. ``num_migrating``
    forces x, also where there is one straggler: 0 resizes only, 1 migrates only.
    """
    num_ranks = len(times)
    ratios = [min(ratio, max_ratio) for ratio in lending_ratios(times, are_stragglers, reference_s)]
    slowest_first = sorted((r for r in range(num_ranks) if ratios[r] > 0.0), key=lambda r: -times[r].busy_s)
    most = min(len(slowest_first), num_ranks - 1)
    if num_migrating is None and len(slowest_first) == 1:
        owner = slowest_first[0]
        normal_gemm_s = max(rank.gemm_s for r, rank in enumerate(times) if r != owner)
        beta = migrated_share(times[owner], ratios[owner], migration, normal_gemm_s, num_ranks)
        lent = [ratio * beta for ratio in ratios]
    else:
        busy_s = [times[r].busy_s for r in slowest_first]
        busy_s += [times[r].busy_s for r in range(num_ranks) if r not in slowest_first]
        count = num_migrating_by_benefit(busy_s, len(slowest_first), reference_s, migration)
        movers = slowest_first[: count if num_migrating is None else min(num_migrating, most)]
        lent = [ratio if r in movers else 0.0 for r, ratio in enumerate(ratios)]
    taken_in = math.fsum(lent) / lent.count(0.0)
    borrowed_s = [rank.gemm_s * rank.cost.borrowed_at(taken_in) for rank in times]
    normal = [r for r, slow in enumerate(are_stragglers) if not slow]
    target_s = max((times[r].busy_s + borrowed_s[r] for r in normal), default=reference_s)
    pruned = [0.0] * num_ranks
    for r in np.flatnonzero(are_stragglers).tolist():
        alone = GroupTimes([times[r]])
        reached = float(alone.ratios_to_reach(target_s - (borrowed_s[r] if lent[r] == 0.0 else 0.0))[0])
        pruned[r] = max(reached - lent[r], 0.0)
    return WorkDivision(tuple(pruned), tuple(lent), is_rule=True)


def migrated_share(
    straggler: RankTimes, ratio: float, migration: MigrationCost, normal_gemm_s: float, num_ranks: int
) -> float:
    """Return β of Eq. (2), clamped to [0, 1]: Ω1 + Ω2(γ(1 − β)) = Φ1(γβ) + Φ2(γβ / (e − 1)).

    Φ2 is in proportion to M of a normal rank, as in the paper.
    """

    def resizing_costs_more(beta: float) -> bool:
        resizing_s = straggler.gather_fill_scale * straggler.cost.gather_fill_at(ratio * (1.0 - beta))
        return resizing_s > migration.seconds([ratio * beta]) + normal_gemm_s * ratio * beta / (num_ranks - 1)

    if resizing_costs_more(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if resizing_costs_more(middle) else (low, middle)
    return low


def num_migrating_by_benefit(
    busy_s: Sequence[float], num_stragglers: int, reference_s: float, migration: MigrationCost
) -> int:
    """Return x of Eq. (3): the largest x ≤ min(ν, e − 1) with f(x) > 0, else 0.

    f(x) = (T_x − T_min) − Φ1(Γ(x)) − max_{y > x} Γ(x) / (e − x) · T_y / L_y, Γ(x) = Σ_{k ≤ x} L_k (T_k − T_min) / T_k,
    with every rank's L one unit.

    Args:
        busy_s: T of every rank, stragglers first and slowest first, seconds.
        num_stragglers: ν.
        reference_s: T_min.
        migration: Φ1.
    """
    num_ranks = len(busy_s)
    slowest_after = np.maximum.accumulate(busy_s[::-1])[::-1].tolist()  # of the ranks from y on
    num_migrating, migrated = 0, 0.0
    for x in range(1, min(num_stragglers, num_ranks - 1) + 1):
        migrated += (busy_s[x - 1] - reference_s) / busy_s[x - 1]
        communication_s = migration.fixed_s * x + migration.per_share_s * migrated
        computing_s = migrated / (num_ranks - x) * slowest_after[x]
        if busy_s[x - 1] - reference_s - communication_s - computing_s > 0.0:
            num_migrating = x
    return num_migrating


def pridiff_ratios(
    config: BalanceConfig, w_vars: Sequence[Floats], ratio: float, num_steps: int, max_ratio: float
) -> list[float]:
    """Return γ_k = max(share of layer k's columns with w_var < θ, α γ), no more than γ_max.

    Args:
        w_vars: of each layer, [K_k]; NaN where nothing is known: such columns are left out of account.
        ratio: γ, what the rank is to prune.
        num_steps: of the last epoch, N_iter; θ = N_iter · θ_iter, in the units of a weight.
        max_ratio: γ_max.
    """
    if ratio == 0.0:
        return [0.0] * len(w_vars)
    theta, least = config.paper.theta_iter * num_steps, config.paper.alpha * ratio
    known = [w_var[~np.isnan(w_var)] for w_var in w_vars]
    shares = [float(np.mean(values < theta)) if len(values) else 0.0 for values in known]
    return [min(max_ratio, max(share, least)) for share in shares]
