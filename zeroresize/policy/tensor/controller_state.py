"""The state of a controller as plain values: what a saved one must be like, and times and loans there and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zeroresize.plan.group import Loan
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.utils.state_checks import Check, any_number, below, count, each, flag, keyed, optional, row, share

_POINTS = each(any_number)
_TIMES = row(
    any_number, any_number, any_number, any_number, row(_POINTS, _POINTS, _POINTS, any_number, any_number), any_number
)


def controller_check(num_ranks: int, **parts: Check) -> Check:
    """Return the check of what a controller of a group of so many ranks can take over.

    Args:
        parts: checks of what it keeps its state in, by key.
    """
    index = below(num_ranks)
    shares = each(row(share, share), num_ranks)
    times = each(optional(_TIMES), num_ranks)
    loans = each(row(index, share, each(index), each(share)))
    return keyed(
        {
            "saved_for_calibration_s": any_number,
            "num_calibration_steps": count,
            "shares": shares,
            "measured_under": shares,
            "are_stragglers": each(flag, num_ranks),
            "times": times,
            "usual": times,
            "loans": loans,
            "loans_then": loans,
            **parts,
        }
    )


def plain_loans(loans: Sequence[Loan]) -> list[tuple[Any, ...]]:
    """Return loans as plain values."""
    return [(loan.owner, loan.share, list(loan.receivers), list(loan.parts)) for loan in loans]


def loans_of_plain(values: Sequence[Any]) -> tuple[Loan, ...]:
    """Return the loans that :func:`plain_loans` wrote."""
    receivers: dict[tuple[int, ...], tuple[int, ...]] = {}  # loans have theirs in common, as decided ones have
    shares: dict[tuple[float, ...], tuple[float, ...]] = {}
    loans = ((owner, ratio, tuple(to), tuple(parts)) for owner, ratio, to, parts in values)
    return tuple(
        Loan(owner, ratio, receivers.setdefault(to, to), shares.setdefault(parts, parts))
        for owner, ratio, to, parts in loans
    )


def plain_times(times: RankTimes | None) -> tuple[Any, ...] | None:
    """Return times as plain values."""
    if times is None:
        return None
    cost = times.cost
    points = cost.ratios, cost.gemm_share, cost.gather_fill_s, cost.borrowing, cost.widening
    return times.rest_s, times.gemm_s, times.gather_fill_scale, times.deviation, points, times.moving_rest


def times_of_plain(values: Sequence[Any] | None) -> RankTimes | None:
    """Return the times that :func:`plain_times` wrote."""
    if values is None:
        return None
    rest_s, gemm_s, scale, deviation, (*points, borrowing, widening), moving_rest = values
    ratios, gemm_share, gather_fill_s = map(tuple, points)
    cost = ResizingCost(ratios, gemm_share, gather_fill_s, borrowing, widening)
    return RankTimes(rest_s, gemm_s, scale, cost, deviation, moving_rest)
