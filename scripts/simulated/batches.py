"""What if: the very decisions of a DataBalancer, on ranks whose steps are numbers.

``N`` steps, ``R`` ranks. As in training, times are exchanged every ``update_every`` steps and known a step later, and a
change holds from the first step on that no loader has fetched, and two more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scripts.simulated.noise import Noise, NoiseSource
from zeroresize.policy.data.decision import DataDecision, RankWindow
from zeroresize.policy.data.division import Division, Floats
from zeroresize.policy.slowness.windows import WatchedStep, window_of

#: A change holds from so many steps behind those that are fetched on.
_MARGIN = 2


@dataclass(frozen=True)
class BatchCluster:
    """Describe ranks that train alike while nobody is slow: in an even division a step then takes a second.

    Attributes:
        num_ranks: R.
        global_batch: samples of a step.
        fixed_s: seconds of a step that no sample makes longer.
        optimizer_s: the part of ``fixed_s`` that is known, as it is the optimizer's.
        noise: of a rank's step.
        ahead: steps that loaders fetch ahead.
        change_s: seconds that a change takes in the step from which on it holds.
        seed: of the noise.
    """

    num_ranks: int = 4
    global_batch: int = 256
    fixed_s: float = 0.1
    optimizer_s: float = 0.02
    noise: Noise = field(default_factory=Noise)
    ahead: int = 4
    change_s: float = 0.0
    seed: int = 0

    def busy_s(self, counts: Sequence[int], chi: Floats) -> Floats:
        """Return [R] seconds of a step, without noise, of ranks that take χ [R] times as long."""
        sample_s = (1.0 - self.fixed_s) * self.num_ranks / self.global_batch
        return chi * (self.fixed_s + sample_s * np.array(counts))

    def best(self, chi: Floats) -> tuple[int, ...]:
        """Return [R] counts of which the step is shortest."""
        sample_s = (1.0 - self.fixed_s) * self.num_ranks / self.global_batch
        fixed_s, pace_s = (tuple((each * chi).tolist()) for each in (self.fixed_s, sample_s))
        return Division(fixed_s, pace_s, 0.0, (math.inf,) * self.num_ranks).counts(self.global_batch)


@dataclass(frozen=True)
class BatchTrace:
    """Hold what came of a simulated training: [N] seconds of steps, and of those of even batches; [N] counts."""

    step_s: Floats
    off_s: Floats
    counts: list[tuple[int, ...]]

    @property
    def per_off(self) -> float:
        """Mean step, as a ratio to that of even batches with the same noise."""
        return float(self.step_s.sum() / self.off_s.sum())

    @property
    def num_changes(self) -> int:
        """How often batches were divided otherwise."""
        return sum(before != after for before, after in zip(self.counts, self.counts[1:], strict=False))


def simulate_batches(cluster: BatchCluster, chis: NDArray[np.float64], *, update_every: int = 10) -> BatchTrace:
    """Train N steps with ranks that take χ [N, R] times as long."""
    even = Division.of_counts((1.0,) * cluster.num_ranks)
    decision, in_force, coming = DataDecision(even, cluster.global_batch), even, list[tuple[int, Division]]()
    noise, even_counts = NoiseSource(cluster.noise, cluster.num_ranks, cluster.seed), even.counts(cluster.global_batch)
    counts, read, posted = even_counts, list[Floats](), list[RankWindow]()
    trace = BatchTrace(np.zeros(len(chis)), np.zeros(len(chis)), [])
    for step, chi in enumerate(chis):
        change_s = 0.0
        if coming and coming[0][0] == step:
            in_force, read, change_s = coming.pop(0)[1], [], cluster.change_s
            counts = in_force.counts(cluster.global_batch)
        factors = noise.next_step()[:, 0]
        busy_s = cluster.busy_s(counts, chi) * factors + change_s
        read.append(busy_s)
        trace.step_s[step], trace.off_s[step] = busy_s.max(), (cluster.busy_s(even_counts, chi) * factors).max()
        trace.counts.append(counts)
        done = step + 1
        if posted:
            lag = cluster.ahead + _MARGIN
            if (proposal := decision.update(posted, lag)) is not None:
                decision.made(proposal, done + lag)
                coming.append((done + lag, proposal.division))
            posted = []
        if done % update_every == 0:
            for rank, count in enumerate(counts):
                steps = [WatchedStep(float(each[rank]), float(each.max() - each[rank]), work=count) for each in read]
                window = window_of(steps, done)
                excess_s = math.fsum(max(each.busy_s - window.busy_s, 0.0) for each in steps)
                posted.append(RankWindow(window, cluster.optimizer_s * float(chi[rank]), excess_s, math.nan))
            read = []
    return trace


def spells(num_steps: int, num_ranks: int, seed: int, least: int, exponent: float = 1.1) -> Floats:
    """χ [N, R] in spells of at least ``least`` steps, whose lengths have Pareto's distribution.

    In half of them a rank that is drawn takes 1 to 4 times as long; in the others nobody does.
    """
    drawn, chis = np.random.default_rng(seed), np.ones((num_steps, num_ranks))
    step = 0
    while step < num_steps:
        length = int(least * (1.0 + drawn.pareto(exponent)))
        if drawn.random() < 0.5:
            chis[step : step + length, drawn.integers(num_ranks)] = 1.0 + 3.0 * drawn.random()
        step += length
    return chis


def in_turn(num_steps: int, num_ranks: int, spell: int, chi: float = 4.0) -> Floats:
    """χ [N, R] where each rank is slow for so many steps, one after the other."""
    slow = np.arange(num_steps) // spell % num_ranks
    return np.where(slow[:, None] == np.arange(num_ranks), chi, 1.0)
