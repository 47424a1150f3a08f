"""Balancers of pipelines against the exact optimum, and their time to decide: python -m scripts.bench.partitions

No training and no processes. Random pipelines of 8 to 96 layers over 2 to 64 stages: costs of layers are lognormal,
uniform or of two kinds (such as frozen and not), with every tenth layer a large one in a third of the cases; speeds of
devices are equal, of two kinds, or all different. Parameters tell times up to a factor that is lognormal. A case's
ratio is the slowest stage's time to that of the optimum, which dynamic programming finds. All but the uniform split
know the devices' speeds; diffusion starts from it. Means are told by kind of devices, too, and for pipelines with at
least three layers a stage.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.bench.common import save
from scripts.simulated.diffusion import Diffusion, diffused_partition
from scripts.simulated.dynamic_programming import dynamic_programming_partition
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.pipeline_load import Floats, PipelineLoad

#: The standard deviation of log (time / parameters).
PARAMETER_NOISE = 0.35
#: Dynamic programming takes L² S operations: not tried beyond.
MOST_OPERATIONS = 2e8
SPEEDS = ("equal", "two kinds", "different")


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline: its layers by time and by parameters, on the same devices."""

    by_time: PipelineLoad
    by_parameters: PipelineLoad
    speeds: str

    @property
    def uniform(self) -> Partition:
        return Partition.uniform(self.by_time.num_layers, self.by_time.num_stages)


def costs_of(num_layers: int, generator: np.random.Generator) -> Floats:
    """Seconds of layers."""
    kind = generator.integers(3)
    if kind == 0:
        costs = generator.lognormal(0.0, generator.uniform(0.2, 1.2), num_layers)
    elif kind == 1:
        costs = generator.uniform(0.2, 1.0, num_layers)
    else:
        costs = np.where(generator.random(num_layers) < generator.uniform(0.2, 0.8), 1.0, 0.3)
        costs = costs * generator.lognormal(0.0, 0.05, num_layers)
    if generator.random() < 1 / 3:
        costs = costs * np.where(np.arange(num_layers) % 10 == generator.integers(10), 4.0, 1.0)
    return costs


def random_case(num_layers: int, num_stages: int, generator: np.random.Generator, speeds: str) -> Case:
    costs = costs_of(num_layers, generator)
    of_devices = {
        "equal": np.ones(num_stages),
        "two kinds": np.where(generator.random(num_stages) < 0.25, 0.5, 1.0),
        "different": generator.uniform(0.5, 1.5, num_stages),
    }[speeds]
    parameters = costs / generator.lognormal(0.0, PARAMETER_NOISE, num_layers)
    loads = (PipelineLoad.of(own, num_stages, speeds=of_devices) for own in (costs, parameters))
    return Case(*loads, speeds)


def diffused(load: PipelineLoad, case: Case) -> Diffusion:
    return diffused_partition(load, case.uniform)


BALANCERS: dict[str, Callable[[Case], Partition]] = {
    "partition by time": lambda case: balanced_partition(case.by_time),
    "partition by parameters": lambda case: balanced_partition(case.by_parameters),
    "diffusion by time": lambda case: diffused(case.by_time, case).partition,
    "diffusion by parameters": lambda case: diffused(case.by_parameters, case).partition,
    "uniform": lambda case: case.uniform,
}


def compared(num_cases: int) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Ratios of every balancer, for all cases and by the kind of devices; and rounds of diffusion by time."""
    generator = np.random.default_rng(0)
    ratios: dict[str, list[float]] = {name: [] for name in BALANCERS}
    kinds, rounds, are_roomy = [], [], []
    for number in range(num_cases):
        num_layers = int(generator.integers(8, 97))
        num_stages = int(generator.integers(2, min(num_layers, 64) + 1))
        case = random_case(num_layers, num_stages, generator, SPEEDS[number % len(SPEEDS)])
        best = case.by_time.slowest(dynamic_programming_partition(case.by_time))
        for name, balancer in BALANCERS.items():
            ratios[name].append(case.by_time.slowest(balancer(case)) / best)
        kinds.append(case.speeds)
        are_roomy.append(num_layers >= 3 * num_stages)
        rounds.append(diffused(case.by_time, case).num_rounds)
    table = {}
    for name, ratios_of_method in ratios.items():
        values, of_kind = np.array(ratios_of_method), np.array(kinds)
        table[name] = {
            "mean": float(values.mean()),
            "median": float(np.median(values)),
            "worst": float(values.max()),
            "optimal": float((values < 1.0 + 1e-9).mean()),
            **{kind: float(values[of_kind == kind].mean()) for kind in SPEEDS},
            "3 layers a stage": float(values[are_roomy].mean()),
        }
    return table, {"mean": float(np.mean(rounds)), "most": float(np.max(rounds))}


def seconds_to_decide(num_layers: int, num_stages: int, repeats: int) -> dict[str, float]:
    """The least CPU seconds of some decisions, for equal and for different devices, whichever takes longer."""
    cpu_s: dict[str, float] = {}
    for speeds in ("equal", "different"):
        case = random_case(num_layers, num_stages, np.random.default_rng(1), speeds)
        balancers = dict(BALANCERS)
        if num_layers**2 * num_stages <= MOST_OPERATIONS:
            balancers["dynamic programming"] = lambda one: dynamic_programming_partition(one.by_time)
        for name, balancer in balancers.items():
            seconds = []
            for _ in range(repeats):
                began = time.process_time()
                balancer(case)
                seconds.append(time.process_time() - began)
            cpu_s[name] = max(cpu_s.get(name, 0.0), min(seconds))
    return cpu_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3, help="of every decision that is timed")
    arguments = parser.parse_args()
    console = Console(width=120)
    ratios, rounds = compared(arguments.cases)
    table = Table("slowest stage to the optimum's", "mean", "median", "worst", "optimal", *SPEEDS, "3 layers a stage")
    for name, row in ratios.items():
        numbers = (f"{row[key]:.3f}" for key in ("mean", "median", "worst"))
        means = (f"{row[key]:.3f}" for key in (*SPEEDS, "3 layers a stage"))
        table.add_row(name, *numbers, f"{row['optimal']:.0%}", *means)
    console.print(table)
    console.print(f"rounds of diffusion by time: {rounds['mean']:.1f} on average, {rounds['most']:.0f} at most")
    sizes = [(96, 64), (1000, 128), (10_000, 1024)]
    times = {f"{layers} × {stages}": seconds_to_decide(layers, stages, arguments.repeats) for layers, stages in sizes}
    table = Table("ms to decide, layers × stages", *times)
    for name in times[f"{sizes[0][0]} × {sizes[0][1]}"]:
        table.add_row(name, *(f"{1e3 * own[name]:.1f}" if name in own else "" for own in times.values()))
    console.print(table)
    save("partitions", {"cases": arguments.cases, "ratios": ratios, "rounds": rounds, "seconds": times})


if __name__ == "__main__":
    main()
