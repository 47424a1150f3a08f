"""T*, the shortest step that any division of the products allows, from what balancers of copies in turns measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import zeroresize as zr
from scripts.bench.common import gather_from_ranks
from zeroresize.plan.ownership import SegmentWork, home_counts
from zeroresize.policy.tensor.rules.ownership import work_conserving_bound_s


def shortest_step_s(balancer: zr.Balancer, chis: Sequence[float], homogeneous_s: float) -> float:
    """T*, seconds: products are shared out by speed; collective.

    What a rank takes is what those of χ = 1 took in the last interval; collectives cost nothing more.
    """
    busy_s, gemm_s = _seconds_of(balancer, chis)
    rest_s = [busy_s - gemm_s] * len(chis)
    least_s = work_conserving_bound_s(rest_s, [gemm_s * chi for chi in chis], [0.0] * len(chis))
    return homogeneous_s - busy_s + least_s


def shortest_by_heads_s(
    balancer: zr.Balancer, chis: Sequence[float], homogeneous_s: float, heads: SegmentWork, update_s: float
) -> float:
    """The same where heads stay whole, the last rank alone being slow: the best of their divisions; collective.

    Ranks meet after each attention and after each feed-forward part, and products of copies count. Weights that a rank
    takes are updated there, which takes ``update_s`` at even shares. Sums of copies' gradients cost nothing.
    """
    _, gemm_s = _seconds_of(balancer, chis)
    others, by_home = len(chis) - 1, home_counts(heads.num_units, len(chis), heads.block)
    neurons = len(chis) / math.fsum(1.0 / chi for chi in chis)

    def least_s(taken: int) -> float:
        share, over = divmod(taken, others)
        counts = [count + share + (rank < over) for rank, count in enumerate(by_home[:-1])] + [by_home[-1] - taken]
        loads = heads.loads(counts)
        attention = max(chi * load for chi, load in zip(chis, loads, strict=True))
        products, weights = (heads.work * part + (1.0 - heads.work) * neurons for part in (attention, max(loads)))
        return gemm_s * (products - 1.0) + update_s * (weights - 1.0)

    return homogeneous_s + min(map(least_s, range(by_home[-1] + 1)))


def _seconds_of(balancer: zr.Balancer, chis: Sequence[float]) -> tuple[float, float]:
    """What a rank of χ = 1 was busy, and multiplied, in the last interval; collective."""
    metrics = balancer.metrics()
    busy_s, gemm_s = (
        statistics.fmean(
            seconds for seconds, chi in zip(gather_from_ranks(metrics[name]), chis, strict=True) if chi == 1
        )
        for name in ("balance/busy_s", "balance/gemm_s")
    )
    return busy_s, gemm_s
