"""DynaPipe's figures on modelled A100s: python -m scripts.bench.dynapipe_figures

The paper's models (Table 1) on FLAN-like mini-batches, spread over the devices by the best of all powers of two of
replicas, tensor-parallel ranks and stages, each way with its own best, as the paper's grid search does. Seconds are
those that plans expect, without messages between stages, and the sum of gradients over replicas. Packing has 1F1B and
the best number of rows; the dynamic way everything that it plans. Throughput counts tokens of samples, without padding.

``--only`` names figures: length (Fig. 4, 13), batch (Fig. 14), ablation (Fig. 16). Planning times (Fig. 17) come with
length and batch.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scripts.bench.common import parser_of, save, show
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

LENGTHS = {"gpt": (512, 1024, 2048, 4096, 8192), "t5": (512, 1024, 2048, 4096)}
FIGURES = ("ablation", "length", "batch")
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


def throughput(
    model: PaperModel, num_devices: int, tokens: int, longest: int, num_batches: int
) -> dict[str, dict[str, Any]]:
    """Tokens per second of both ways, each by its best division, which the first mini-batch decides."""
    batches = batches_of(model, tokens, longest, num_batches)
    result: dict[str, dict[str, Any]] = {}
    rows = row_lengths(model, longest)
    ways: dict[str, tuple[dict[str, Any], Sequence[int]]] = {
        "packing": ({"method": "packing", "schedule": "1f1b", "num_clusters": 1, "row_lengths": rows}, _ROWS),
        "dynamic": ({}, (1,)),
    }

    def plan_of(division: Division, lengths: Indices, way: str) -> IterationPlan | None:
        changes, sizes = ways[way]
        options = PlanningOptions(division.dp, division.memory_limit, **changes)
        return planned(model, division, lengths, longest, options, sizes)

    for way in ways:
        best: tuple[float, Division] | None = None
        for division in divisions(model, num_devices):
            plan = plan_of(division, batches[0], way)
            if plan is not None:
                seconds = plan.expected_s + division.reduction_s
                best = (seconds, division) if best is None or seconds < best[0] else best
        if best is None:
            result[way] = {"tokens_per_s": math.nan, "division": "does not fit", "planning": math.nan}
            continue
        division, total_s, planning_s = best[1], 0.0, []
        for lengths in batches:
            begin = time.perf_counter()
            plan = plan_of(division, lengths, way)
            planning_s.append(time.perf_counter() - begin)
            total_s += math.inf if plan is None else plan.expected_s + division.reduction_s
        result[way] = {
            "tokens_per_s": sum(int(lengths.sum()) for lengths in batches) / total_s,
            "division": str(division),
            "planning": statistics.fmean(planning_s) * len(batches) / total_s,
            "planning_s": statistics.fmean(planning_s),
        }
    return result


def throughputs(figure: str, num_batches: int, devices: Sequence[int]) -> list[dict[str, Any]]:
    """Both ways by the longest sample or by the tokens of a mini-batch."""
    rows, cells = [], []
    for kind, num_devices in itertools.product(("gpt", "t5"), devices):
        for value in LENGTHS[kind] if figure == "length" else TOKENS:
            tokens, longest = (65536, value) if figure == "length" else (value, 2048)
            both = throughput(paper_model(kind, num_devices), num_devices, tokens, longest, num_batches)
            ratio = both["dynamic"]["tokens_per_s"] / both["packing"]["tokens_per_s"]
            rows.append({"kind": kind, "devices": num_devices, "value": value, **both, "ratio": ratio})
            of_ways = [(f"{way['tokens_per_s']:,.0f}", way["division"]) for way in both.values()]
            planning = f"{both['dynamic'].get('planning_s', math.nan):.2f}", f"{both['dynamic']['planning']:.2f}"
            cells.append([kind, num_devices, value, *itertools.chain(*of_ways), f"{ratio:.2f}", *planning])
            print(rows[-1], flush=True)
    headings = ["model", "devices", "longest" if figure == "length" else "tokens of a mini-batch"]
    headings += ["packing, tokens/s", "(dp, tp, pp)", "dynamic, tokens/s", "(dp, tp, pp)", "dynamic / packing"]
    show("", [*headings, "planning, s", "planning / iteration"], cells)
    return rows


def ablation(num_batches: int) -> list[dict[str, Any]]:
    """Ways to partition without stages (T5), and schedules on four of them (GPT), at 4,096 tokens; over the first."""
    rows: list[list[str]] = []
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
    results = [_ablated(rows, t5, division, 65536, ways, num_batches)]
    gpt = paper_model("gpt", 8)
    division = next(each for each in divisions(gpt, 8) if each.pp == 4)
    options = PlanningOptions(division.dp, division.memory_limit)
    schedules = {
        "1F1B": (replace(options, schedule="1f1b", num_clusters=1), (1,)),
        "adaptive": (replace(options, num_clusters=1), (1,)),
        "adaptive, 3 clusters": (options, (1,)),
        "adaptive, 4 clusters": (replace(options, num_clusters=4), (1,)),
    }
    results += [_ablated(rows, gpt, division, tokens, schedules, num_batches) for tokens in (16384, 65536)]
    show("", ("model", "tokens", "way", "throughput over the first"), rows)
    return results


def _ablated(
    rows: list[list[str]],
    model: PaperModel,
    division: Division,
    tokens: int,
    ways: dict[str, tuple[PlanningOptions, Sequence[int]]],
    num_batches: int,
) -> dict[str, Any]:
    batches = batches_of(model, tokens, 4096, num_batches)
    totals = {}
    for way, (options, sizes) in ways.items():
        plans = [planned(model, division, lengths, 4096, options, sizes) for lengths in batches]
        totals[way] = math.inf if None in plans else sum(plan.expected_s for plan in plans if plan is not None)
        share = next(iter(totals.values())) / totals[way]
        rows.append([f"{model.kind} {division}", f"{tokens:,}", way, f"{share:.3f}"])
    return {"kind": model.kind, "tokens": tokens, "division": str(division), "seconds": totals}


def main() -> None:
    parser = parser_of(__doc__, batches=4)
    parser.add_argument("--devices", type=int, nargs="+", default=[8], choices=[4, 8, 16, 32])
    parser.add_argument("--only", nargs="+", choices=FIGURES, default=FIGURES)
    options = parser.parse_args()
    result: dict[str, Any] = vars(options) | {}
    for name in options.only:
        batches = options.batches
        result[name] = ablation(batches) if name == "ablation" else throughputs(name, batches, options.devices)
    save("dynapipe_figures", result)


if __name__ == "__main__":
    main()
