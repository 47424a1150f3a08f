"""Scenarios of a simulated cluster: who is slow when, with what noise, and how wrong a calibration is.

All times are shares of a homogeneous step: 92 % of it multiplies, and pruning costs what a ViT of hidden 768 measured.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from scripts.simulated.cluster import Cluster
from scripts.simulated.figures import Figures, figures
from scripts.simulated.noise import Noise
from scripts.simulated.training import Simulation, simulate, unbalanced_step_s
from zeroresize.config import BalanceConfig
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost, spread_ratios

#: Of a ViT of hidden 768 on a CPU, as measured: the share of a step outside the multiplications; what pruning leaves of
#: these, and shares of a step that gathers and fills take.
REST_SHARE = 0.08
COST = ResizingCost(spread_ratios(0.9), (1.0, 0.85, 0.68, 0.51, 0.33, 0.14), (0.0, 0.03, 0.03, 0.027, 0.022, 0.018))
#: What lending costs where nothing else is said: so little that it is nearly always worth it while a straggler lasts.
MIGRATION = MigrationCost(0.002, 0.01)
#: A tenth of a step is 100 ms: a burst of a second.
_BURST_STEPS = 10


@dataclass(frozen=True)
class Course:
    """Who is slow when.

    Attributes:
        chi: (update, number of ranks) → χ of every rank.
        num_updates: how long it lasts.
    """

    chi: Callable[[int, int], list[float]]
    num_updates: int


def _last(chi: Callable[[int], float]) -> Callable[[int, int], list[float]]:
    return lambda update, num_ranks: [1.0] * (num_ranks - 1) + [chi(update)]


def _for_a_while(chi: float) -> Course:
    return Course(_last(lambda update: chi if 4 <= update < 16 else 1.0), 40)


def _in_turn(chi: float, num_updates: int) -> Course:
    def of_ranks(update: int, num_ranks: int) -> list[float]:
        return [chi if update // num_updates % num_ranks == rank else 1.0 for rank in range(num_ranks)]

    return Course(of_ranks, 48)


def _on_and_off(chi: float, on: int, off: int) -> Course:
    return Course(_last(lambda update: chi if update % (on + off) < on else 1.0), 48)


_STEPS = (1.0, 2.0, 4.0, 2.0, 1.0)

COURSES = {
    "nobody slow": Course(_last(lambda _: 1.0), 48),
    **{f"χ={chi:g}": _for_a_while(chi) for chi in (1.3, 2.0, 2.5, 4.0, 8.0)},
    "χ=1,2,4,2,1": Course(_last(lambda update: _STEPS[update // 8]), 40),
    "χ=1…4 sine": Course(_last(lambda update: 2.5 - 1.5 * math.cos(2 * math.pi * update / 24)), 48),
    "each in turn, 8 updates": _in_turn(4.0, 8),
    "each in turn, 1 update": _in_turn(4.0, 1),
    "2 updates on, 2 off": _on_and_off(4.0, 2, 2),
    "1 update on, 3 off": _on_and_off(4.0, 1, 3),
}

#: Kind of noise → noise whose normal part has this relative standard deviation.
NOISES: dict[str, Callable[[float], Noise]] = {
    "white": Noise,
    "correlated": lambda deviation: Noise(deviation, correlation=0.9),
    "hiccups": lambda deviation: Noise(deviation, burst_rate=0.02, burst_steps=1, burst_factors=(1.5, 4.0)),
    "bursts": lambda deviation: Noise(deviation, burst_rate=0.002, burst_steps=_BURST_STEPS),
    "bursts of 4 ranks": lambda deviation: Noise(
        deviation, burst_rate=0.002, burst_steps=_BURST_STEPS, ranks_per_machine=4
    ),
}

#: How a calibration can be wrong by a factor → (share of multiplications at γ, factor) → what it took it for: above 1
#: for less than it is, so that one believes that pruning saves more than it does, below 1 for more.
CALIBRATIONS: dict[str, Callable[[float, float], float]] = {
    "share": lambda share, factor: share / factor,
    "savings": lambda share, factor: 1.0 - (1.0 - share) * factor,
    "power": lambda share, factor: share**factor,
}
_LEAST_SHARE = 0.02


def believed_cost(truth: ResizingCost, calibration: str, factor: float) -> ResizingCost:
    """What a calibration found that was wrong by ``factor``; 1 is right, above 1 it promises too much."""
    wrong = CALIBRATIONS[calibration]
    shares = (max(wrong(share, factor), _LEAST_SHARE) for share in truth.gemm_share[1:])
    return ResizingCost(truth.ratios, (1.0, *shares), truth.gather_fill_s)


@dataclass(frozen=True)
class Scenario:
    """One line of the table, but for how it is balanced.

    Attributes:
        course: one of :data:`COURSES`.
        num_ranks: size of the group.
        update_every: steps between two updates.
        noise: one of :data:`NOISES`.
        deviation: relative standard deviation of its normal part.
        calibration: one of :data:`CALIBRATIONS`.
        factor: by which the calibration is wrong.
        rest_share: of a homogeneous step, what is no product.
        migration: what lending costs in communication.
    """

    course: str = "χ=4"
    num_ranks: int = 8
    update_every: int = 10
    noise: str = "white"
    deviation: float = 0.02
    calibration: str = "share"
    factor: float = 1.0
    rest_share: float = REST_SHARE
    migration: MigrationCost = MIGRATION

    @property
    def num_steps(self) -> int:
        """Steps of one run."""
        return COURSES[self.course].num_updates * self.update_every

    def cluster(self, seed: int = 0) -> Cluster:
        """Build the simulated cluster, whose noise is drawn by ``seed``."""
        course, every = COURSES[self.course], self.update_every
        gemm_s = 1.0 - self.rest_share
        gather_fill_s = tuple(seconds * gemm_s / (1.0 - REST_SHARE) for seconds in COST.gather_fill_s)
        return Cluster(
            chi=lambda step: course.chi(step // every, self.num_ranks),
            rest_s=self.rest_share,
            gemm_s=gemm_s,
            cost=ResizingCost(COST.ratios, COST.gemm_share, gather_fill_s),
            migration=self.migration,
            noise=NOISES[self.noise](self.deviation),
            seed=seed,
        )

    def simulate(self, config: BalanceConfig, seed: int = 0) -> Simulation:
        """Simulate one run; ``update_every`` of ``config`` is replaced by the scenario's."""
        cluster = self.cluster(seed)
        believed = believed_cost(cluster.cost, self.calibration, self.factor)
        return simulate(config.replace(update_every=self.update_every), cluster, self.num_steps, believed_cost=believed)

    def figures(self, config: BalanceConfig, seed: int = 0) -> Figures:
        """Simulate one run and return its figures."""
        course = COURSES[self.course]
        chis = [course.chi(update, self.num_ranks) for update in range(course.num_updates)]
        return figures(self.simulate(config, seed), chis, _step_s_off(self, seed))


@functools.lru_cache(maxsize=1024)
def _step_s_off(scenario: Scenario, seed: int) -> float:
    """Mean seconds of a step with balancing off and the same noise."""
    return statistics.fmean(unbalanced_step_s(scenario.cluster(seed), scenario.num_steps))
