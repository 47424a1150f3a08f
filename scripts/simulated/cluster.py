"""A model of a cluster: what the steps of ranks take that are slow, prune, lend, and own more or fewer units.

A rank's step is ``rest_s`` seconds that pruning does not touch and χ · ``gemm_s`` seconds of multiplications; all ranks
wait for the slowest, and for what migrates; where units are away from home they do so in every segment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scripts.simulated.noise import Noise
from zeroresize.plan.group import Loan, WorkloadPlan, Workshares
from zeroresize.plan.ownership import SegmentWork, owned_shares, unit_counts
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.times import StepTimes
from zeroresize.policy.tensor.rules.sharing import borrowed_shares, pruned_by_segment

#: χ of every rank in a step.
Speeds = Callable[[int], Sequence[float]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cluster:
    """Describe ranks that are equal but for their χ.

    Attributes:
        chi: χ of every rank, by step from 0.
        rest_s: seconds of a step outside the balanced layers' multiplications.
        gemm_s: seconds of them at χ = 1.
        cost: what pruning really costs; what the controller is told, unless :func:`simulate` is given another.
        migration: what migrating really costs in communication; what the controller is told, unless :func:`simulate` is
            given another.
        reads_late: whether a step is read only when the next one is over, as on a device.
        noise: how each rank's times vary from step to step; a number is the relative standard deviation of white noise.
        seed: of the noise.
        segments: in which units can change hands; none, and nothing moves.
        bytes_of_units: bytes of the units of one rank at home.
        move: what a move really takes; what the controller is told, unless :func:`simulate` is given another.
        moving_rest: share of ``rest_s`` that moves along with units.
        slows_rest: whether χ holds for all of a rank's work, and not for its multiplications only.
        comparison_error: relative standard deviation of what products take that are timed apart from training.
    """

    chi: Speeds
    rest_s: float
    gemm_s: float
    cost: ResizingCost
    migration: MigrationCost = field(default_factory=MigrationCost)
    reads_late: bool = False
    noise: Noise | float = 0.0
    seed: int = 0
    segments: tuple[SegmentWork, ...] = ()
    bytes_of_units: float = 0.0
    move: MoveCost = field(default_factory=MoveCost)
    moving_rest: float = 0.0
    slows_rest: bool = False
    comparison_error: float = 0.02

    @property
    def noise_kind(self) -> Noise:
        """Return the noise, also where a number gives it."""
        return self.noise if isinstance(self.noise, Noise) else Noise(self.noise)


class Holdings:
    """Who owns how many units of each segment of a cluster.

    Attributes:
        owned: what every rank owns, in units of a rank's products at even shares.
    """

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self._segments, self._bytes_of_units = cluster.segments, cluster.bytes_of_units
        self._wanted = self.owned = (1.0,) * num_ranks
        self._work = [segment.work for segment in cluster.segments]
        self._moving_work = math.fsum(self._work)
        self._work.append(1.0 - self._moving_work)
        self._by_segment = np.ones((len(self._work), num_ranks))

    @property
    def parts(self) -> tuple[list[float], Floats]:
        """Parts of a step behind which ranks meet: the work of each, and [parts, ranks] what they own of it.

        A whole step where all units are at home; else each segment, and last what lies in none.
        """
        if (self._by_segment == 1.0).all():
            return [1.0], self._by_segment[:1]
        return self._work, self._by_segment

    def take(self, wanted: tuple[float, ...]) -> float:
        """Move units so that ranks own what is wanted. How many bytes the rank sends or receives that does most."""
        if wanted == self._wanted:
            return 0.0
        before, self._wanted, self.owned = self.owned, wanted, owned_shares(wanted, self._segments)
        for shares, segment in zip(self._by_segment, self._segments, strict=False):
            shares[:] = np.array(unit_counts(wanted, segment)) * (len(wanted) / segment.num_units)
        most = max(abs(after - owned) for owned, after in zip(before, self.owned, strict=True))
        return most / self._moving_work * self._bytes_of_units


def step_times(
    cluster: Cluster, chi: Sequence[float], plan: WorkloadPlan, holdings: Holdings, noise: Floats
) -> list[StepTimes]:
    """Every rank's times of a step; all of them end when the slowest has finished and all has been sent."""
    works, owned_by_part = holdings.parts
    cost, slowness, ends_s = cluster.cost, np.array(chi), 0.0
    busy_s, gemm_s, gather_fill_s = np.zeros((3, len(chi)))
    extra = _borrowed_time(plan.loans, holdings.owned, cost)
    pruned_by_rank = [
        pruned_by_segment(rank.pruned, rank.lent, owned, works)
        for rank, owned in zip(plan.ranks, owned_by_part.T.tolist(), strict=True)
    ]
    for work, owned, pruned in zip(works, owned_by_part, zip(*pruned_by_rank, strict=True), strict=True):
        spared = [share + rank.lent for share, rank in zip(pruned, plan.ranks, strict=True)]
        shares = list(zip(owned.tolist(), spared, strict=True))
        executed = np.array([cost.executed_at(*of_rank) for of_rank in shares]) + extra
        gathers = np.array([share * cost.gather_fill_at(ratio) for share, ratio in shares])
        gemm_of_part_s = work * slowness * cluster.gemm_s * executed * noise[:, 1]
        gathers_of_part_s = work * gathers * noise[:, 2]
        rest_s = work * cluster.rest_s * (1.0 - cluster.moving_rest * (1.0 - owned))
        rest_s = rest_s * (slowness if cluster.slows_rest else 1.0) * noise[:, 0]
        part_s = rest_s + gemm_of_part_s + gathers_of_part_s
        gemm_s += gemm_of_part_s
        gather_fill_s += gathers_of_part_s
        busy_s += part_s
        ends_s += float(part_s.max())
    lent = [rank.lent * owned for rank, owned in zip(plan.ranks, holdings.owned, strict=True)]
    ends_s += cluster.migration.seconds(lent)
    borrowed = borrowed_shares(plan.loans, len(chi), holdings.owned)
    shares_of_step = [
        Workshares(rank.pruned, rank.lent, share, owned)
        for rank, share, owned in zip(plan.ranks, borrowed, holdings.owned, strict=True)
    ]
    seconds = (times.tolist() for times in (busy_s, gemm_s, gather_fill_s))
    return [
        StepTimes(busy, gemm, gathers, of_rank, wait_s=ends_s - busy)
        for busy, gemm, gathers, of_rank in zip(*seconds, shares_of_step, strict=True)
    ]


def _borrowed_time(loans: Sequence[Loan], owned: Sequence[float], cost: ResizingCost) -> Floats:
    """What every rank's borrowed products take, as shares of its work at even shares; those of each owner apart."""
    extra = np.zeros(len(owned))
    points = cost.borrowed_points if loans else ()
    times = [cost.borrowed_at(share) for share in points]
    for loan in loans:
        shares = loan.share * owned[loan.owner] * np.array(loan.parts)
        np.add.at(extra, list(loan.receivers), np.interp(shares, points, times))
    return extra
