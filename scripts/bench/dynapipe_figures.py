"""DynaPipe's figures on modelled A100s: python -m scripts.bench.dynapipe_figures

The paper's models (Table 1) on FLAN-like mini-batches, spread over the devices by the best of all powers of two of
replicas, tensor-parallel ranks and stages, each way with its own best, as the paper's grid search does. Seconds are
those that plans expect, without messages between stages, and the sum of gradients over replicas. Packing has 1F1B and
the best number of rows; the dynamic way everything that it plans. Throughput counts tokens of samples, without padding.

``--only`` names figures: length (Fig. 4, 13), batch (Fig. 14), parameters (Fig. 5), ablation (Fig. 16), noise (Fig. 7).
Planning times (Fig. 17) come with length and batch.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.bench.common import machine, save
from scripts.simulated.modelled_pipelines import (
    Division,
    PaperModel,
    batches_of,
    costs_of,
    divisions,
    paper_model,
    powers,
    row_lengths,
)
from zeroresize.policy.microbatches.iteration_plan import IterationPlan
from zeroresize.policy.microbatches.micro_batch import Indices
from zeroresize.policy.microbatches.planning import plan_iteration
from zeroresize.policy.microbatches.planning_options import DoesNotFitError, PlanningOptions
from zeroresize.runtime.adaptive_schedule import adaptive_orders
from zeroresize.runtime.schedules import orders_of
from zeroresize.runtime.timeline import timeline

LENGTHS = {"gpt": (512, 1024, 2048, 4096, 8192), "t5": (512, 1024, 2048, 4096)}
TOKENS = (16384, 32768, 65536, 131072)
_ROWS = powers(16)


def planned(
    model: PaperModel,
    division: Division,
    lengths: Indices,
    longest: int,
    options: PlanningOptions,
    sizes: Sequence[int],
) -> IterationPlan | None:
    """The best plan over the sizes; None where none fits."""
    best: IterationPlan | None = None
    costs = costs_of(model, division, longest)
    for size in sizes:
        try:
            plan = plan_iteration(0, lengths, costs, replace(options, size=size))
        except DoesNotFitError:
            continue
        if best is None or plan.expected_s < best.expected_s:
            best = plan
    return best


def packing_options(model: PaperModel, division: Division, longest: int) -> PlanningOptions:
    return PlanningOptions(
        division.dp,
        division.memory_limit,
        "packing",
        schedule="1f1b",
        num_clusters=1,
        row_lengths=row_lengths(model, longest),
    )


def dynamic_options(division: Division) -> PlanningOptions:
    return PlanningOptions(division.dp, division.memory_limit)


def throughput(
    model: PaperModel, num_devices: int, tokens: int, longest: int, num_batches: int
) -> dict[str, dict[str, Any]]:
    """Tokens per second of both ways, each by its best division, which the first mini-batch decides."""
    batches = batches_of(model, tokens, longest, num_batches)
    result: dict[str, dict[str, Any]] = {}
    ways: dict[str, tuple[Callable[[Division], PlanningOptions], Sequence[int]]] = {
        "packing": (lambda division: packing_options(model, division, longest), _ROWS),
        "dynamic": (dynamic_options, (1,)),
    }
    for way, (options_of, sizes) in ways.items():
        best: tuple[float, Division] | None = None
        for division in divisions(model, num_devices):
            plan = planned(model, division, batches[0], longest, options_of(division), sizes)
            if plan is not None:
                seconds = plan.expected_s + division.reduction_s
                best = (seconds, division) if best is None or seconds < best[0] else best
        if best is None:
            result[way] = {"tokens_per_s": math.nan, "division": "does not fit", "planning": math.nan}
            continue
        division, total_s, planning_s = best[1], 0.0, []
        for lengths in batches:
            begin = time.perf_counter()
            plan = planned(model, division, lengths, longest, options_of(division), sizes)
            planning_s.append(time.perf_counter() - begin)
            total_s += math.inf if plan is None else plan.expected_s + division.reduction_s
        result[way] = {
            "tokens_per_s": sum(int(lengths.sum()) for lengths in batches) / total_s,
            "division": str(division),
            "planning": statistics.fmean(planning_s) * len(batches) / total_s,
            "planning_s": statistics.fmean(planning_s),
        }
    return result


def throughputs(num_batches: int, devices: Sequence[int], by_length: bool) -> tuple[Table, list[dict[str, Any]]]:
    what = "longest" if by_length else "tokens of a mini-batch"
    table = Table("model", "devices", what, "packing, tokens/s", "(dp, tp, pp)", "dynamic, tokens/s", "(dp, tp, pp)")
    for heading in ("dynamic / packing", "planning, s", "planning / iteration"):
        table.add_column(heading)
    rows = []
    for kind in ("gpt", "t5"):
        for num_devices in devices:
            for value in LENGTHS[kind] if by_length else TOKENS:
                tokens, longest = (65536, value) if by_length else (value, 2048)
                both = throughput(paper_model(kind, num_devices), num_devices, tokens, longest, num_batches)
                packing, dynamic = both["packing"], both["dynamic"]
                ratio = dynamic["tokens_per_s"] / packing["tokens_per_s"]
                rows.append({"kind": kind, "devices": num_devices, "value": value, **both, "ratio": ratio})
                table.add_row(
                    kind,
                    str(num_devices),
                    str(value),
                    *(
                        cell
                        for each in (packing, dynamic)
                        for cell in (f"{each['tokens_per_s']:,.0f}", each["division"])
                    ),
                    f"{ratio:.2f}",
                    f"{dynamic.get('planning_s', math.nan):.2f}",
                    f"{dynamic['planning']:.2f}",
                )
                print(rows[-1], flush=True)
    return table, rows


def parameters(num_batches: int) -> tuple[Table, list[dict[str, Any]]]:
    """Fixed sizes and equal tokens over the dynamic way, by their parameter, on four stages of eight devices."""
    table = Table("model", "(dp, tp, pp)", "longest", "way", "parameter: throughput over dynamic")
    rows = []
    for kind in ("gpt", "t5"):
        model = paper_model(kind, 8)
        for longest in (512, 4096):
            batches = batches_of(model, 65536, longest, num_batches)
            division = next(
                each
                for each in divisions(model, 8)
                if each.pp == 4 and planned(model, each, batches[0], longest, dynamic_options(each), (1,)) is not None
            )
            dynamic = [planned(model, division, each, longest, dynamic_options(division), (1,)) for each in batches]
            total = sum(plan.expected_s for plan in dynamic if plan is not None)
            for way, sizes in (("fixed", powers(64)), ("tokens", powers(32768, 512))):
                options = replace(dynamic_options(division), method=way, schedule="1f1b", num_clusters=1)  # type: ignore[arg-type]
                shares = {}
                for size in sizes:
                    plans = [planned(model, division, each, longest, options, (size,)) for each in batches]
                    does_fit = all(plan is not None for plan in plans)
                    shares[size] = total / sum(plan.expected_s for plan in plans if plan) if does_fit else math.nan
                rows.append({"kind": kind, "longest": longest, "way": way, "shares": shares})
                cells = (
                    f"{size}: {'memory' if math.isnan(share) else f'{share:.2f}'}" for size, share in shares.items()
                )
                table.add_row(kind, str(division), str(longest), way, ", ".join(cells))
    return table, rows


def ablation(num_batches: int) -> tuple[Table, list[dict[str, Any]]]:
    """Ways to partition without stages (T5), and schedules on four of them (GPT), at 4,096 tokens; over the first."""
    table = Table("model", "tokens", "way", "throughput over the first")
    rows = []
    t5 = paper_model("t5", 8)
    division = next(each for each in divisions(t5, 8) if each.pp == 1)
    base = PlanningOptions(division.dp, division.memory_limit, schedule="1f1b", num_clusters=1)
    ways = {
        "packing": (replace(base, method="packing", row_lengths=row_lengths(t5, 4096)), _ROWS),
        "tokens, sorted": (replace(base, method="tokens"), powers(32768, 512)),
        "tokens, tour": (replace(base, method="tokens", order="tour"), powers(32768, 512)),
        "dynamic, sorted": (base, (1,)),
        "dynamic, tour": (replace(base, order="tour"), (1,)),
    }
    rows += _ablated(table, t5, division, 65536, ways, num_batches)
    gpt = paper_model("gpt", 8)
    division = next(each for each in divisions(gpt, 8) if each.pp == 4)
    options = dynamic_options(division)
    schedules = {
        "1F1B": (replace(options, schedule="1f1b", num_clusters=1), (1,)),
        "adaptive": (replace(options, num_clusters=1), (1,)),
        "adaptive, 3 clusters": (options, (1,)),
        "adaptive, 4 clusters": (replace(options, num_clusters=4), (1,)),
    }
    for tokens in (16384, 65536):
        rows += _ablated(table, gpt, division, tokens, schedules, num_batches)
    return table, rows


def _ablated(
    table: Table,
    model: PaperModel,
    division: Division,
    tokens: int,
    ways: dict[str, tuple[PlanningOptions, Sequence[int]]],
    num_batches: int,
) -> list[dict[str, Any]]:
    batches = batches_of(model, tokens, 4096, num_batches)
    totals = {}
    for way, (options, sizes) in ways.items():
        plans = [planned(model, division, lengths, 4096, options, sizes) for lengths in batches]
        totals[way] = math.inf if None in plans else sum(plan.expected_s for plan in plans if plan is not None)
        share = next(iter(totals.values())) / totals[way]
        table.add_row(f"{model.kind} {division}", f"{tokens:,}", way, f"{share:.3f}")
    return [{"kind": model.kind, "tokens": tokens, "division": str(division), "seconds": totals}]


def noise(num_steps: int) -> tuple[Table, list[dict[str, Any]]]:
    """Steps of equal micro-batches whose seconds vary, over those that do not, four micro-batches a stage."""
    deviations = (0.0, 0.1, 0.2, 0.3, 0.5)
    table = Table("stages", "schedule", *(f"σ = {deviation}" for deviation in deviations))
    rows = []
    for num_stages in (4, 8, 16):
        number = 4 * num_stages
        even = np.ones((number, num_stages))
        schedules = {
            "1F1B": orders_of("1f1b", num_stages, number),
            "adaptive, 1.5 × the memory of 1F1B": adaptive_orders(even, [1.5 * num_stages] * num_stages),
            "adaptive, no limit": adaptive_orders(even, [math.inf] * num_stages),
        }
        calm_s = timeline(schedules["1F1B"], even, 2.0 * even).step_s
        for name, orders in schedules.items():
            means = []
            for deviation in deviations:
                random = np.random.default_rng(0)
                steps = []
                for _ in range(num_steps if deviation else 1):
                    factors = np.maximum(1.0 + deviation * random.standard_normal((2, number, num_stages)), 0.05)
                    steps.append(timeline(orders, factors[0], 2.0 * factors[1]).step_s)
                means.append(statistics.fmean(steps) / calm_s)
            rows.append({"stages": num_stages, "schedule": name, "means": means})
            table.add_row(str(num_stages), name, *(f"{mean:.2f}" for mean in means))
    return table, rows


def main() -> None:
    figures: dict[str, Callable[[argparse.Namespace], tuple[Table, list[dict[str, Any]]]]] = {
        "noise": lambda options: noise(10 * options.batches),
        "ablation": lambda options: ablation(options.batches),
        "parameters": lambda options: parameters(options.batches),
        "length": lambda options: throughputs(options.batches, options.devices, by_length=True),
        "batch": lambda options: throughputs(options.batches, options.devices, by_length=False),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=4, help="mini-batches of each cell")
    parser.add_argument("--devices", type=int, nargs="+", default=[8], choices=[4, 8, 16, 32])
    parser.add_argument("--only", nargs="+", choices=list(figures), default=list(figures))
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), **vars(options)}
    for name in options.only:
        table, result[name] = figures[name](options)
        Console(width=150).print(table)
    save("dynapipe_figures", result)


if __name__ == "__main__":
    main()
