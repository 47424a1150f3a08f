"""What if: the very policy code of training, run against a model of a cluster instead of a cluster.

Measurements reach the controller as they do in training: medians of an interval's steps, one update late, rescaled to
full work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from scripts.simulated.cluster import Cluster, Holdings, step_times
from scripts.simulated.noise import NoiseSource
from zeroresize.config import BalanceConfig
from zeroresize.plan.group import RankPlan, WorkloadPlan
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.estimator import RankEstimator
from zeroresize.policy.tensor.estimation.times import RankTimes, StepTimes


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
    believed_move: MoveCost | None = None,
    learns_moves: bool = True,
    divisions: Mapping[int, Sequence[float]] | None = None,
) -> Simulation:
    """Train ``num_steps`` steps.

    Args:
        believed_cost, believed_move: what the calibrations measured, where it differs from the cluster's own.
        learns_moves: whether the controller is told what moves take.
        divisions: shares by which a user divides the units before a step, by step; decisions go on from there.
    """
    believed = believed_cost or cluster.cost
    num_ranks = len(cluster.chi(0))
    noise = NoiseSource(cluster.noise_kind, num_ranks, cluster.seed)
    controller = Controller(config, num_ranks, cluster.segments)
    controller.expect_moves(believed_move or cluster.move, cluster.bytes_of_units)
    plan = controller.initial_plan()
    holdings = Holdings(cluster, num_ranks)
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
        in_force = controller.whole_plan(plan.owned) if calibrates else plan
        if num_bytes := holdings.take(in_force.owned):
            moves.append((step, num_bytes, cluster.move.seconds(num_bytes)))
            if learns_moves:
                controller.ownership.learn(*moves[-1][1:])
            _compare(cluster, cluster.chi(max(step - 1, 0)), holdings, estimates, comparisons)
        times = step_times(cluster, cluster.chi(step), in_force, holdings, noise.next_step())
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
            received = samples, CollectiveTimes(wait_s, lent_then, cluster.migration)
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
    plan, holdings = WorkloadPlan((RankPlan(),) * num_ranks), Holdings(cluster, num_ranks)
    every_step = (
        step_times(cluster, cluster.chi(step), plan, holdings, noise.next_step()) for step in range(num_steps)
    )
    return [max(rank.busy_s + rank.wait_s for rank in times) for times in every_step]


def _compare(
    cluster: Cluster,
    chi: Sequence[float],
    holdings: Holdings,
    estimates: Sequence[RankEstimator],
    error: Callable[[], float],
) -> None:
    """Every rank times its products after a move."""
    for estimate, own_chi, owned in zip(estimates, chi, holdings.owned, strict=True):
        if owned > 0.0:
            estimate.compare(owned, cluster.cost.executed_at(owned) * error())
        else:
            estimate.learn_reference(cluster.gemm_s * own_chi * error(), 0.0)
