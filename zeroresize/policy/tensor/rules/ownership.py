"""Who should own how many units, so that a step is shortest: exact, and without any traffic in the steps that follow.

Ranks meet after every segment, so a step takes Σ over the segments of what the slowest rank needs there. What lies
outside of products is spread over the segments by their work. Shares are in units of a rank's work at even shares:
their mean is 1, all 1 is home.

With R seconds outside of products and M χ_i of multiplications on rank i of e, in proportion to their FLOPs, no
division of the work is faster than T* = R + M e / Σ (1 / χ_i); shares in proportion to 1 / χ_i reach it, but for whole
units.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.ownership import SegmentWork, normalised, owned_shares, unit_counts
from zeroresize.policy.tensor.costs import HALVINGS, LEAST_SHARE, MigrationCost
from zeroresize.policy.tensor.estimation.curves import Floats, GroupTimes, done_within
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.sharing import WorkDivision, pruned_by_segment

#: So that rounding a share does not take its last unit away.
_MORE = 1e-5


def merged(segments: Sequence[SegmentWork]) -> tuple[SegmentWork, ...]:
    """Merge segments whose units are counted alike into one with the work of all; shares divide them alike."""
    work: dict[SegmentWork, list[float]] = {}
    for segment in segments:
        work.setdefault(dataclasses.replace(segment, work=0.0), []).append(segment.work)
    return tuple(dataclasses.replace(kind, work=math.fsum(own)) for kind, own in work.items())


def owned_step_s(
    times: Sequence[RankTimes],
    shares: Sequence[float],
    segments: Sequence[SegmentWork],
    division: WorkDivision | None = None,
    migration: MigrationCost | None = None,
) -> float:
    """Return the seconds of a step in which ranks own these shares, in whole units.

    Args:
        times: of every rank, at even shares.
        shares: what each is to own.
        segments: of the model; what is in none is even.
        division: what is pruned and lent of that; None for nothing.
        migration: what lending adds; None for nothing.
    """
    group, num_ranks = GroupTimes.of(times), len(shares)
    division = division or WorkDivision.nothing(num_ranks)
    if not any(division.spared) and len(set(shares)) == 1 and all(each.is_even(num_ranks) for each in segments):
        return float(group.busy_s.max())
    works = [1.0 - math.fsum(segment.work for segment in segments), *(segment.work for segment in segments)]
    owned_RS = np.ones((num_ranks, len(works)))
    for number, segment in enumerate(segments, start=1):
        owned_RS[:, number] = segment.loads(unit_counts(shares, segment))
    spared_RS = np.repeat(np.array(division.lent)[:, None], len(works), axis=1)
    for rank, (pruned, lent) in enumerate(zip(division.pruned, division.lent, strict=True)):
        if pruned > 0.0:
            spared_RS[rank] += pruned_by_segment(pruned, lent, owned_RS[rank].tolist(), works)
    busy_s_RS, communication_s = group.busy_at(spared_RS, owned_RS), 0.0
    if any(division.lent):
        owned = owned_shares(shares, segments)
        busy_s_RS = busy_s_RS + group.borrowing_s(np.array(division.borrowed(owned))[:, None])
        communication_s = division.communication_s(migration, owned)
    return float(np.cumsum(np.array(works) * busy_s_RS.max(axis=0))[-1]) + communication_s


def wanted_shares(
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    segments: Sequence[SegmentWork],
    *,
    noise: float = 0.0,
    most_s: float = math.inf,
    most_shares: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Return what every rank should own, mean 1: all ranks take equally long in every segment, but for whole units.

    Home, exactly, where nobody is slow, or, unless ``most_s`` is given, where that is no longer than the shortest step
    and noise; where memory does not suffice for it, the nearest shares that fit. Ranks that are not slow and differ by
    noise only get equal shares, as far as memory allows.

    Args:
        times, are_stragglers: of every rank.
        segments: in which units can change hands.
        noise: share of a time that says nothing.
        most_s: for how many seconds the ranks that are not slow may be busy; the slow ones keep what these cannot take.
        most_shares: for how much each rank has the memory; None where all have for everything.
    """
    num_ranks = len(times)
    home = fitting_shares(num_ranks, most_shares)
    moving = [segment for segment in segments if not segment.stays]
    if not any(are_stragglers) or not moving:
        return home
    are_slow = np.array(are_stragglers, dtype=bool)
    shares_R = _balanced(*_work_curves(GroupTimes.of(times), are_slow, noise), are_slow, most_s)
    if not any(segment.min_units for segment in moving):
        # Every rank keeps some units: without any nobody would see that it has recovered. A rank with at least the
        # share of one quantum gets one; raising shares lowers all of them a little.
        least = min(max(each.quantum, each.block) * num_ranks / each.num_units for each in moving)
        if 2.0 * least < 1.0:
            shares_R = np.maximum(shares_R, least / (1.0 - least) + _MORE)
    shares = nearest_fitting(normalised(shares_R.tolist()), most_shares)
    if most_s < math.inf:  # what the slow ones keep is to be pruned
        return shares
    home_s = owned_step_s(times, home, segments)
    return shares if owned_step_s(times, shares, segments) * (1.0 + noise) < home_s else home


def fitting_shares(num_ranks: int, most_shares: Sequence[float] | None) -> tuple[float, ...]:
    """Return even shares, or where memory does not suffice for them those nearest to them that fit, mean 1.

    Args:
        most_shares: for how much each rank has the memory, together for at least ``num_ranks``; None for everything.
    """
    return nearest_fitting((1.0,) * num_ranks, most_shares)


def nearest_fitting(shares: Sequence[float], most_shares: Sequence[float] | None) -> tuple[float, ...]:
    """Return these shares, or where memory does not suffice for them those in proportion to them that fit, mean 1.

    Who cannot take as much as that takes what it can.

    Args:
        shares: of mean 1.
        most_shares: for how much each rank has the memory, together for at least as many as there are ranks; None for
            everything.
    """
    if most_shares is None or all(share <= most for share, most in zip(shares, most_shares, strict=True)):
        return tuple(shares)
    level, left, wanted = 1.0, float(len(shares)), math.fsum(shares)
    full_first = sorted(zip(most_shares, shares, strict=True), key=lambda own: own[0] / own[1] if own[1] else math.inf)
    for most, share in full_first:
        level = left / wanted if wanted > 0.0 else 0.0
        if level * share <= most:
            break
        left, wanted = left - most, wanted - share
    return normalised([min(level * share, most) for share, most in zip(shares, most_shares, strict=True)])


def _work_curves(times: GroupTimes, are_slow: np.ndarray, noise: float) -> tuple[Floats, Floats, Floats]:
    """What each rank can do until when.

    Returns:
        [R, P] shares, ascending from 0 to 1; [R, P] the seconds that they take; [R, 1] seconds of another share of 1.
    """
    rest_s, gemm_s = times.rest_s[:, None].copy(), times.gemm_s[:, None].copy()
    normal_s = np.sort(times.busy_s[~are_slow])
    if len(normal_s):
        usual_s = normal_s[len(normal_s) // 2]
        alike = ~are_slow & (np.abs(times.busy_s - usual_s) <= noise * usual_s)
        for seconds in (rest_s, gemm_s):
            seconds[alike] = np.cumsum(seconds[alike])[-1] / np.count_nonzero(alike)
    owned_RP, moving_s = times.borrowed_points, rest_s * times.moving_rest[:, None]
    seconds_RP = rest_s - moving_s + moving_s * owned_RP + gemm_s * times.gemm_share_at(1.0 - owned_RP)
    return owned_RP, np.maximum.accumulate(seconds_RP, axis=1), moving_s + gemm_s * times.widening[:, None]


def _balanced(owned_RP: Floats, seconds_RP: Floats, more_s_R1: Floats, are_slow: np.ndarray, most_s: float) -> Floats:
    """[R] the shares that are done at the time at which all work is, mean 1; of ranks that are not slow by ``most_s``.

    What is left then is divided among the slow ones as if they went on until all is done.
    """
    num_ranks, whole_s_R1 = len(owned_RP), seconds_RP[:, -1:]

    def done(level_s: float) -> Floats:
        levels_s_R1 = np.full((num_ranks, 1), level_s)
        more = np.maximum(levels_s_R1 - whole_s_R1, 0.0) / more_s_R1
        return (done_within(levels_s_R1, owned_RP, seconds_RP) + more)[:, 0]

    low_s, high_s = float(seconds_RP[:, 0].min()), float(whole_s_R1.max())
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        low_s, high_s = (middle_s, high_s) if np.cumsum(done(middle_s))[-1] < num_ranks else (low_s, middle_s)
    if high_s <= most_s:
        return done(high_s)
    shares_R = np.where(are_slow, done(high_s), done(most_s))
    left = num_ranks - math.fsum(shares_R[~are_slow])
    slow = math.fsum(shares_R[are_slow])
    shares_R[are_slow] = shares_R[are_slow] * (left / slow) if slow > 0.0 else left / np.count_nonzero(are_slow)
    return shares_R


@dataclass(frozen=True)
class Bounds:
    """Tells how short a step can be if nothing is left out and sending costs nothing, seconds.

    Attributes:
        of_products: if products could be handed over alone, and everything else stayed where it is.
        of_units: if what lies between the products of a unit moves along with it, such as activation functions and the
            inner products of attention: at most a rank's ``moving_rest`` of the rest of its step, as far as is known.
    """

    of_products: float
    of_units: float

    @classmethod
    def of(cls, times: Sequence[RankTimes]) -> Bounds:
        """Return the bounds of ranks that take these times at even shares."""
        rest_s, gemm_s = [rank.rest_s for rank in times], [rank.gemm_s for rank in times]
        return cls(
            work_conserving_bound_s(rest_s, gemm_s, [0.0] * len(times)),
            work_conserving_bound_s(rest_s, gemm_s, [rank.moving_rest for rank in times]),
        )


def work_conserving_bound_s(rest_s: Sequence[float], gemm_s: Sequence[float], moving_rest: Sequence[float]) -> float:
    """Return the least t at which the ranks have done R even shares together, whichever part of it each does.

    A rank that does the share f takes (1 − ρ) R + f (ρ R + M) seconds. With ρ = 0 and equal R it is T* = R + M e / Σ
    (1 / χ).

    Args:
        rest_s, gemm_s: [R] seconds at even shares.
        moving_rest: [R] ρ, the share of a rank's rest that moves along with its work.
    """
    stays_s = [rest * (1.0 - moving) for rest, moving in zip(rest_s, moving_rest, strict=True)]
    moves_s = [max(rest * rho + gemm, LEAST_SHARE) for rest, rho, gemm in zip(rest_s, moving_rest, gemm_s, strict=True)]
    speed = math.fsum(1.0 / seconds for seconds in moves_s)
    behind = math.fsum(stays / moves for stays, moves in zip(stays_s, moves_s, strict=True))
    return max((len(stays_s) + behind) / speed, *stays_s)
