"""Changing work on 24 stages, simulated by the decisions of training: python -m scripts.bench.pipeline_simulated

The work of layers is real: each case of ``lm_examples`` trains a GPT of 48 blocks on this process, and after each step
every block tells how many multiplications it did, and whether it has a backward. What a step on 24 devices takes, and
what moves, is simulated from that (``zeroresize.simulate.pipeline_training``): a dense block takes 0.5 ms forward and
1 ms backward of a micro-batch and holds 200 MB, as of hidden size 1,024 with Adam's state; moves have 10 GB/s and 50 ms
besides, which is known from the start; a profiled step takes 5 % longer; all seconds vary by 2 %.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lm_examples.build import num_parameters
from lm_examples.cases.dynamic_case import DynamicCase
from lm_examples.config_file import READER
from lm_examples.data import load_text
from lm_examples.run import Run, prepare
from lm_examples.train import train_step
from scripts.bench.changing_work import CASES, HEADINGS, PAPER, cells_of, often, pipelines_of
from scripts.bench.common import save
from zeroresize.pipeline import Pipeline
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.centralized import balanced_partition
from zeroresize.policy.pipeline.pipeline_load import Floats, PipelineLoad
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingRule
from zeroresize.simulate.pipeline_training import LayerLoads, PipelineCluster, PipelineTrace, simulate_pipeline

MODEL = (
    "model.num_blocks=48",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.context=64",
    "training.batch_size=4",
    "training.micro_batches=2",
    "balance.mode=off",
    "output.progress=false",
)
FORWARD_S, BACKWARD_S, BLOCK_BYTES = 0.5e-3, 1e-3, 200e6
LINKS = MoveCost(seconds_per_byte=1e-10, fixed_s=0.05)
STRAGGLERS = {"χ = 2": 2.0, "χ = 4": 4.0}
PROFILE_EVERY = 10


def recorded(case: str, steps: int) -> tuple[LayerLoads, Floats, set[int]]:
    """What layers did in each step of a training on this process, their parameters [L], and behind which steps the
    case has said that their work changes."""
    settings = [] if case in STRAGGLERS else CASES[case](1, steps)
    with tempfile.TemporaryDirectory() as folder:
        changes_of_config = [*MODEL, *settings, f"training.steps={steps}", f"output.folder={folder}/run"]
        arguments = ["--config", "small", *(part for one in changes_of_config for part in ("--set", one))]
        config = READER.from_arguments(READER.argument_parser().parse_args(arguments))
        assert dist.group.WORLD is not None
        run = prepare(config, load_text(config), dist.group.WORLD, resume=False)
        sizes = np.array([float(num_parameters(layer)) for layer in run.pipeline.layers])
        forward, backward, changes = [], [], set()
        run.case = _Watched(run.case, changes)  # type: ignore[assignment]
        run.clock.start()
        for step in range(1, steps + 1):
            trains_L = [any(one.requires_grad for one in layer.parameters()) for layer in run.pipeline.layers]
            run.step = step
            train_step(run)
            work_L = _work(run)
            forward.append(FORWARD_S * work_L)
            backward.append(BACKWARD_S * work_L * np.maximum.accumulate(trains_L))  # no graph before the first of them
        run.held.close()
    bytes_L = BLOCK_BYTES * sizes / sizes[1]
    return LayerLoads(np.array(forward), np.array(backward), bytes_L), sizes, changes


class _Watched:
    """A case whose changes are written down, as steps from 0."""

    def __init__(self, case: DynamicCase, changes: set[int]) -> None:
        self._case, self._changes = case, changes

    def after_step(self, pipeline: Pipeline, optimizer: torch.optim.Optimizer, step: int, loss: float | None) -> bool:
        has_changed = self._case.after_step(pipeline, optimizer, step, loss)
        if has_changed:
            self._changes.add(step - 1)
        return has_changed


def _work(run: Run) -> Floats:
    """[L] of the last forward, as a share of a dense block's; an embedding multiplies nothing."""
    model = run.config.model
    block = 4 * model.hidden_size**2 + 2 * model.hidden_size * (model.feed_forward_size + model.context)
    head = model.hidden_size * model.vocabulary / block
    return np.array([0.0, *(float(one.work) for one in list(run.pipeline.layers)[1:-1]), head])


def traces(
    loads: LayerLoads, sizes: Floats, changes: set[int], cluster: PipelineCluster, micro: int, every: int
) -> dict[str, PipelineTrace]:
    """Static and balanced pipelines on the same cluster."""
    num_layers, stages = len(sizes), cluster.num_stages
    uniform = Partition.uniform(num_layers, stages).boundaries
    by_size = balanced_partition(PipelineLoad.of(sizes.tolist(), stages)).boundaries

    def run(boundaries: Sequence[int], rule: RebalancingRule | None = None) -> PipelineTrace:
        return simulate_pipeline(loads, cluster, boundaries, num_microbatches=micro, rule=rule, changes=changes)

    rules = {
        "partition": RebalancingRule("time", "partition", "1f1b", micro, every),
        "diffusion": RebalancingRule("time", "diffusion", "1f1b", micro, every),
    }
    static = {"uniform": run(uniform), "by parameters": run(by_size)}
    return static | {name: run(uniform, rule) for name, rule in rules.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[24, 8])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--micro-batches", type=int, default=48)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'store'}", rank=0, world_size=1)
        for case in options.only:
            loads, sizes, changes = recorded(case, options.steps)
            for stages in options.stages:
                speeds = np.ones((options.steps, stages))
                speeds[options.steps // 8 :, stages // 2] = 1.0 / STRAGGLERS.get(case, 1.0)
                cluster = PipelineCluster(stages, speeds, LINKS, profiled_share=0.05, noise=0.02)
                every = 1 if often(case) else PROFILE_EVERY
                for name, trace in traces(loads, sizes, changes, cluster, options.micro_batches, every).items():
                    rows.append(_row(case, stages, name, trace))
                    print(rows[-1], flush=True)
        dist.destroy_process_group()
    Console(width=140).print(table_of(rows))
    save("pipeline_simulated", {"steps": options.steps, "micro_batches": options.micro_batches, "rows": rows})


def _row(case: str, stages: int, name: str, trace: PipelineTrace) -> dict[str, Any]:
    steps = len(trace.step_s)
    return {
        "case": case,
        "num_stages": stages,
        "variant": name,
        "step_s": trace.total_s / steps,
        "last_step_s": float(np.mean(trace.step_s[3 * steps // 4 :])),
        "first_bubbles": trace.bubble_ratios[0],
        "last_bubbles": float(np.mean(trace.bubble_ratios[3 * steps // 4 :])),
        "moves": trace.num_moves,
        "overhead": trace.overhead,
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("stages", "case", "pipeline", *HEADINGS, "moves", "overhead, %", "faster", "paper")
    for row in rows:
        others = pipelines_of(row, rows)
        static = min(other["step_s"] for other in others[:2])
        is_static = row in others[:2]
        table.add_row(
            *cells_of(row),
            "" if is_static else str(row["moves"]),
            "" if is_static else f"{100 * row['overhead']:.1f}",
            "" if is_static else f"{static / row['step_s']:.2f}",
            PAPER.get(row["case"], "") if row is others[-1] else "",
            end_section=row is others[-1],
        )
    return table


if __name__ == "__main__":
    main()
