"""Who computes for whom, and how long every rank is busy with it.

Shares are in units of one rank's full products at even shares: who computes its own there and nothing else has share 1.
What a rank prunes and lends are shares of what it owns.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.group import Loan
from zeroresize.policy.tensor.estimation.curves import Curves, GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes

#: Who owns less is no receiver.
_LEAST_OWNED = 1e-6


def owned_by(times: Sequence[RankTimes]) -> tuple[float, ...] | None:
    """Return what each rank owns where these are its times, see :class:`GroupTimes`; None where that is 1 of all."""
    return times.owned if isinstance(times, GroupTimes) else None


@dataclass(frozen=True)
class WorkDivision:
    """Describe how a group's work is to be divided.

    Attributes:
        pruned: what each rank drops, as a share of what it owns.
        lent: what each rank hands over of that.
        slack: how much more each rank can take, in any unit; None divides evenly.
    """

    pruned: tuple[float, ...]
    lent: tuple[float, ...]
    slack: tuple[float, ...] | None = None

    @classmethod
    def nothing(cls, num_ranks: int) -> WorkDivision:
        """Return that of a group in which every rank computes what it owns."""
        return cls((0.0,) * num_ranks, (0.0,) * num_ranks)

    @property
    def spared(self) -> tuple[float, ...]:
        """Return what each rank does not compute of what it owns, γ."""
        return tuple(map(operator.add, self.pruned, self.lent))

    @property
    def loans(self) -> tuple[Loan, ...]:
        """Return who computes what is handed over."""
        return loans_of(self.lent, self.slack)

    @property
    def without_pruning(self) -> WorkDivision:
        """Return the same, but that nothing is dropped."""
        return WorkDivision((0.0,) * len(self.pruned), self.lent, self.slack)

    @property
    def without_loans(self) -> WorkDivision:
        """Return the same, but that nothing is handed over."""
        return WorkDivision(self.pruned, (0.0,) * len(self.lent))

    def dropped(self, times: Sequence[RankTimes]) -> float:
        """Return what all ranks prune together, in units of a rank's products at even shares.

        Args:
            times: of what each rank owns.
        """
        owned = owned_by(times)
        return math.fsum(self.pruned if owned is None else map(operator.mul, self.pruned, owned))

    def busy_s(self, times: Sequence[RankTimes]) -> list[float]:
        """Return the busy seconds of every rank when the work is divided so.

        Args:
            times: of what each rank owns.
        """
        return predicted_busy_s(times, self.spared, self.loans)


def paper_lending_ratios(times: Sequence[RankTimes], are_stragglers: Sequence[bool], reference_s: float) -> list[float]:
    """Return γ = (T − T_ref) / M of Eq. (1), which leaves the receivers slower than the owner.

    Args:
        reference_s: T_ref, T_min in the paper's section on SEMI.
    """
    return [
        min(1.0, max(0.0, (rank.busy_s - reference_s) / rank.gemm_s)) if slow else 0.0
        for rank, slow in zip(times, are_stragglers, strict=True)
    ]


def loans_of(ratios: Sequence[float], capacities: Sequence[float] | None = None) -> tuple[Loan, ...]:
    """Return one loan of every rank with γ > 0, divided among the ranks with γ = 0.

    Args:
        ratios: γ of every rank.
        capacities: how much more each rank can take, in any unit; None (or no rank that can take more) divides evenly,
            from the rank after the owner on, which is the paper's virtual renumbering.

    Raises:
        ValueError: if every rank lends.
    """
    num_ranks = len(ratios)
    owners = [rank for rank, ratio in enumerate(ratios) if ratio > 0.0]
    if len(owners) == num_ranks:
        raise ValueError(f"all {num_ranks} ranks lend, so no rank is left to compute: γ is {list(ratios)}")
    receivers = [rank for rank, ratio in enumerate(ratios) if ratio == 0.0]
    if capacities is not None and (able := [rank for rank in receivers if capacities[rank] > 0.0]):
        total = sum(capacities[rank] for rank in able)
        parts = tuple(capacities[rank] / total for rank in able)
        shared = tuple(able)
        return tuple(Loan(owner, ratios[owner], shared, parts) for owner in owners)
    parts = (1.0 / len(receivers),) * len(receivers)
    loans = []
    for owner in owners:
        following = bisect(receivers, owner)
        loans.append(Loan(owner, ratios[owner], (*receivers[following:], *receivers[:following]), parts))
    return tuple(loans)


def borrowed_shares(loans: Sequence[Loan], num_ranks: int, owned: Sequence[float] | None = None) -> list[float]:
    """Return what every rank computes for others, in units of full products at even shares.

    Args:
        owned: what each rank owns, in the same units; None for 1 of all.
    """
    lent: list[float] = []  # by division, of all loans that are divided so
    divisions: dict[tuple[tuple[int, ...], tuple[float, ...]], int] = {}
    known: dict[tuple[int, int], int] = {}  # most loans share the two tuples, which are long
    for loan in loans:
        same = id(loan.receivers), id(loan.parts)
        if same not in known:
            is_even = len(set(loan.parts)) == 1  # the same for each of them, in whatever order they follow
            receivers = tuple(sorted(loan.receivers)) if is_even else loan.receivers
            known[same] = divisions.setdefault((receivers, loan.parts), len(lent))
            lent += [0.0] * (len(divisions) - len(lent))
        lent[known[same]] += loan.share if owned is None else loan.share * owned[loan.owner]
    borrowed = [0.0] * num_ranks
    for (receivers, parts), division in divisions.items():
        for receiver, part in zip(receivers, parts, strict=True):
            borrowed[receiver] += lent[division] * part
    return borrowed


def predicted_busy_s(times: Sequence[RankTimes], spared: Sequence[float], loans: Sequence[Loan]) -> list[float]:
    """Return the busy seconds of every rank.

    Each is spared a share of what it owns and computes what others lend it.
    """
    curves, owned_R = Curves.of(times), owned_by(times)
    borrowed = np.array(borrowed_shares(loans, len(times), owned_R))
    if owned_R is not None:  # as a share of what each owns
        borrowed = borrowed / np.maximum(owned_R, _LEAST_OWNED)
    busy_s = curves.busy_at(np.array(spared)[:, None]) + curves.gemm_s[:, None] * curves.borrowed_at(borrowed[:, None])
    return busy_s[:, 0].tolist()


def pruned_by_segment(pruned: float, lent: float, owned: Sequence[float], works: Sequence[float]) -> tuple[float, ...]:
    """Return which share of what it owns in each segment a rank prunes: it computes equally much in all of them.

    Ranks meet after every segment, so time that is spared in one makes up for nothing in another.

    In a segment in which it owns less than that it prunes nothing. In all, ``pruned`` of what it owns is pruned.

    Args:
        pruned, lent: shares of all that it owns; what is lent is the same share of every segment.
        owned: what it owns in each segment, relative to even shares there.
        works: share of a rank's products at even shares that lies in each.
    """
    if pruned == 0.0 or len(set(owned)) <= 1:
        return (pruned,) * len(owned)
    wanted = (1.0 - lent - pruned) * math.fsum(share * work for share, work in zip(owned, works, strict=True))
    left, level = math.fsum(works), 0.0
    for share, work in sorted(zip(owned, works, strict=True)):
        level = wanted / left
        if level <= share * (1.0 - lent):
            break
        wanted -= work * share * (1.0 - lent)
        left -= work
    return tuple(max(1.0 - lent - level / share, 0.0) if share > 0.0 else 0.0 for share in owned)
