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

from zeroresize.plan.ownership import SHARE_DECIMALS, SegmentWork, normalised, unit_counts
from zeroresize.policy.tensor.estimation.curves import Curves, Floats
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.sharing import pruned_by_segment

#: Halvings of the time at which all work is done.
_NUM_HALVINGS = 45


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
    *,
    pruned: Sequence[float] = (),
    lent: Sequence[float] = (),
    borrowed: Sequence[float] = (),
) -> float:
    """Return the seconds of a step in which ranks own these shares, in whole units.

    Args:
        times: of every rank, at even shares.
        shares: what each is to own.
        segments: of the model; what is in none stays even.
        pruned, lent: shares of what each owns that it drops and hands over; empty for nothing.
        borrowed: what each computes for others, in units of a rank's products at even shares; empty for nothing.
    """
    curves, num_ranks = Curves.of(times), len(shares)
    if not any(pruned) and not any(lent) and not any(borrowed) and len(set(shares)) == 1:
        return float(curves.busy_s.max())
    works = [1.0 - math.fsum(segment.work for segment in segments), *(segment.work for segment in segments)]
    owned_RS = np.ones((num_ranks, len(works)))
    for number, segment in enumerate(segments, start=1):
        owned_RS[:, number] = np.array(unit_counts(shares, segment)) * (num_ranks / segment.num_units)
    busy_s_RS = curves.owning_s(owned_RS, _spared(pruned, lent, owned_RS, works))
    if any(borrowed):
        borrowed_R1 = np.array(borrowed)[:, None]
        busy_s_RS = busy_s_RS + curves.gemm_s[:, None] * curves.borrowed_at(borrowed_R1)
    return float(np.cumsum(np.array(works) * busy_s_RS.max(axis=0))[-1])


def _spared(pruned: Sequence[float], lent: Sequence[float], owned_RS: Floats, works: Sequence[float]) -> Floats | None:
    """[R, S] what each rank does not compute of what it owns in each segment; None for nothing."""
    if not any(pruned) and not any(lent):
        return None
    lent_R = np.array(lent) if any(lent) else np.zeros(len(owned_RS))
    spared_RS = np.repeat(lent_R[:, None], owned_RS.shape[1], axis=1)
    for rank, share in enumerate(pruned):
        if share > 0.0:
            spared_RS[rank] += pruned_by_segment(share, float(lent_R[rank]), owned_RS[rank].tolist(), works)
    return spared_RS


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
    if not any(are_stragglers) or not segments:
        return home
    curves, are_slow = Curves.of(times), np.array(are_stragglers, dtype=bool)
    most_R = np.full(num_ranks, np.inf) if most_shares is None else np.array(most_shares)
    shares_R = _balanced(*_work_curves(curves, are_slow, noise), are_slow, most_s, most_R)
    if not any(segment.min_units for segment in segments):
        # Every rank keeps some units: without any nobody would see that it has recovered. A rank with at least the
        # share of one quantum gets one; raising shares lowers all of them a little.
        least = min(segment.quantum * num_ranks / segment.num_units for segment in segments)
        if least < 0.5:
            shares_R = np.maximum(shares_R, least / (1.0 - least) + 10.0 ** (1 - SHARE_DECIMALS))
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


def _work_curves(curves: Curves, are_slow: np.ndarray, noise: float) -> tuple[Floats, Floats, Floats]:
    """What each rank can do until when.

    Returns:
        [R, P] shares, ascending from 0 to 1; [R, P] the seconds that they take; [R] seconds of another share of 1.
    """
    rest_s, gemm_s = curves.rest_s.copy(), curves.gemm_s.copy()
    normal_s = np.sort(curves.busy_s[~are_slow])
    if len(normal_s):
        usual_s = normal_s[len(normal_s) // 2]
        alike = ~are_slow & (np.abs(curves.busy_s - usual_s) <= noise * usual_s)
        for seconds in (rest_s, gemm_s):
            seconds[alike] = np.cumsum(seconds[alike])[-1] / np.count_nonzero(alike)
    owned_RP = curves.borrowed_points
    moving_s = rest_s * curves.moving_rest
    seconds_RP = (rest_s - moving_s)[:, None] + moving_s[:, None] * owned_RP
    seconds_RP = seconds_RP + gemm_s[:, None] * curves.gemm_share_at(1.0 - owned_RP)
    return owned_RP, np.maximum.accumulate(seconds_RP, axis=1), moving_s + gemm_s * curves.widening


def _balanced(
    owned_RP: Floats, seconds_RP: Floats, more_s_R: Floats, are_slow: np.ndarray, most_s: float, most_R: Floats
) -> Floats:
    """[R] the shares that are done at the time at which all work is, mean 1; of ranks that are not slow by ``most_s``.

    What is left then is divided among the slow ones as if they went on until all is done. None has more than
    ``most_R``.
    """
    num_ranks, num_points = owned_RP.shape
    first_R = num_points * np.arange(num_ranks)
    whole_s = seconds_RP[:, -1]

    def done(level_s: float) -> Floats:
        above = np.ones(num_ranks, dtype=np.intp)
        for point in range(1, num_points - 1):
            above += seconds_RP[:, point] <= level_s
        above += first_R
        low_s, high_s = seconds_RP.take(above - 1), seconds_RP.take(above)
        low, high = owned_RP.take(above - 1), owned_RP.take(above)
        part = np.clip((level_s - low_s) / np.where(high_s > low_s, high_s - low_s, 1.0), 0.0, 1.0)
        shares_R = np.where(level_s < whole_s, low + (high - low) * part, 1.0 + (level_s - whole_s) / more_s_R)
        return np.minimum(shares_R, most_R)

    low_s, high_s = float(seconds_RP[:, 0].min()), float(whole_s.max())
    if np.isfinite(most_R).any():  # who has little memory leaves more to the others than at even shares
        high_s = float((whole_s + num_ranks * more_s_R).max())
    for _ in range(_NUM_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if np.cumsum(done(middle_s))[-1] < num_ranks:
            low_s = middle_s
        else:
            high_s = middle_s
    if high_s <= most_s:
        return done(high_s)
    shares_R = np.where(are_slow, done(high_s), done(most_s))
    left = num_ranks - float(np.cumsum(shares_R[~are_slow])[-1]) if not are_slow.all() else float(num_ranks)
    slow = float(np.cumsum(shares_R[are_slow])[-1])
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
    moves_s = [max(rest * rho + gemm, 1e-12) for rest, rho, gemm in zip(rest_s, moving_rest, gemm_s, strict=True)]
    speed = math.fsum(1.0 / seconds for seconds in moves_s)
    behind = math.fsum(stays / moves for stays, moves in zip(stays_s, moves_s, strict=True))
    return max((len(stays_s) + behind) / speed, *stays_s)
