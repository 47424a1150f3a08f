"""Changing work on 8 to 24 stages, simulated by the decisions of training: python -m scripts.bench.pipeline_simulated

Models are numbers (``scripts.simulated.changing_layers``): which share of a dense layer's work each layer does in
each step, as DynMo's paper says, with spreads that its docstrings tell. A dense layer takes 0.5 ms forward and 1 ms
backward of a micro-batch, of which there are four for each stage, and holds 200 MB, as of hidden size 1,024 with Adam's
state; moves have 10 GB/s and 50 ms besides, which is known from the start; a profiled step takes 5 % longer, a decision
0.6 ms for each stage and 1.2 ms more where the best boundaries are looked for; all seconds vary by 2 %. Layers begin
evenly divided, which is also the division by parameters.

*Share* is that of what could be gained: (static - balanced) / (static - oracle). The oracle has the best division in
every step, for nothing. *Hindsight*: the best that a fixed division could have been, of the mean work, of the last
step's, or the even one. *Over dense*: against the even division of a model whose layers all work fully, with which the
paper compares early exit and sparse attention.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.bench.common import parser_of, run, save, show
from scripts.simulated import changing_layers
from scripts.simulated.pipeline_training import simulate_oracle, simulate_pipeline
from scripts.simulated.pipelines import LayerLoads, PipelineCluster
from scripts.simulated.pipelines import PipelineTrace as Trace
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.division import PipelineLoad, shortest_partition
from zeroresize.policy.pipeline.profile_cadence import LEAST_BLOCKS, MAX_MEASURING
from zeroresize.policy.pipeline.rebalancing import RebalancingRule

FORWARD_S, BACKWARD_S, LAYER_BYTES = 0.5e-3, 1e-3, 200e6
LINKS = MoveCost(seconds_per_byte=1e-10, fixed_s=0.05)
PROFILED_SHARE, NOISE = 0.05, 0.02
#: Of each stage.
DECISION_S, SEARCH_S, MICRO_BATCHES_PER_STAGE = 0.6e-3, 1.2e-3, 4
#: How many times as long the stage in the middle takes from an eighth of the steps to half of them.
STRAGGLERS = {"χ = 2": 2.0, "χ = 4": 4.0}
#: Speed-ups of DynMo's Fig. 3, of dynamic balancing over the better static partition.
PAPER = {
    "pruning": "3.18",
    "freezing": "2.23",
    "early exit": "4.52",
    "mixture of depths": "1.17",
    "mixture of experts": "1.21 to 1.23",
    "sparse attention": "2.71 to 4.02",
}
#: Of which the layers differ by chance; all but the first count their work.
SEEDED = ("pruning", "sparse attention", "mixture of experts", "mixture of depths")
#: Steps of ever changing work on which the oracle is asked.
_ASKED = 100
#: Share of a step of which less is not worth a share: the balancer takes less than 2 % for noise.
_LEAST_REMOVABLE = 0.02


@dataclass(frozen=True)
class Job:
    """A training: the work of its layers, [N, L], and the speeds of its stages, [N, S]."""

    changing: changing_layers.ChangingLayers
    speeds: np.ndarray[Any, np.dtype[np.float64]]

    @property
    def num_stages(self) -> int:
        return int(self.speeds.shape[1])

    @property
    def micro_batches(self) -> int:
        return MICRO_BATCHES_PER_STAGE * self.num_stages

    @property
    def even(self) -> tuple[int, ...]:
        return Partition.uniform(self.changing.forward.shape[1], self.num_stages).boundaries

    def loads(self, every: int = 1) -> LayerLoads:
        """What layers take in one of ``every`` steps."""
        forward, backward = self.changing.forward[::every], self.changing.backward[::every]
        return LayerLoads(FORWARD_S * forward, BACKWARD_S * backward, np.full(forward.shape[1], LAYER_BYTES))

    def cluster(self, every: int = 1) -> PipelineCluster:
        """Its devices in one of ``every`` steps."""
        stages = self.num_stages
        return PipelineCluster(
            stages, self.speeds[::every], LINKS, profiled_share=PROFILED_SHARE, decision_s=DECISION_S * stages,
            search_s=SEARCH_S * stages, noise=NOISE,
        )  # fmt: skip

    def static(self, boundaries: Sequence[int] | None = None, every: int = 1) -> Trace:
        """No layer moves; evenly divided unless boundaries are given."""
        micro = self.micro_batches
        return simulate_pipeline(
            self.loads(every), self.cluster(every), boundaries or self.even, num_microbatches=micro
        )

    def balanced(self, *, counts_work: bool) -> Trace:
        """Measured as often as ``PipelineBalancer`` chooses."""
        rule = RebalancingRule("time", "1f1b", self.micro_batches, LEAST_BLOCKS)
        return simulate_pipeline(
            self.loads(), self.cluster(), self.even, num_microbatches=self.micro_batches, rule=rule,
            changes=self.changing.changes, max_measuring=MAX_MEASURING, counts_work=counts_work,
        )  # fmt: skip

    def hindsight_s(self) -> float:
        """Seconds of all steps by the best fixed division."""
        loads, divisions = self.loads(), {self.even}
        for steps in (slice(None), slice(-1, None)):
            forward, backward = loads.forward_s[steps].mean(axis=0), loads.backward_s[steps].mean(axis=0)
            load = PipelineLoad.of(forward + backward, self.num_stages, speeds=self.speeds[steps].mean(axis=0))
            divisions.add(shortest_partition(load, forward, backward, self.micro_batches, "1f1b").boundaries)
        return min(self.static(division).total_s for division in divisions)


def job_of(case: str, num_steps: int, num_layers: int, num_stages: int, seed: int = 0) -> Job:
    """The training of a case, also of "dense" or of one with a slow stage."""
    speeds = np.ones((num_steps, num_stages))
    if case in STRAGGLERS:
        speeds[num_steps // 8 : num_steps // 2, num_stages // 2] = 1.0 / STRAGGLERS[case]
    if case in STRAGGLERS or case == "dense":
        return Job(changing_layers.dense(num_steps, num_layers), speeds)
    options = {"seed": seed} if case in SEEDED else {}
    return Job(changing_layers.CASES[case](num_steps, num_layers, **options), speeds)


def row_of(case: str, num_layers: int, num_stages: int, num_steps: int, seed: int) -> dict[str, Any]:
    """What a training of this size takes, seconds of a mean step."""
    job = job_of(case, num_steps, num_layers, num_stages, seed)
    static, balanced = job.static(), job.balanced(counts_work=case in SEEDED[1:])
    asked = 1 if job.changing.changes or case in STRAGGLERS else max(num_steps // _ASKED, 1)
    oracle = simulate_oracle(job.loads(asked), job.cluster(asked), num_microbatches=job.micro_batches)
    gain_s = (job.static(every=asked).total_s - oracle.total_s) / len(oracle.step_s)
    static_s, balanced_s = static.total_s / num_steps, balanced.total_s / num_steps
    return {
        "dense_s": job_of("dense", num_steps, num_layers, num_stages).static().total_s / num_steps,
        "static_s": static_s,
        "hindsight_s": job.hindsight_s() / num_steps,
        "balanced_s": balanced_s,
        "oracle_s": static_s - gain_s,
        "share": (static_s - balanced_s) / gain_s if gain_s > 0.0 else float("nan"),
        # In the last quarter; a pipeline's inherent share comes first.
        "idle": [
            (num_stages - 1) / (job.micro_batches + num_stages - 1),
            *(float(np.mean(trace.bubble_ratios[3 * len(trace.bubble_ratios) // 4 :])) for trace in (static, balanced)),
        ],
        "moves": balanced.num_moves,
        "overhead": balanced.overhead,
    }


def cells_of(case: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of mean steps over the seeds; beside the share the one of the worst seed."""
    mean = {name: statistics.fmean(row[name] for row in rows) for name in rows[0] if name != "idle"}
    removable_s = mean["static_s"] - mean["oracle_s"]
    share = f"({100 * removable_s / mean['static_s']:.1f} % removable)"
    if removable_s >= _LEAST_REMOVABLE * mean["static_s"]:
        share = f"{(mean['static_s'] - mean['balanced_s']) / removable_s:.2f}"
        share += f" (least {min(row['share'] for row in rows):.2f})" if len(rows) > 1 else ""
    return [
        *(f"{1e3 * mean[f'{name}_s']:.0f}" for name in ("dense", "static", "hindsight", "balanced", "oracle")),
        share,
        f"{mean['static_s'] / mean['balanced_s']:.2f}",
        f"{mean['dense_s'] / mean['balanced_s']:.2f}",
        PAPER.get(case, ""),
        ", ".join(f"{100 * idle:.0f}" for idle in np.mean([row["idle"] for row in rows], axis=0)),
        f"{mean['moves']:.0f}",
        f"{100 * mean['overhead']:.1f}",
    ]


def main() -> None:
    cases = [*changing_layers.CASES, *STRAGGLERS]
    parser = parser_of(__doc__, steps=2000, seeds=3, sizes=["24x8", "24x16", "48x8", "48x16", "48x24"])
    parser.add_argument("--only", nargs="+", choices=cases, default=cases)
    options = parser.parse_args()
    headings = ["case", "layers x stages", "step, ms: dense", "static", "hindsight", "balanced", "oracle", "share"]
    headings += ["over static", "over dense", "paper", "idle, %: inherent, static, balanced", "moves"]
    table, results = [], []
    for case in options.only:
        for size in options.sizes:
            layers, stages = map(int, size.split("x"))
            seeds = range(options.seeds if case in SEEDED else 1)
            rows = [row_of(case, layers, stages, options.steps, seed) | {"seed": seed} for seed in seeds]
            table.append([case, size, *cells_of(case, rows)])
            results += [{"case": case, "size": size, **row} for row in rows]
            print(table[-1], flush=True)
    show("", [*headings, "overhead, %"], table)
    save("pipeline_simulated", {**vars(options), "rows": results})


if __name__ == "__main__":
    run(main)
