"""What if: the very policy code of training, run against a model of a cluster instead of a cluster.

A rank's step is ``rest_s`` seconds that pruning does not touch and χ · ``gemm_s`` seconds of multiplications; all ranks
wait for the slowest, and for what migrates; where units are away from home they do so in every segment. Measurements
reach the controller as they do in training: medians of an interval's steps, one update late, rescaled to full work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scripts.simulated.noise import Noise, NoiseSource
from zeroresize.config import BalanceConfig
from zeroresize.plan.group import Loan, RankPlan, Shares, WorkloadPlan
from zeroresize.plan.ownership import SegmentWork, owned_shares, unit_counts
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.estimator import RankEstimator
from zeroresize.policy.tensor.estimation.times import RankTimes, StepTimes
from zeroresize.policy.tensor.rules.sharing import borrowed_shares, pruned_by_segment

#: The update after a change of speed from which on a rank's γ is to be steady.
_STEADY_FROM = 3
#: χ of every rank in a step.
Speeds = Callable[[int], Sequence[float]]


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
    def homogeneous_s(self) -> float:
        """Return the seconds of a step without stragglers or noise."""
        return self.rest_s + self.gemm_s

    @property
    def noise_kind(self) -> Noise:
        """Return the noise, also where a number gives it."""
        return self.noise if isinstance(self.noise, Noise) else Noise(self.noise)


@dataclass(frozen=True)
class Simulation:
    """Hold what happened in a simulated training.

    Attributes:
        step_s: seconds of every step, that is of its slowest rank, and of the move that comes before it.
        ratios: [updates][ranks] γ in force after every update: what a rank prunes.
        lent: [updates][ranks] what it lends.
        pruned_share, lent_share: mean over all steps and ranks of the share of products that was dropped, and handed
            over.
        owned: [updates][ranks] what it is to own.
        moves: (step before which it happens, bytes, seconds) of every move.
    """

    step_s: list[float]
    ratios: list[list[float]]
    lent: list[list[float]]
    pruned_share: float
    lent_share: float
    owned: list[tuple[float, ...]] = field(default_factory=list)
    moves: list[tuple[int, float, float]] = field(default_factory=list)

    @property
    def move_s(self) -> float:
        """Return the seconds of all moves."""
        return math.fsum(seconds for *_, seconds in self.moves)


def simulate(
    config: BalanceConfig,
    cluster: Cluster,
    num_steps: int,
    *,
    believed_cost: ResizingCost | None = None,
    believed_migration: MigrationCost | None = None,
    believed_move: MoveCost | None = None,
    learns_moves: bool = True,
    divisions: Mapping[int, Sequence[float]] | None = None,
) -> Simulation:
    """Train ``num_steps`` steps.

    Args:
        believed_cost, believed_migration, believed_move: what the calibrations measured, where it differs from the
            cluster's own.
        learns_moves: whether the controller is told what moves take.
        divisions: shares by which a user divides the units before a step, by step; decisions go on from there.
    """
    believed = believed_cost or cluster.cost
    calibrated = believed_migration or cluster.migration
    num_ranks = len(cluster.chi(0))
    noise = NoiseSource(cluster.noise_kind, num_ranks, cluster.seed)
    controller = Controller(config, num_ranks, cluster.segments)
    controller.expect_moves(believed_move or cluster.move, cluster.bytes_of_units)
    plan = controller.initial_plan()
    holdings = _Holdings(cluster, num_ranks)
    moves: list[tuple[int, float, float]] = []
    owned: list[tuple[float, ...]] = []
    estimates = [RankEstimator(believed) for _ in range(num_ranks)]
    generator = np.random.default_rng((cluster.seed, 2))

    def comparisons() -> float:
        """How many times as long as it should a comparison takes."""
        return math.exp(cluster.comparison_error * generator.standard_normal())

    for estimate, own_chi in zip(estimates, cluster.chi(0), strict=True):
        estimate.learn_reference(cluster.gemm_s * own_chi * comparisons(), 1.0)
    interval: list[list[StepTimes]] = []
    unread: list[list[StepTimes]] = []
    received: tuple[list[RankTimes], CollectiveTimes] | None = None
    step_s, ratios, lent = [], [], []
    pruned_share = lent_share = 0.0
    for step in range(num_steps):
        if divisions and step in divisions:
            controller.hold_owned(divisions[step])
            plan = controller.hold_owned(None)
        calibrates = step % config.update_every < controller.num_calibration_steps
        in_force = controller.calibration_plan if calibrates else plan
        if num_bytes := holdings.take(in_force.owned):
            moves.append((step, num_bytes, cluster.move.seconds(num_bytes)))
            if learns_moves:
                controller.ownership.learn(*moves[-1][1:])
            _compare(cluster, cluster.chi(max(step - 1, 0)), holdings, estimates, comparisons)
        times = _step(cluster, cluster.chi(step), in_force, holdings, noise.next_step())
        unread.append(times)
        interval += unread[:-1] if cluster.reads_late else unread
        unread = unread[-1:] if cluster.reads_late else []
        step_s.append(max(rank.busy_s + rank.wait_s for rank in times))
        of_ranks = list(zip(in_force.ranks, holdings.owned, strict=True))
        pruned_share += sum(rank.pruned * share for rank, share in of_ranks) / num_ranks / num_steps
        lent_share += sum(rank.lent * share for rank, share in of_ranks) / num_ranks / num_steps
        if (step + 1) % config.update_every:
            continue
        for rank, estimate in enumerate(estimates):
            if holdings.owned[rank] == 0.0:
                estimate.learn_reference(cluster.gemm_s * cluster.chi(step)[rank] * comparisons(), 0.0)
            estimate.learn([times[rank] for times in interval])
        interval = []
        measured_under = in_force
        if received is not None:
            plan = controller.update(*received)
        usual = [estimate.usual_step for estimate in estimates if estimate.usual_step is not None]
        if usual:
            samples = [estimate.times for estimate in estimates if estimate.times is not None]
            are_of_plan = all(own.shares == last.shares for own, last in zip(usual, times, strict=True))
            wait_s = min(own.wait_s for own in usual) if are_of_plan else math.nan
            ranks = measured_under.ranks
            lent_then = tuple(rank.lent * share for rank, share in zip(ranks, holdings.owned, strict=True))
            received = samples, CollectiveTimes(wait_s, lent_then, calibrated)
        ratios.append([rank.pruned for rank in plan.ranks])
        lent.append([rank.lent for rank in plan.ranks])
        owned.append(plan.owned)
    for step, _, seconds in moves:
        step_s[step] += seconds
    return Simulation(step_s, ratios, lent, pruned_share, lent_share, owned, moves)


def unbalanced_step_s(cluster: Cluster, num_steps: int) -> list[float]:
    """Return the seconds of the steps of :func:`simulate` in mode "off", where nobody has anything to decide."""
    num_ranks = len(cluster.chi(0))
    noise = NoiseSource(cluster.noise_kind, num_ranks, cluster.seed)
    plan, holdings = WorkloadPlan((RankPlan(),) * num_ranks), _Holdings(cluster, num_ranks)
    every_step = (_step(cluster, cluster.chi(step), plan, holdings, noise.next_step()) for step in range(num_steps))
    return [max(rank.busy_s + rank.wait_s for rank in times) for times in every_step]


class _Holdings:
    """Who owns how many units of each segment of a cluster.

    Attributes:
        owned: what every rank owns, in units of a rank's products at even shares.
        by_segment: [segments][ranks] the same of every segment's own work, and last of what lies in none.
        work: of these.
    """

    def __init__(self, cluster: Cluster, num_ranks: int) -> None:
        self._segments, self._bytes_of_units = cluster.segments, cluster.bytes_of_units
        self._wanted = self.owned = (1.0,) * num_ranks
        self.work = [segment.work for segment in cluster.segments]
        self._moving_work = math.fsum(self.work)
        self.work.append(1.0 - self._moving_work)
        self.by_segment = np.ones((len(self.work), num_ranks))

    @property
    def is_home(self) -> bool:
        return bool((self.by_segment == 1.0).all())

    def take(self, wanted: tuple[float, ...]) -> float:
        """Move units so that ranks own what is wanted. How many bytes the rank sends or receives that does most."""
        if wanted == self._wanted:
            return 0.0
        before, self._wanted, self.owned = self.owned, wanted, owned_shares(wanted, self._segments)
        for shares, segment in zip(self.by_segment, self._segments, strict=False):
            shares[:] = np.array(unit_counts(wanted, segment)) * (len(wanted) / segment.num_units)
        most = max(abs(after - owned) for owned, after in zip(before, self.owned, strict=True))
        return most / self._moving_work * self._bytes_of_units


def _step(
    cluster: Cluster, chi: Sequence[float], plan: WorkloadPlan, holdings: _Holdings, noise: NDArray[np.float64]
) -> list[StepTimes]:
    """Every rank's times of one step; all of them end when the slowest has finished and all has been sent."""
    if not holdings.is_home:
        return _step_away(cluster, chi, plan, holdings, noise)
    borrowed = borrowed_shares(plan.loans, len(chi))
    borrowed_time = _borrowed_time(plan.loans, len(chi), cluster.cost)
    executed = []  # by every rank: seconds in all, multiplying and gathering, and what it did
    every_rank = zip(chi, plan.ranks, borrowed, borrowed_time.tolist(), noise.tolist(), strict=True)
    for own_chi, rank, share, extra, own_noise in every_rank:
        shares = Shares(rank.pruned, rank.lent, share)
        gemm_s = own_chi * cluster.gemm_s * (cluster.cost.gemm_share_at(shares.spared) + extra) * own_noise[1]
        gather_fill_s = cluster.cost.gather_fill_at(shares.spared) * own_noise[2]
        rest_s = cluster.rest_s * (own_chi if cluster.slows_rest else 1.0) * own_noise[0]
        executed.append((rest_s + gemm_s + gather_fill_s, gemm_s, gather_fill_s, shares))
    sent_s = cluster.migration.seconds([rank.lent for rank in plan.ranks])
    ends_s = max(busy_s for busy_s, *_ in executed) + sent_s
    return [StepTimes(*times, wait_s=ends_s - times[0]) for times in executed]


def _step_away(
    cluster: Cluster, chi: Sequence[float], plan: WorkloadPlan, holdings: _Holdings, noise: NDArray[np.float64]
) -> list[StepTimes]:
    """The same where units are away from home: ranks meet after every segment."""
    busy_s, gemm_s, gather_fill_s = np.zeros(len(chi)), np.zeros(len(chi)), np.zeros(len(chi))
    cost, ends_s = cluster.cost, 0.0
    pruned_RS = [
        pruned_by_segment(rank.pruned, rank.lent, owned, holdings.work)
        for rank, owned in zip(plan.ranks, holdings.by_segment.T.tolist(), strict=True)
    ]
    borrowed = borrowed_shares(plan.loans, len(chi), holdings.owned)
    extra = np.array([cost.borrowed_at(share) if share else 0.0 for share in borrowed])
    for work, owned, pruned in zip(holdings.work, holdings.by_segment, zip(*pruned_RS, strict=True), strict=True):
        spared = [share + rank.lent for share, rank in zip(pruned, plan.ranks, strict=True)]
        shares = list(zip(owned.tolist(), spared, strict=True))
        executed = np.array([cost.executed_at(*of_rank) for of_rank in shares]) + extra
        own_gemm_s = work * np.array(chi) * cluster.gemm_s * executed * noise[:, 1]
        rest_s = work * cluster.rest_s * (1.0 - cluster.moving_rest * (1.0 - owned)) * noise[:, 0]
        if cluster.slows_rest:
            rest_s = rest_s * np.array(chi)
        gathers_s = work * np.array([share * cost.gather_fill_at(ratio) for share, ratio in shares]) * noise[:, 2]
        gemm_s += own_gemm_s
        gather_fill_s += gathers_s
        busy_s += rest_s + own_gemm_s + gathers_s
        ends_s += float((rest_s + own_gemm_s + gathers_s).max())
    ends_s += cluster.migration.seconds([rank.lent * own for rank, own in zip(plan.ranks, holdings.owned, strict=True)])
    every_rank = zip(plan.ranks, borrowed, holdings.owned, strict=True)
    shares_of_step = [Shares(rank.pruned, rank.lent, share, owned) for rank, share, owned in every_rank]
    return [
        StepTimes(busy, gemm, gathers, shares, wait_s=ends_s - busy)
        for busy, gemm, gathers, shares in zip(
            busy_s.tolist(), gemm_s.tolist(), gather_fill_s.tolist(), shares_of_step, strict=True
        )
    ]


def _compare(
    cluster: Cluster,
    chi: Sequence[float],
    holdings: _Holdings,
    estimates: Sequence[RankEstimator],
    error: Callable[[], float],
) -> None:
    """Every rank times its products after a move."""
    for estimate, own_chi, owned in zip(estimates, chi, holdings.owned, strict=True):
        if owned > 0.0:
            estimate.compare(owned, cluster.cost.executed_at(owned) * error())
        else:
            estimate.learn_reference(cluster.gemm_s * own_chi * error(), 0.0)


def _borrowed_time(loans: Sequence[Loan], num_ranks: int, cost: ResizingCost) -> NDArray[np.float64]:
    """What every rank's borrowed products take, as shares of its own at full work; each owner's are one of its own."""
    if not loans:
        return np.zeros(num_ranks)
    shares = cost.borrowed_points
    times = [cost.borrowed_at(share) for share in shares]
    extra = np.zeros(num_ranks)
    for loan in loans:
        np.add.at(extra, list(loan.receivers), np.interp(loan.share * np.array(loan.parts), shares, times))
    return extra


def settling(ratios: Sequence[float], change: int, until: int, band: float = 0.05) -> tuple[int, float]:
    """Return how a rank's γ met a change of speed.

    Args:
        ratios: γ after every update, from 0.
        change: the first update whose interval was measured at the new speed.
        until: the update before which the speed changes again.
        band: how far from its mean γ may be in the steady state.

    Returns:
        After how many updates γ stays within ``band`` of its final mean (of the period's second half), and its largest
        distance from that from the third update on, by which it is to have settled.
    """
    period = np.asarray(ratios[change:until])
    final = period[len(period) // 2 :].mean()
    outside = np.flatnonzero(np.abs(period - final) > band)
    settled = int(outside[-1]) + 1 if len(outside) else 0
    return settled + 1, float(np.abs(period[_STEADY_FROM - 1 :] - final).max(initial=0.0))
