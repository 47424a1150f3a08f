"""DynPipe's supplement beside ours, simulated: python -m scripts.bench.pipeline_supplement

A GPT is pruned to 90 % as its Eq. (2) says, on 2 to 8 devices (``scripts.simulated.changing_layers``; what layers
take is told in ``scripts.bench.pipeline_simulated``). Three tables: throughput by the number of layers and devices
(Table 2); what profiles and moves of a whole training take, in steps of the dense model (Table 1); and re-packing onto
as few of eight devices as hold the layers and make no step longer than the first one (Fig. 4), with four micro-batches
for each device that there was. Every device has memory for an eighth of the dense model; weights that are left count,
with gradients and optimizer state, and are never fewer than 5 % of a layer.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.bench.common import save
from scripts.bench.pipeline_simulated import BACKWARD_S, FORWARD_S, LAYER_BYTES, job_of
from scripts.simulated.diffusion import RULES
from scripts.simulated.pipeline_training import profile_of
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.profile_cadence import LEAST_BLOCKS
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingRule
from zeroresize.policy.pipeline.repacking_decision import RepackingRule

#: Speed-ups of the supplement's Table 2, by layers and devices; what did not fit into its devices' memory is missing.
TABLE_2 = {
    (24, 2): 1.20,
    (24, 4): 1.22,
    (24, 8): 1.26,
    (32, 2): 1.25,
    (32, 4): 1.26,
    (32, 8): 1.29,
    (40, 2): 1.28,
    (40, 4): 1.31,
    (40, 8): 1.33,
    (48, 4): 1.35,
    (48, 8): 1.37,
    (56, 8): 1.39,
}
#: Iterations that balancing takes by its Table 1: partition by time, diffusion by time.
TABLE_1 = {24: (25, 12), 32: (9, 7), 40: (12, 11), 48: (13, 4), 56: (14, 9)}
#: Mean devices of a training whose pruning is re-packed (DynMo, 5.3), of eight.
PAPER_MEAN_DEVICES = 5.8
_LEAST_LEFT = 0.05


def row_of(num_layers: int, num_stages: int, num_steps: int, seed: int) -> dict[str, Any]:
    """What a training takes, static, balanced and at best."""
    job = job_of("pruning", num_steps, num_layers, num_stages, seed)
    static = job.static()
    row: dict[str, Any] = {
        "num_layers": num_layers,
        "num_stages": num_stages,
        "seed": seed,
        "static_s": static.total_s,
        "oracle_s": job.oracle().total_s,
        "last_static_s": static.step_s[-1],
    }
    for method in RULES:
        trace = job.balanced(method)
        row[method] = {
            "total_s": trace.total_s,
            "last_s": trace.step_s[-1],
            "moves_in_steps": trace.move_s / trace.step_s[0],
            "profiles_in_steps": trace.profile_s / trace.step_s[0],
        }
    return row


@dataclass(frozen=True)
class Phase:
    """Describe the steps from one pruning to the next.

    Attributes:
        num_steps: how many they are.
        num_devices: that are left.
        step_s: seconds of a step on them, and on all of them.
    """

    num_steps: int
    num_devices: int
    step_s: float
    step_on_all_s: float


def phases_of(num_layers: int, num_steps: int, least_devices: int, seed: int) -> list[Phase]:
    """A training on eight devices that goes on with fewer after each pruning, by the decisions of re-packing."""
    num_stages = 8
    job = job_of("pruning", num_steps, num_layers, num_stages, seed)
    micro = job.micro_batches
    boundaries = job.even
    begins = [0, *(step + 1 for step in sorted(job.changing.changes)), num_steps]
    limit = LAYER_BYTES * num_layers / num_stages
    phases, num_devices, first_step_s = [], num_stages, None
    for begin, end in pairwise(begins):
        left = job.changing.forward[begin]
        sizes = LAYER_BYTES * np.maximum(left, _LEAST_LEFT)
        profile = profile_of(micro * FORWARD_S * left, micro * BACKWARD_S * left, sizes, Partition(boundaries))
        rule = RebalancingRule("time", "1f1b", micro, LEAST_BLOCKS, memory_limits=(limit,) * (len(boundaries) - 1))
        costs = LayerCosts.first(profile)
        repacking = RepackingRule(rule, costs, profile, None)
        on_all = repacking.simulated(repacking.on(num_stages)).step_s
        first_step_s = first_step_s or on_all
        chosen = repacking.on_fewest(least_devices, first_step_s)
        num_devices = min(num_devices, len(chosen.stages))
        chosen = repacking.on(num_devices)
        phases.append(Phase(end - begin, num_devices, repacking.simulated(chosen).step_s, on_all))
    return phases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3, help="models whose layers differ by chance")
    options = parser.parse_args()
    seeds = range(options.seeds)
    rows = [row_of(*size, options.steps, seed) for size in TABLE_2 for seed in seeds]
    packed = {
        (num_layers, least): [phases_of(num_layers, options.steps, least, seed) for seed in seeds]
        for num_layers in TABLE_1
        for least in (6, 4, 2, 1)
    }
    console = Console(width=160)
    console.print(_depth_table(rows))
    console.print(_overhead_table(rows))
    console.print(_repacking_table(packed))
    save("pipeline_supplement", {**vars(options), "rows": rows})


def _depth_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("layers", "devices", "whole run: partition", "diffusion", "oracle", "at the end: partition", "paper")
    for (num_layers, num_stages), paper in TABLE_2.items():
        group = [row for row in rows if (row["num_layers"], row["num_stages"]) == (num_layers, num_stages)]
        ratios = [
            statistics.fmean(row["static_s"] for row in group) / statistics.fmean(seconds)
            for seconds in (
                [row["partition"]["total_s"] for row in group],
                [row["diffusion"]["total_s"] for row in group],
                [row["oracle_s"] for row in group],
            )
        ]
        ratios.append(statistics.fmean(row["last_static_s"] / row["partition"]["last_s"] for row in group))
        table.add_row(str(num_layers), str(num_stages), *(f"{ratio:.2f}" for ratio in ratios), f"{paper:.2f}")
    return table


def _overhead_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("layers", "moves, steps: partition", "diffusion", "profiles, steps", "paper: partition", "diffusion")
    for num_layers, paper in TABLE_1.items():
        group = [row for row in rows if row["num_layers"] == num_layers and row["num_stages"] == 8]
        moves = (statistics.fmean(row[method]["moves_in_steps"] for row in group) for method in RULES)
        profiles = statistics.fmean(row["partition"]["profiles_in_steps"] for row in group)
        cells = (*(f"{value:.1f}" for value in moves), f"{profiles:.1f}", *map(str, paper))
        table.add_row(str(num_layers), *cells)
    return table


def _repacking_table(packed: dict[tuple[int, int], list[list[Phase]]]) -> Table:
    table = Table(
        *("layers", "least devices", "devices of each phase (first model)", "mean devices", "paper"),
        *("steps/s: packed / on all", "steps/s a device: packed / on all"),
    )
    for (num_layers, least), trainings in packed.items():
        means, speeds, per_device = [], [], []
        for phases in trainings:
            num_steps = sum(phase.num_steps for phase in phases)
            packed_s = sum(phase.num_steps * phase.step_s for phase in phases)
            on_all_s = sum(phase.num_steps * phase.step_on_all_s for phase in phases)
            device_s = sum(phase.num_steps * phase.step_s * phase.num_devices for phase in phases)
            means.append(sum(phase.num_steps * phase.num_devices for phase in phases) / num_steps)
            speeds.append(on_all_s / packed_s)
            per_device.append(8 * on_all_s / device_s)
        table.add_row(
            str(num_layers),
            str(least),
            " ".join(str(phase.num_devices) for phase in trainings[0]),
            f"{statistics.fmean(means):.1f}",
            f"{PAPER_MEAN_DEVICES}",
            f"{statistics.fmean(speeds):.2f}",
            f"{statistics.fmean(per_device):.2f}",
            end_section=least == 1,
        )
    return table


if __name__ == "__main__":
    main()
