"""What if: the very policy code of training, run against a model of a cluster instead of a cluster.

A rank's step is ``rest_s`` seconds that pruning does not touch and χ · ``gemm_s`` seconds of multiplications; all ranks
wait for the slowest. Measurements reach the controller as they do in training: medians of an interval's steps, one
update late, rescaled to full work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.config import BalanceConfig
from zeroresize.policy.controller import Controller
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.estimate import FullWorkEstimate, StepTimes
from zeroresize.policy.ratio import RankTimes

#: χ of every rank in a step.
Speeds = Callable[[int], Sequence[float]]


@dataclass(frozen=True)
class Cluster:
    """Ranks that are equal but for their χ.

    Attributes:
        chi: χ of every rank, by step from 0.
        rest_s: seconds of a step outside the balanced layers' multiplications.
        gemm_s: seconds of them at χ = 1.
        cost: what pruning really costs; what the controller is told, unless :func:`simulate` is given another.
        reads_late: whether a step is read only when the next one is over, as on a device.
        noise: relative standard deviation of each rank's times from step to step.
        seed: of the noise.
    """

    chi: Speeds
    rest_s: float
    gemm_s: float
    cost: ResizingCost
    reads_late: bool = False
    noise: float = 0.0
    seed: int = 0

    @property
    def homogeneous_s(self) -> float:
        """A step without stragglers or noise, seconds."""
        return self.rest_s + self.gemm_s


@dataclass(frozen=True)
class Simulation:
    """What happened.

    Attributes:
        step_s: seconds of every step, that is of its slowest rank.
        ratios: [updates][ranks] γ in force after every update.
        pruned_share: mean over all steps and ranks of the share of products that was dropped.
    """

    step_s: list[float]
    ratios: list[list[float]]
    pruned_share: float


def simulate(
    config: BalanceConfig, cluster: Cluster, num_steps: int, *, believed_cost: ResizingCost | None = None
) -> Simulation:
    """Train ``num_steps`` steps.

    Args:
        believed_cost: what the pre-test measured, where it differs from the cluster's own.
    """
    believed = believed_cost or cluster.cost
    num_ranks = len(cluster.chi(0))
    generator = np.random.default_rng(cluster.seed)
    controller = Controller(config, num_ranks)
    plan = controller.initial_plan()
    estimates = [FullWorkEstimate(believed) for _ in range(num_ranks)]
    interval: list[list[StepTimes]] = []
    unread: list[list[StepTimes]] = []
    received: list[RankTimes] | None = None
    step_s, trace, pruned = [], [], 0.0
    for step in range(num_steps):
        noise = np.maximum(1.0 + cluster.noise * generator.standard_normal((num_ranks, 3)), 0.1)
        is_full = plan.begins_at_full_work and step % config.update_every == 0
        ratios = [0.0 if is_full else rank.ratio for rank in plan.ranks]
        times = [
            _step_of_rank(cluster, chi, ratio, own_noise)
            for chi, ratio, own_noise in zip(cluster.chi(step), ratios, noise, strict=True)
        ]
        unread.append(times)
        interval += unread[:-1] if cluster.reads_late else unread
        unread = unread[-1:] if cluster.reads_late else []
        step_s.append(max(rank.busy_s for rank in times))
        pruned += sum(ratios) / num_ranks
        if (step + 1) % config.update_every:
            continue
        for rank, estimate in enumerate(estimates):
            estimate.learn([times[rank] for times in interval])
        interval = []
        if received is not None:
            plan = controller.update(received)
        received = [estimate.times for estimate in estimates if estimate.times is not None]
        trace.append([rank.ratio for rank in plan.ranks])
    return Simulation(step_s, trace, pruned / num_steps)


def _step_of_rank(cluster: Cluster, chi: float, ratio: float, noise: Sequence[float]) -> StepTimes:
    rest_s = cluster.rest_s * float(noise[0])
    gemm_s = chi * cluster.gemm_s * cluster.cost.gemm_share_at(ratio) * float(noise[1])
    overhead_s = cluster.cost.overhead_at(ratio) * float(noise[2])
    return StepTimes(rest_s + gemm_s + overhead_s, gemm_s, overhead_s, spared_share=ratio)


def settling(ratios: Sequence[float], change: int, until: int, band: float = 0.05) -> tuple[int, float]:
    """How a rank's γ met a change of speed.

    Args:
        ratios: γ after every update, from 0.
        change: the first update whose interval was measured at the new speed.
        until: the update before which the speed changes again.
        band: how far from its mean γ may be in the steady state.

    Returns:
        So many updates after the change γ is within ``band`` of its final mean (of the period's second half) for good,
        and how far it is from it at most from then on.
    """
    period = np.asarray(ratios[change:until])
    final = period[len(period) // 2 :].mean()
    outside = np.flatnonzero(np.abs(period - final) > band)
    settled = int(outside[-1]) + 1 if len(outside) else 0
    return settled + 1, float(np.abs(period[settled:] - final).max(initial=0.0))
