"""SEMI by the paper (section IV-B): what resizing costs against what migrating costs.

``T`` is a rank's busy time, ``M`` the part of it spent multiplying, ``e`` the number of ranks. Shares are in units of
one rank's full products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.sharing import WorkDivision, paper_lending_ratios

#: Halvings of β's interval: to a millionth.
_BISECTIONS = 20


def paper_division(
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    *,
    reference_s: float,
    migration: MigrationCost,
    max_ratio: float,
    num_migrating: int | None = None,
) -> WorkDivision:
    """Divide the work as the paper does.

    One straggler lends by Eq. (2). Of several, the x slowest of Eq. (3) lend γ of Eq. (1), evenly to all others.

    What remains to be pruned aims at the time of the normal ranks with the work that they took in.

    Args:
        times, are_stragglers: of every rank.
        reference_s: the paper's T_min (with ``target="mean"`` the mean), seconds.
        migration: Φ1.
        max_ratio: γ_max.
        num_migrating: forces x, also where there is one straggler: 0 resizes only, 1 migrates only.
    """
    num_ranks = len(times)
    ratios = [min(ratio, max_ratio) for ratio in paper_lending_ratios(times, are_stragglers, reference_s)]
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
    num_receivers = sum(share == 0.0 for share in lent)
    taken_in = math.fsum(lent) / num_receivers
    borrowed_s = [rank.gemm_s * rank.cost.borrowed_at(taken_in) for rank in times]
    normal = [r for r, slow in enumerate(are_stragglers) if not slow]
    target_s = max((times[r].busy_s + borrowed_s[r] for r in normal), default=reference_s)
    pruned = []
    for r, (rank, slow, share) in enumerate(zip(times, are_stragglers, lent, strict=True)):
        own_target_s = target_s - (borrowed_s[r] if share == 0.0 else 0.0)
        pruned.append(max(rank.ratio_to_reach(own_target_s) - share, 0.0) if slow else 0.0)
    return WorkDivision(tuple(pruned), tuple(lent))


def migrated_share(
    straggler: RankTimes, ratio: float, migration: MigrationCost, normal_gemm_s: float, num_ranks: int
) -> float:
    """Return β of Eq. (2), clamped to [0, 1]: Ω1 + Ω2(γ(1 − β)) = Φ1(γβ) + Φ2(γβ / (e − 1)).

    Args:
        straggler: its overhead of resizing is Ω1 + Ω2.
        ratio: γ.
        migration: Φ1.
        normal_gemm_s: M of a normal rank; Φ2 is in proportion to it, as in the paper.
        num_ranks: e.
    """

    def resizing_costs_more(beta: float) -> bool:
        resizing_s = straggler.gather_fill_scale * straggler.cost.gather_fill_at(ratio * (1.0 - beta))
        return resizing_s > migration.seconds([ratio * beta]) + normal_gemm_s * ratio * beta / (num_ranks - 1)

    if resizing_costs_more(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if resizing_costs_more(middle) else (low, middle)
    return low


def num_migrating_by_benefit(
    busy_s: Sequence[float],
    num_stragglers: int,
    reference_s: float,
    migration: MigrationCost,
) -> int:
    """Return x of Eq. (3): the largest x ≤ min(ν, e − 1) with f(x) > 0, else 0.

    f(x) = (T_x − T_min) − Φ1(Γ(x)) − max_{y > x} Γ(x) / (e − x) · T_y / L_y, Γ(x) = Σ_{k ≤ x} L_k (T_k − T_min) / T_k,
    with every rank's L one unit.
    By prefix sums and suffix maxima, so thousands of ranks cost next to nothing.

    Args:
        busy_s: T of every rank, stragglers first and slowest first, seconds.
        num_stragglers: ν.
        reference_s: T_min.
        migration: Φ1.
    """
    num_ranks = len(busy_s)
    slowest_after = [0.0] * (num_ranks + 1)  # of the ranks from y on
    for y in range(num_ranks - 1, -1, -1):
        slowest_after[y] = max(slowest_after[y + 1], busy_s[y])
    num_migrating, migrated = 0, 0.0
    for x in range(1, min(num_stragglers, num_ranks - 1) + 1):
        migrated += (busy_s[x - 1] - reference_s) / busy_s[x - 1]
        communication_s = migration.fixed_s * x + migration.per_share_s * migrated
        computing_s = migrated / (num_ranks - x) * slowest_after[x]
        if busy_s[x - 1] - reference_s - communication_s - computing_s > 0.0:
            num_migrating = x
    return num_migrating
