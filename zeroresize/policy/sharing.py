"""How much work a straggler hands over, and to whom: every column is still computed by somebody (Decided 15).

Shares are in units of one rank's full products: who computes its own and nothing else has share 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.plan import Loan
from zeroresize.policy.ratio import RankTimes


@dataclass(frozen=True)
class Division:
    """How a group's work is to be divided.

    Attributes:
        pruned: what each rank drops of its own products.
        lent: what each rank hands over.
        room: how much more each rank can take, in any unit; None divides evenly.
    """

    pruned: tuple[float, ...]
    lent: tuple[float, ...]
    room: tuple[float, ...] | None = None


def balanced_shares(times: Sequence[RankTimes]) -> list[float]:
    """The shares at which all ranks are busy equally long, as far as handing over products can make them.

    Water-filling: the least t with Σ_r max(0, (t − R_r) / M_r) = e gives s_r = max(0, (t − R_r) / M_r), with R the busy
    seconds outside the products and M those inside them at full work. No way of sharing them out is faster
    (work-conserving bound).
    """
    by_rest = sorted(times, key=lambda rank: rank.rest_s)
    level_s, speed, offset = 0.0, 0.0, 0.0
    for place, rank in enumerate(by_rest):
        speed += 1.0 / rank.gemm_s
        offset += rank.rest_s / rank.gemm_s
        level_s = (len(times) + offset) / speed
        if place + 1 == len(by_rest) or level_s <= by_rest[place + 1].rest_s:
            break
    return [max(0.0, (level_s - rank.rest_s) / rank.gemm_s) for rank in times]


def lending_ratios(times: Sequence[RankTimes], are_stragglers: Sequence[bool]) -> list[float]:
    """γ of every rank, 0 for those that are no stragglers: what brings it to the balanced time."""
    shares = balanced_shares(times)
    return [max(0.0, 1.0 - share) if slow else 0.0 for share, slow in zip(shares, are_stragglers, strict=True)]


def paper_lending_ratios(times: Sequence[RankTimes], are_stragglers: Sequence[bool], reference_s: float) -> list[float]:
    """Eq. (1) with T_min: γ = (T − T_min) / M, which leaves the receivers slower than the owner."""
    return [
        min(1.0, max(0.0, (rank.busy_s - reference_s) / rank.gemm_s)) if slow else 0.0
        for rank, slow in zip(times, are_stragglers, strict=True)
    ]


def loans_of(ratios: Sequence[float], capacities: Sequence[float] | None = None) -> tuple[Loan, ...]:
    """One loan of every rank with γ > 0, divided among the ranks with γ = 0.

    Args:
        ratios: γ of every rank.
        capacities: how much more each rank can take, in any unit; None (or no rank that can take more) divides evenly,
            which is the paper's virtual renumbering.

    Raises:
        ValueError: if every rank lends.
    """
    num_ranks = len(ratios)
    loans = []
    for owner, ratio in enumerate(ratios):
        if ratio == 0.0:
            continue
        following = [(owner + step) % num_ranks for step in range(1, num_ranks)]
        receivers = tuple(rank for rank in following if ratios[rank] == 0.0)
        if not receivers:
            raise ValueError(f"every rank of {num_ranks} lends, nobody is left to compute: γ is {list(ratios)}")
        room = [max(capacities[rank], 0.0) if capacities is not None else 1.0 for rank in receivers]
        if sum(room) == 0.0:
            room = [1.0] * len(receivers)
        receivers = tuple(rank for rank, own in zip(receivers, room, strict=True) if own > 0.0)
        room = [own for own in room if own > 0.0]
        loans.append(Loan(owner, ratio, receivers, tuple(one / sum(room) for one in room)))
    return tuple(loans)


def borrowed_shares(loans: Sequence[Loan], num_ranks: int) -> list[float]:
    """What every rank computes for others, in units of full products."""
    borrowed = [0.0] * num_ranks
    for loan in loans:
        for receiver, part in zip(loan.receivers, loan.parts, strict=True):
            borrowed[receiver] += loan.ratio * part
    return borrowed


def predicted_busy_s(times: Sequence[RankTimes], division: Division) -> list[float]:
    """Busy seconds of every rank when the work is divided so."""
    borrowed = borrowed_shares(loans_of(division.lent, division.room), len(times))
    return [
        rank.busy_at(pruned + lent) + taken_in * rank.gemm_s
        for rank, pruned, lent, taken_in in zip(times, division.pruned, division.lent, borrowed, strict=True)
    ]
