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

import numpy as np

from zeroresize.plan.ownership import SHARE_DECIMALS, SegmentWork, normalised, unit_counts
from zeroresize.policy.tensor.estimation.curves import Curves, Floats
from zeroresize.policy.tensor.estimation.times import RankTimes

#: Halvings of the time at which all work is done.
_NUM_HALVINGS = 45


def merged(segments: Sequence[SegmentWork]) -> tuple[SegmentWork, ...]:
    """Merge segments whose units are counted alike into one with the work of all; shares divide them alike."""
    work: dict[SegmentWork, list[float]] = {}
    for segment in segments:
        work.setdefault(dataclasses.replace(segment, work=0.0), []).append(segment.work)
    return tuple(dataclasses.replace(kind, work=math.fsum(own)) for kind, own in work.items())


def owned_step_s(times: Sequence[RankTimes], shares: Sequence[float], segments: Sequence[SegmentWork]) -> float:
    """Return the seconds of a step in which ranks own these shares, in whole units, and nothing is pruned or lent.

    Args:
        times: of every rank.
        shares: what each is to own.
        segments: of the model; what is in none stays even.
    """
    curves = Curves.of(times)
    if len(set(shares)) == 1:
        return float(curves.busy_s.max())
    step_s = (1.0 - math.fsum(segment.work for segment in segments)) * float(curves.busy_s.max())
    for segment in segments:
        owned_R = np.array(unit_counts(shares, segment)) * (len(shares) / segment.num_units)
        step_s += segment.work * float(curves.owning_s(owned_R[:, None]).max())
    return step_s


def wanted_shares(
    times: Sequence[RankTimes],
    are_stragglers: Sequence[bool],
    segments: Sequence[SegmentWork],
    *,
    noise: float = 0.0,
) -> tuple[float, ...]:
    """Return what every rank should own, mean 1: all ranks take equally long in every segment, but for whole units.

    Home, exactly, where nobody is slow, or where that is no longer than the shortest step and noise. Ranks that are not
    slow and differ by noise only get equal shares.

    Args:
        times, are_stragglers: of every rank.
        segments: in which units can change hands.
        noise: share of a time that says nothing.
    """
    num_ranks = len(times)
    home = (1.0,) * num_ranks
    if not any(are_stragglers) or not segments:
        return home
    curves = Curves.of(times)
    shares_R = _balanced(*_work_curves(curves, np.array(are_stragglers, dtype=bool), noise))
    if not any(segment.min_units for segment in segments):
        # Every rank keeps some units: without any nobody would see that it has recovered. A rank with at least the
        # share of one quantum gets one; raising shares lowers all of them a little.
        least = min(segment.quantum * num_ranks / segment.num_units for segment in segments)
        if least < 0.5:
            shares_R = np.maximum(shares_R, least / (1.0 - least) + 10.0 ** (1 - SHARE_DECIMALS))
    shares = normalised(shares_R.tolist())
    is_worth_it = owned_step_s(times, shares, segments) * (1.0 + noise) < float(curves.busy_s.max())
    return shares if is_worth_it else home


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


def _balanced(owned_RP: Floats, seconds_RP: Floats, more_s_R: Floats) -> Floats:
    """[R] the shares that are done at the time at which all work is, mean 1."""
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
        return np.where(level_s < whole_s, low + (high - low) * part, 1.0 + (level_s - whole_s) / more_s_R)

    low_s, high_s = float(seconds_RP[:, 0].min()), float(whole_s.max())
    for _ in range(_NUM_HALVINGS):
        middle_s = (low_s + high_s) / 2
        if np.cumsum(done(middle_s))[-1] < num_ranks:
            low_s = middle_s
        else:
            high_s = middle_s
    return done(high_s)
