"""Plans of switches between strategies: python -m scripts.bench.switch_plans

No training and no processes. First a LLaMA-like model of 32.5 billion parameters in bfloat16 on 32 devices, 4 nodes of
8: seconds of every switch between the strategies of HotSPa's Table 3, for its weights and for its gradients, by the
volumes of the plan and the speeds of links (its Fig. 8). The baseline, without the heuristics, has the first rank that
holds a slice send it. Then the CPU time of planning for 1,024 ranks and 1,002 tensors, layouts included.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.common import save
from scripts.simulated.llama_tensors import LLAMA_32B, LlamaShape, llama_tensors
from scripts.simulated.switch_bound import lower_bound
from zeroresize.plan.layout import TensorSpec
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.slices import common_slices
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds

#: HotSPa, Table 3.
STRATEGIES = ((1, 16, 2), (2, 8, 2), (4, 4, 2), (4, 2, 4), (8, 4, 1))
NODE = 8
LARGE_MODEL = LlamaShape(111, 8192, 64, 28672)
LARGE_SWITCHES = (
    ((8, 16, 8), (32, 8, 4)),
    ((32, 8, 4), (8, 16, 8)),
    ((16, 8, 8), (8, 16, 8)),
    ((1, 16, 64), (64, 16, 1)),
    ((128, 8, 1), (64, 16, 1)),
)


def switch_seconds(links: LinkSpeeds) -> list[dict[str, Any]]:
    """Every switch between two different strategies on 32 devices."""
    tensors = llama_tensors(LLAMA_32B)
    nodes = [rank // NODE for rank in range(32)]
    layouts = {degrees: Strategy(*degrees).layout(tensors, 32, LLAMA_32B.num_layers) for degrees in STRATEGIES}
    rows = []
    for before, after in itertools.permutations(STRATEGIES, 2):
        case = (layouts[before], layouts[after], tensors, nodes)
        row: dict[str, Any] = {"before": before, "after": after, "lower bound": lower_bound(*case, links)}
        for name, planner in (("weights", plan_weights), ("gradients", plan_gradients)):
            for kind, heuristics in (("", True), (" baseline", False)):
                plan = planner(*case, heuristics=heuristics)
                row[name + kind] = plan.seconds(links)
                row[f"{name}{kind} sent GB"] = [
                    num_bytes.max() / 1e9 for num_bytes in (plan.sent_within, plan.sent_between, plan.received_between)
                ]
        rows.append(row)
    return rows


def matrix(title: str, rows: Sequence[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> Table:
    """One cell for each switch: from the strategy of the row to that of the column."""
    table = Table(title, *map(str, STRATEGIES), title_justify="left")
    texts = {(row["before"], row["after"]): cell(row) for row in rows}
    for before in STRATEGIES:
        table.add_row(str(before), *(texts.get((before, after), "") for after in STRATEGIES))
    return table


def against_baseline(row: dict[str, Any], name: str) -> str:
    planned, baseline = row[name], row[f"{name} baseline"]
    if not planned:
        return f"0 : {baseline:.3f}" if baseline else "0 : 0"
    return f"{planned:.3f} : {baseline:.3f} ({baseline / planned:.1f}×)"


def against_bound(row: dict[str, Any]) -> str:
    bound = row["lower bound"]
    return f"{bound:.3f}, {row['weights'] / bound:.2f}×" if bound else "0"


def seconds_to_plan(
    before: tuple[int, int, int], after: tuple[int, int, int], tensors: Sequence[TensorSpec], repeats: int
) -> dict[str, float]:
    """The least CPU seconds of some repeats, and how much there is to plan, for 1,024 ranks on nodes of 8."""
    nodes = [rank // NODE for rank in range(1024)]
    clocks: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = action()
        clocks.setdefault(name, []).append(time.process_time() - began)
        return result

    num_layers = tensors[-1].layer + 1
    strategies = Strategy(*before), Strategy(*after)
    for _ in range(repeats):
        layouts = timed("layouts", lambda: [one.layout(tensors, 1024, num_layers) for one in strategies])
        weights = timed("weights", partial(plan_weights, *layouts, tensors, nodes))
        gradients = timed("gradients", partial(plan_gradients, *layouts, tensors, nodes))
    return {
        **{name: min(seconds) for name, seconds in clocks.items()},
        "slices": len(common_slices(*layouts, tensors)),
        "transfers of weights": len(weights.transfers),
        "transfers of gradients": len(gradients.transfers),
    }


def of_different_sizes(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """No two tensors are equally large: none can be planned together with another."""
    wider = []
    for number, tensor in enumerate(tensors):
        dim = len(tensor.shape) - 1 if tensor.division is None or tensor.division.dim == 0 else 0
        shape = [size + number * (place == dim) for place, size in enumerate(tensor.shape)]
        wider.append(dataclasses.replace(tensor, shape=tuple(shape)))
    return wider


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--within", type=float, default=200.0, help="GB/s of a device to its node, in one direction")
    parser.add_argument("--between", type=float, default=25.0, help="GB/s of a device to other nodes, in one direction")
    parser.add_argument("--node", type=float, default=float("inf"), help="GB/s of all devices of a node to other nodes")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of every switch besides")
    parser.add_argument("--repeats", type=int, default=3, help="of every plan that is timed")
    arguments = parser.parse_args()
    links = LinkSpeeds(
        1e9 * arguments.within, 1e9 * arguments.between, arguments.latency, node_bytes_per_s=1e9 * arguments.node
    )
    console = Console(width=150)
    rows = switch_seconds(links)
    console.print(f"seconds, heuristics : baseline; {links}")
    console.print(matrix("weights, from \\ to", rows, lambda row: against_baseline(row, "weights")))
    console.print(matrix("gradients, from \\ to", rows, lambda row: against_baseline(row, "gradients")))
    console.print(matrix("weights: lower bound, plan / bound", rows, against_bound))
    same = llama_tensors(LARGE_MODEL)
    times = {}
    for before, after in LARGE_SWITCHES:
        times[f"{before} to {after}"] = seconds_to_plan(before, after, same, arguments.repeats)
    before, after = LARGE_SWITCHES[0]
    different = of_different_sizes(same)
    times[f"{before} to {after}, no two tensors alike"] = seconds_to_plan(before, after, different, arguments.repeats)
    table = Table("CPU ms, 1,024 ranks", "layouts", "weights", "gradients", "slices", "transfers: weights", "gradients")
    for name, row in times.items():
        milliseconds = (f"{1e3 * row[key]:.0f}" for key in ("layouts", "weights", "gradients"))
        counts = (f"{row[key]:,.0f}" for key in ("slices", "transfers of weights", "transfers of gradients"))
        table.add_row(name, *milliseconds, *counts)
    console.print(table)
    save("switch_plans", {"links": dataclasses.asdict(links), "switches": rows, "planning": times})


if __name__ == "__main__":
    main()
