"""Planned micro-batches beside the optimum and other ways to make them: python -m scripts.bench.microbatch_plans

FLAN-like mini-batches of 65,536 tokens (``lm_examples.task_lengths``), the paper's models for 8 GPUs on
modelled A100s without replicas or a limit of memory, 4 and 8 stages, simulated without messages. *Over the optimum*:
Eq. 1 of the plan's partition over that of the exact dynamic program. Packing, fixed sizes and equal tokens have 1F1B
and, each by itself for every mini-batch, the best of their parameters, powers of two; times are over those of the
dynamic program. Padding efficiency is as in the paper's Fig. 15, of sources and targets.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from lm_examples.microbatches.tasks import padding_efficiency
from scripts.bench.common import parser_of, run, save, show
from scripts.simulated.modelled_pipelines import MODELS, batches_of, costs_of, powers, row_lengths
from zeroresize.policy.microbatches.costs import StageCosts
from zeroresize.policy.microbatches.cuts import Segments, fill_of, ordered, shortest_cuts
from zeroresize.policy.microbatches.plan import DoesNotFitError, Floats, Indices, IterationPlan, PlanningOptions
from zeroresize.policy.microbatches.planning import plan_iteration

BASELINES = {"packing": powers(32), "fixed": powers(128), "tokens": powers(32768, 256)}


def best_of(
    method: str, lengths: Indices, costs: dict[str, StageCosts], options: PlanningOptions
) -> IterationPlan | None:
    """The best plan of a baseline over its parameter."""
    best: IterationPlan | None = None
    for size in BASELINES[method]:
        try:
            plan = plan_iteration(0, lengths, costs, replace(options, method=method, size=size))  # type: ignore[arg-type]
        except DoesNotFitError:
            continue
        if best is None or plan.expected_s < best.expected_s:
            best = plan
    return best


def over_optimum(lengths: Indices, costs: StageCosts) -> float:
    """Eq. 1 of the default gap's partition over that of the exact one."""

    def prices_of(sizes: Indices, longest: Indices) -> tuple[Floats, Floats]:
        prices = costs.prices(sizes, longest)
        return prices.seconds.max(axis=1), prices.activation_bytes.max(axis=1)[None]

    segments, fill = Segments.of(lengths[ordered(lengths)], prices_of), fill_of(costs, lengths)
    return shortest_cuts(segments, fill).iteration_s(fill) / shortest_cuts(segments, fill, gap=0.0).iteration_s(fill)


def row_of(kind: str, num_stages: int, longest: int, number: int, num_exact: int) -> dict[str, Any]:
    model = MODELS[kind]
    costs = {"none": costs_of(model, num_stages, longest)}
    options = PlanningOptions(schedule="1f1b", num_clusters=1, row_lengths=row_lengths(model, longest))
    ratios: dict[str, list[float]] = defaultdict(list)
    padding: dict[str, list[Floats]] = defaultdict(list)
    planning_s, better = [], 0
    for batch, lengths in enumerate(batches_of(model, 65536, longest, number)):
        begin = time.perf_counter()
        plan = plan_iteration(batch, lengths, costs, PlanningOptions())
        planning_s.append(time.perf_counter() - begin)
        padding["dynamic"].append(padding_efficiency(plan.replicas[0].microbatches, lengths))
        if batch < num_exact:
            ratios["optimum"].append(over_optimum(lengths, costs["none"]))
        for method in BASELINES:
            other = best_of(method, lengths, costs, options)
            assert other is not None
            ratios[method].append(other.expected_s / plan.expected_s)
            padding[method].append(padding_efficiency(other.replicas[0].microbatches, lengths))
        better += ratios["tokens"][-1] > 1.0
    return {
        "kind": kind,
        "num_stages": num_stages,
        "batches": number,
        "ratios": {name: [statistics.fmean(values), max(values)] for name, values in ratios.items()},
        "padding": {name: np.mean(values, axis=0).tolist() for name, values in padding.items()},
        "better_than_tokens": better / number,
        "planning_s": [statistics.fmean(planning_s), max(planning_s)],
    }


def main() -> None:
    options = parser_of(__doc__, batches=250, exact=25, max_length=4096).parse_args()
    rows, times, padding = [], [], []
    for kind, num_stages in itertools.product(MODELS, (4, 8)):
        row = row_of(kind, num_stages, options.max_length, options.batches, options.exact)
        print(row, flush=True)
        mean, most = row["ratios"]["optimum"]
        times.append([
            kind, num_stages, options.batches, f"{mean:.5f}, at most {most:.5f}",
            *(f"{row['ratios'][name][0]:.2f}" for name in BASELINES), f"{100 * row['better_than_tokens']:.0f} %",
            ", ".join(f"{seconds:.2f}" for seconds in row["planning_s"]),
        ])  # fmt: skip
        efficiencies = (", ".join(f"{each:.2f}" for each in row["padding"][name]) for name in ("dynamic", *BASELINES))
        padding.append([kind, num_stages, *efficiencies])
        rows.append(row)
    headings = ["model", "stages", "batches", "over the optimum", *(f"{name} / planned" for name in BASELINES)]
    show("", [*headings, "faster than equal tokens", "planning, s: mean, longest"], times)
    show("", ["padding efficiency", "stages", "planned", *BASELINES], padding)
    save("microbatch_plans", {**vars(options), "rows": rows})


if __name__ == "__main__":
    run(main)
