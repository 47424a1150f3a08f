"""How the controller meets stragglers that come, go, drift and are noisy: python -m scripts.bench.control

Simulated, with the policy code that training runs, for 2, 4 and 8 ranks, what is noisy with several seeds, of which the
worst settling and the largest swing are told. Under torchrun the same scenarios run for real, in a ViT under
Colossal-AI with sleeps after each multiplication:
torchrun --nproc-per-node 2 -m scripts.bench.control

Ranks that share a core slow each other, and where one sleeps its neighbour is fast. With ``--everyone 4`` all ranks
sleep three times as long as they multiply, so that four ranks keep no more than one core busy; χ comes on top of that.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

import zeroresize as zr
from scripts.bench.measured_cost import COST, REST_SHARE
from scripts.simulated.training import Cluster, settling, simulate


@dataclass(frozen=True)
class Scenario:
    """χ of every rank by update, and when γ should come to rest.

    Attributes:
        chi: (update, number of ranks) → χ of every rank.
        periods: (rank, first update, update after the last) within which χ is constant.
        noise: relative standard deviation of the ranks' times.
        updates: how long it lasts.
    """

    chi: Callable[[int, int], list[float]]
    periods: tuple[tuple[int, int, int], ...] = ()
    noise: float = 0.0
    updates: int = 24


def _last_rank(chi: float, num_ranks: int) -> list[float]:
    return [1.0] * (num_ranks - 1) + [chi]


def _constant(chi: float, noise: float = 0.0) -> Scenario:
    """Slow from update 4 on, recovered at update 16."""
    return Scenario(
        lambda update, ranks: _last_rank(chi if 4 <= update < 16 else 1.0, ranks),
        periods=((-1, 4, 16), (-1, 16, 24)),
        noise=noise,
    )


def _round_robin(chi: float, epoch: int = 8) -> Scenario:
    """The next rank each epoch of so many updates; watched are ranks 0 and 1 while slow and after."""
    return Scenario(
        lambda update, ranks: [chi if (update // epoch) % ranks == rank else 1.0 for rank in range(ranks)],
        periods=((0, 0, epoch), (0, epoch, 2 * epoch), (1, epoch, 2 * epoch)),
        updates=4 * epoch,
    )


def _sine(low: float, high: float, period: int = 32) -> Scenario:
    """χ of the last rank drifts between two values."""
    return Scenario(
        lambda update, ranks: _last_rank(
            (low + high) / 2 + (high - low) / 2 * math.sin(2 * math.pi * update / period), ranks
        ),
        updates=2 * period,
    )


#: Step times as ratios to a homogeneous step, and γ [updates][ranks].
Outcome = tuple[list[float], list[list[float]]]

SCENARIOS = {
    "χ=2": _constant(2.0),
    "χ=4": _constant(4.0),
    "χ=8": _constant(8.0),
    "χ=4, noise 10 %": _constant(4.0, noise=0.1),
    "nobody slow, noise 10 %": _constant(1.0, noise=0.1),
    "χ=4 round-robin": _round_robin(4.0),
    "χ=1…4 sine": _sine(1.0, 4.0),
}


def simulated(scenario: Scenario, num_ranks: int, config: zr.BalanceConfig, seed: int) -> Outcome:
    every = config.update_every
    cluster = Cluster(
        chi=lambda step: scenario.chi(step // every, num_ranks),
        rest_s=REST_SHARE,
        gemm_s=1.0 - REST_SHARE,
        cost=COST,
        noise=scenario.noise,
        seed=seed,
    )
    result = simulate(config, cluster, scenario.updates * every)
    return [seconds / cluster.homogeneous_s for seconds in result.step_s], result.ratios


def row(
    name: str,
    scenario: Scenario,
    num_ranks: int,
    outcomes: Sequence[Outcome],
    baseline: Sequence[float],
) -> list[str]:
    """One line of the table; ``baseline`` are the step times without balancing, as ratios too."""
    settled, swings = [], []
    for rank, change, until in scenario.periods:
        traces = [[update[rank % num_ranks] for update in ratios] for _, ratios in outcomes]
        updates, swing = (max(values) for values in zip(*(settling(own, change, until) for own in traces), strict=True))
        settled.append(updates)
        swings.append(swing)
    most = max(gamma for _, ratios in outcomes for update in ratios for gamma in update)
    step_ratios = [ratio for steps, _ in outcomes for ratio in steps]
    return [
        name,
        str(num_ranks),
        f"{statistics.mean(step_ratios):.3f}",
        f"{statistics.mean(baseline):.3f}",
        ", ".join(map(str, settled)) or "-",
        f"{max(swings):.3f}" if swings else "-",
        f"{most:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="of the simulation")
    parser.add_argument("--seeds", type=int, default=12, help="of simulated noise")
    parser.add_argument("--update-every", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=384, help="of the real ViT")
    parser.add_argument("--everyone", type=float, default=1.0, help="what every real rank's χ is multiplied by")
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    arguments = parser.parse_args()
    config = zr.BalanceConfig(mode="zero-rd", update_every=arguments.update_every)
    table = Table("scenario", "ranks", "mean step / homogeneous", "Baseline", "settled after", "swing", "most γ")
    scenarios = {name: SCENARIOS[name] for name in arguments.only}
    if "RANK" in os.environ:
        from scripts.bench.control_ranks import measured

        for name, scenario in scenarios.items():
            outcome = measured(
                scenario.chi, scenario.updates, scenario.noise, config, arguments.hidden, arguments.everyone
            )
            outcomes = [(outcome.step_ratios, outcome.ratios)]
            table.add_row(*row(name, scenario, int(os.environ["WORLD_SIZE"]), outcomes, outcome.baseline_ratios))
            if os.environ["RANK"] == "0":
                for what, traces in (("γ", outcome.ratios), ("χ by the machine itself", outcome.machine_chi)):
                    for rank, trace in enumerate(zip(*traces, strict=True)):
                        values = " ".join(f"{value:.2f}" for value in trace)
                        print(f"{name}: {what}, of rank {rank}, after every update: {values}")
        if os.environ["RANK"] != "0":
            return
    else:
        for name, scenario in scenarios.items():
            for num_ranks in arguments.ranks:
                seeds = range(arguments.seeds if scenario.noise else 1)
                off = config.replace(mode="off")
                baseline = [ratio for seed in seeds for ratio in simulated(scenario, num_ranks, off, seed)[0]]
                outcomes = [simulated(scenario, num_ranks, config, seed) for seed in seeds]
                table.add_row(*row(name, scenario, num_ranks, outcomes, baseline))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
