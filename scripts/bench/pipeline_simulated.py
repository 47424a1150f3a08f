"""Changing work on 8 to 24 stages, simulated by the decisions of training: python -m scripts.bench.pipeline_simulated

Models are numbers (``scripts.simulated.changing_layers``): which share of a dense layer's work each layer does in
each step, as DynMo's paper says, with spreads that its docstrings tell. A dense layer takes 0.5 ms forward and 1 ms
backward of a micro-batch, of which there are four for each stage, and holds 200 MB, as of hidden size 1,024 with Adam's
state; moves have 10 GB/s and 50 ms besides, which is known from the start; a profiled step takes 5 % longer, a decision
0.6 ms for each stage and 1.2 ms more where the best boundaries are looked for (about what they take on one core); all
seconds vary by 2 %. Layers begin evenly divided, which is also the division by parameters.

*Share* is that of what could be gained: (static - balanced) / (static - oracle). The oracle has the best division in
every step, for nothing. *Hindsight* is the best that a fixed division could have been: of the mean work, of the last
step's, or the even one. *Over dense* is against the even division of a model whose layers all work fully: what the
paper compares with for early exit and sparse attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from scripts.bench.changing_work import PAPER
from scripts.bench.common import save
from scripts.simulated import changing_layers
from scripts.simulated.changing_layers import ChangingLayers
from scripts.simulated.diffusion import RULES, Method
from scripts.simulated.foreseen_moves import simulate_foreseen
from scripts.simulated.pipeline_training import (
    LayerLoads,
    PipelineCluster,
    PipelineTrace,
    simulate_oracle,
    simulate_pipeline,
)
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad
from zeroresize.policy.pipeline.profile_cadence import LEAST_BLOCKS, MAX_MEASURING
from zeroresize.policy.pipeline.shortest_step import shortest_partition

FORWARD_S, BACKWARD_S, LAYER_BYTES = 0.5e-3, 1e-3, 200e6
LINKS = MoveCost(seconds_per_byte=1e-10, fixed_s=0.05)
PROFILED_SHARE, NOISE = 0.05, 0.02
#: Of each stage.
DECISION_S, SEARCH_S = 0.6e-3, 1.2e-3
MICRO_BATCHES_PER_STAGE = 4
#: How many times as long the stage in the middle takes from an eighth of the steps to half of them.
STRAGGLERS = {"χ = 2": 2.0, "χ = 4": 4.0}
#: Of which the layers differ by chance.
SEEDED = ("pruning", "sparse attention", "mixture of experts", "mixture of depths")
SIZES = ((24, 8), (24, 16), (48, 8), (48, 16), (48, 24))
#: Of which layers count their work.
COUNTED = ("sparse attention", "mixture of experts", "mixture of depths")
#: Steps of work that changes in every step on which the oracle is asked.
_ASKED = 100
#: Steps until layers are in place: a change is measured, the figures known, the layers under way.
MEASURED_AFTER = 3
#: Share of a step of which less is not worth a share: the balancer takes less than 2 % for noise.
_LEAST_REMOVABLE = 0.02


@dataclass(frozen=True)
class Job:
    """Describe a training.

    Attributes:
        changing: the work of its layers, [N, L].
        speeds: [N, S].
        counts_decisions: whether decisions take time.
    """

    changing: ChangingLayers
    speeds: np.ndarray[Any, np.dtype[np.float64]]
    counts_decisions: bool = True

    @property
    def num_stages(self) -> int:
        """Return S."""
        return int(self.speeds.shape[1])

    @property
    def micro_batches(self) -> int:
        """Return how many a step has."""
        return MICRO_BATCHES_PER_STAGE * self.num_stages

    def loads(self, every: int = 1) -> LayerLoads:
        """Return what layers take in one of ``every`` steps."""
        forward, backward = self.changing.forward[::every], self.changing.backward[::every]
        return LayerLoads(FORWARD_S * forward, BACKWARD_S * backward, np.full(forward.shape[1], LAYER_BYTES))

    @property
    def even(self) -> tuple[int, ...]:
        """Return the boundaries with equally many layers on each stage."""
        return Partition.uniform(self.changing.forward.shape[1], self.num_stages).boundaries

    def static(self, boundaries: Sequence[int] | None = None, every: int = 1) -> PipelineTrace:
        """Return a training in which no layer moves, evenly divided unless boundaries are given."""
        return simulate_pipeline(
            self.loads(every), self.cluster(every), boundaries or self.even, num_microbatches=self.micro_batches
        )

    def oracle(self, every: int = 1) -> PipelineTrace:
        """Return a training with the best division of each step."""
        return simulate_oracle(self.loads(every), self.cluster(every), num_microbatches=self.micro_batches)

    def foreseen(self) -> PipelineTrace:
        """Return a training with the best moves at their price, by all that is to come, each measured before."""
        return simulate_foreseen(
            self.loads(), self.cluster(), self.even, num_microbatches=self.micro_batches, delay=MEASURED_AFTER
        )

    def balanced(self, method: Method, profile_every: int | None = None, *, counts_work: bool = False) -> PipelineTrace:
        """Return a balanced training, measured as often as ``PipelineBalancer`` chooses, or at most so often."""
        return simulate_pipeline(
            self.loads(),
            self.cluster(),
            self.even,
            num_microbatches=self.micro_batches,
            rule=RULES[method]("time", "1f1b", self.micro_batches, profile_every or LEAST_BLOCKS),
            changes=self.changing.changes,
            max_measuring=MAX_MEASURING,
            counts_work=counts_work,
        )

    def cluster(self, every: int = 1) -> PipelineCluster:
        """Return its devices in one of ``every`` steps."""
        return PipelineCluster(
            self.num_stages,
            self.speeds[::every],
            LINKS,
            profiled_share=PROFILED_SHARE,
            decision_s=DECISION_S * self.num_stages * self.counts_decisions,
            search_s=SEARCH_S * self.num_stages * self.counts_decisions,
            noise=NOISE,
        )


def job_of(case: str, num_steps: int, num_layers: int, num_stages: int, seed: int = 0) -> Job:
    """Return the training of a case, also of "dense" or of one with a slow stage."""
    speeds = np.ones((num_steps, num_stages))
    if case in STRAGGLERS:
        speeds[num_steps // 8 : num_steps // 2, num_stages // 2] = 1.0 / STRAGGLERS[case]
    if case in STRAGGLERS or case == "dense":
        return Job(changing_layers.dense(num_steps, num_layers), speeds)
    options = {"seed": seed} if case in SEEDED else {}
    return Job(changing_layers.CASES[case](num_steps, num_layers, **options), speeds)


def row_of(
    case: str, size: tuple[int, int], num_steps: int, every: int | None, seed: int, *, counts_decisions: bool = True
) -> dict[str, Any]:
    """Return what a training of this size (layers, stages) takes.

    Args:
        every: steps from one profile to the next; None for as many as ``PipelineBalancer`` chooses by itself.
    """
    num_layers, num_stages = size
    job = replace(job_of(case, num_steps, num_layers, num_stages, seed), counts_decisions=counts_decisions)
    micro = job.micro_batches
    static = job.static()
    asked = 1 if job.changing.changes or case in STRAGGLERS else max(num_steps // _ASKED, 1)
    oracle = job.oracle(asked)
    gain_s = (job.static(every=asked).total_s - oracle.total_s) / len(oracle.step_s)
    dense_s = job_of("dense", num_steps, num_layers, num_stages).static().total_s / num_steps
    static_s = static.total_s / num_steps
    row = {
        "case": case,
        "num_layers": num_layers,
        "num_stages": num_stages,
        "seed": seed,
        "dense_s": dense_s,
        "static_s": static_s,
        "oracle_s": static_s - gain_s,
        "hindsight_s": _hindsight_s(job, num_steps),
        "foreseen_s": job.foreseen().total_s / num_steps,
        "idle": [_idle(trace.bubble_ratios) for trace in (static, oracle)],
        "inherent_idle": (num_stages - 1) / (micro + num_stages - 1),
    }
    for method in RULES:
        begin = time.perf_counter()
        trace = job.balanced(method, every, counts_work=case in COUNTED)
        row[method] = {
            "step_s": trace.total_s / num_steps,
            "share": (static_s - trace.total_s / num_steps) / gain_s if gain_s > 0.0 else float("nan"),
            "idle": _idle(trace.bubble_ratios),
            "moves": trace.num_moves,
            "overhead": trace.overhead,
            "simulated_in_s": time.perf_counter() - begin,
        }
    return row


def _hindsight_s(job: Job, num_steps: int) -> float:
    loads, divisions = job.loads(), {job.even}
    for steps in (slice(None), slice(-1, None)):
        forward, backward = loads.forward_s[steps].mean(axis=0), loads.backward_s[steps].mean(axis=0)
        load = PipelineLoad.of(forward + backward, job.num_stages, speeds=job.speeds[steps].mean(axis=0))
        divisions.add(shortest_partition(load, forward, backward, job.micro_batches, "1f1b").boundaries)
    return min(job.static(division).total_s for division in divisions) / num_steps


def _idle(ratios: Sequence[float]) -> float:
    """In the last quarter."""
    return float(np.mean(ratios[3 * len(ratios) // 4 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = [*changing_layers.CASES, *STRAGGLERS]
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--profile-every", type=int, default=None, help="by default as PipelineBalancer chooses")
    parser.add_argument("--seeds", type=int, default=3, help="models whose layers differ by chance")
    parser.add_argument("--free-decisions", action="store_true", help="decisions take no time")
    parser.add_argument("--only", nargs="+", choices=cases, default=cases)
    parser.add_argument("--sizes", nargs="+", default=[f"{layers}x{stages}" for layers, stages in SIZES])
    options = parser.parse_args()
    rows = []
    for case in options.only:
        for size in options.sizes:
            num_layers, num_stages = map(int, size.split("x"))
            seeds = range(options.seeds if case in SEEDED else 1)
            of_size = [
                row_of(
                    case,
                    (num_layers, num_stages),
                    options.steps,
                    options.profile_every,
                    seed,
                    counts_decisions=not options.free_decisions,
                )
                for seed in seeds
            ]
            rows += of_size
            print(_cells(of_size), flush=True)
    Console(width=200).print(table_of(rows))
    save("pipeline_simulated", {**vars(options), "rows": rows})


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each case and size: of mean steps over the seeds; beside shares the one of the worst seed."""
    table = Table(
        *("case", "layers x stages", "step, ms: dense", "static", "hindsight", "diffusion", "partition", "oracle"),
        *("share: partition", "diffusion", "foreseen", "over static", "over dense", "paper"),
        *("idle, %: inherent, static, partition, oracle", "moves", "overhead, %"),
    )
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["num_layers"], row["num_stages"]), []).append(row)
    for group in groups.values():
        table.add_row(*_cells(group))
    return table


def _cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    def mean(*keys: str) -> float:
        values = []
        for row in rows:
            value: Any = row
            for key in keys:
                value = value[key]
            values.append(float(value))
        return statistics.fmean(values)

    removable_s = mean("static_s") - mean("oracle_s")
    is_removable = removable_s >= _LEAST_REMOVABLE * mean("static_s")

    def share(method: str) -> str:
        if not is_removable:
            return f"({100 * removable_s / mean('static_s'):.1f} % removable)"
        pooled = (mean("static_s") - mean(method, "step_s")) / removable_s
        least = f" (least {min(row[method]['share'] for row in rows):.2f})"
        return f"{pooled:.2f}" + (least if len(rows) > 1 else "")

    first = rows[0]
    milliseconds = [
        f"{1e3 * mean(*keys):.0f}"
        for keys in (("dense_s",), ("static_s",), ("hindsight_s",), ("diffusion", "step_s"), ("partition", "step_s"))
    ]
    idle = (
        mean("inherent_idle"),
        statistics.fmean(row["idle"][0] for row in rows),
        mean("partition", "idle"),
        statistics.fmean(row["idle"][1] for row in rows),
    )
    return [
        first["case"],
        f"{first['num_layers']} x {first['num_stages']}",
        *milliseconds,
        f"{1e3 * mean('oracle_s'):.0f}",
        share("partition"),
        share("diffusion"),
        f"{(mean('static_s') - mean('foreseen_s')) / removable_s:.2f}" if is_removable else "",
        f"{mean('static_s') / mean('partition', 'step_s'):.2f}",
        f"{mean('dense_s') / mean('partition', 'step_s'):.2f}",
        PAPER.get(first["case"], ""),
        ", ".join(f"{100 * part:.0f}" for part in idle),
        f"{mean('partition', 'moves'):.0f}",
        f"{100 * mean('partition', 'overhead'):.1f}",
    ]


if __name__ == "__main__":
    main()
