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
from zeroresize.policy.tensor.costs import LEAST_SHARE, MigrationCost
from zeroresize.policy.tensor.estimation.curves import GroupTimes
from zeroresize.policy.tensor.estimation.times import RankTimes


@dataclass(frozen=True)
class WorkDivision:
    """Describe how a group's work is to be divided."""

    pruned: tuple[float, ...]  # what each rank drops, as a share of what it owns
    lent: tuple[float, ...]  # what each rank hands over of that
    slack: tuple[float, ...] | None = None  # how much more each rank can take, in any unit; None divides evenly
    is_rule: bool = False  # whether it is to be in force whatever it saves

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

    def dropped(self, owned: Sequence[float]) -> float:
        """Return what ranks that own so much prune together, in units of a rank's products at even shares."""
        return math.fsum(map(operator.mul, self.pruned, owned))

    def borrowed(self, owned: Sequence[float]) -> list[float]:
        """Return what each rank computes for others where ranks own so much."""
        return borrowed_shares(self.loans, len(owned), owned)

    def communication_s(self, migration: MigrationCost | None, owned: Sequence[float]) -> float:
        """Return the seconds that handing over adds to a step where ranks own so much; None adds nothing."""
        return (migration or MigrationCost()).seconds(list(map(operator.mul, self.lent, owned)))

    def busy_s(self, times: Sequence[RankTimes]) -> list[float]:
        """Return the busy seconds of every rank by its times of what it owns."""
        group = GroupTimes.of(times)
        borrowed = np.array(self.borrowed(group.owned)) / np.maximum(group.owned_R, LEAST_SHARE)  # of what each owns
        busy_s = group.busy_at(np.array(self.spared)[:, None]) + group.borrowing_s(borrowed[:, None])
        return busy_s[:, 0].tolist()

    def step_s(self, times: Sequence[RankTimes], migration: MigrationCost | None) -> float:
        """Return the seconds of a step, if ranks met at its end only."""
        return max(self.busy_s(times)) + self.communication_s(migration, GroupTimes.of(times).owned)


def loans_of(ratios: Sequence[float], capacities: Sequence[float] | None = None) -> tuple[Loan, ...]:
    """Return one loan of every rank with γ > 0, divided among the ranks with γ = 0.

    Args:
        ratios: γ of every rank.
        capacities: how much more each rank can take, in any unit; None (or no rank that can take more) divides evenly,
            from the rank after the owner on, which is the paper's virtual renumbering.

    Raises:
        ValueError: if every rank lends.
    """
    owners = [rank for rank, ratio in enumerate(ratios) if ratio > 0.0]
    if len(owners) == len(ratios):
        raise ValueError(f"all {len(ratios)} ranks lend, so no rank is left to compute: γ is {list(ratios)}")
    receivers = [rank for rank, ratio in enumerate(ratios) if ratio == 0.0]
    if capacities is not None and (able := [rank for rank in receivers if capacities[rank] > 0.0]):
        total = sum(capacities[rank] for rank in able)
        shared, parts = tuple(able), tuple(capacities[rank] / total for rank in able)
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
    # Loans that are divided alike are added up first: of thousands each has thousands of receivers, and most share
    # the two tuples, so that these are compared once.
    totals: dict[tuple[tuple[int, ...], tuple[float, ...]], list[float]] = {}
    known: dict[tuple[int, int], list[float]] = {}
    for loan in loans:
        same = id(loan.receivers), id(loan.parts)
        if same not in known:
            is_even = len(set(loan.parts)) == 1  # the same for each of them, in whatever order they follow
            receivers = tuple(sorted(loan.receivers)) if is_even else loan.receivers
            known[same] = totals.setdefault((receivers, loan.parts), [0.0])
        known[same][0] += loan.share if owned is None else loan.share * owned[loan.owner]
    borrowed = [0.0] * num_ranks
    for (receivers, parts), (share,) in totals.items():
        for receiver, part in zip(receivers, parts, strict=True):
            borrowed[receiver] += share * part
    return borrowed


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
