"""Six models whose work changes, and a slow stage: torchrun --nproc-per-node 4 -m scripts.bench.pipeline_cases

Each case is trained as ``lm_examples.train`` does, in several pipelines: static with equally many layers on each stage,
static with equally many parameters, and balanced from there on, measured in every tenth step by default; where nothing
changes, static once more, for how much equal pipelines differ. They take turns of five steps on the same ranks, so that
what else the machine does is the same for all. Blocks compute for real and sleep for as long as their multiplications
take on a device of one speed (``sleep.forward_s``), so stages wait for nobody's core. Steps are means over the whole
run, profiles, decisions, moves and what the case itself does included; the last ones are those of the last quarter.
Bubbles are the share of stages' time in which none of their blocks sleeps.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import ProcessGroup

from lm_examples.config import RunConfig
from lm_examples.config_file import load_config
from lm_examples.data import load_text
from lm_examples.run import Run, prepare
from lm_examples.train import train_step
from scripts.bench.changing_work import CASES, HEADINGS, MODEL, PAPER, cells_of, pipelines_of
from scripts.bench.common import bootstrap_interval, gather_from_ranks, save
from vit_examples.harness.program import join
from zeroresize.plan.partition import Partition
from zeroresize.utils.json_lines import read_json_lines

#: Sleeps are not the processor's time, by which a profile's cost is measured: it would seem many times dearer.
_MEASURING = "balance.max_measuring=null"
BALANCED, AGAIN = "balanced", "by parameters, again"
VARIANTS = {
    "uniform": ("pipeline.boundaries=uniform", "balance.mode=off"),
    "by parameters": ("pipeline.boundaries=parameters", "balance.mode=off"),
    AGAIN: ("pipeline.boundaries=parameters", "balance.mode=off"),
    BALANCED: ("pipeline.boundaries=parameters", "balance.mode=on", _MEASURING),
}
_TURN = 5


def measured(case: str, options: argparse.Namespace, group: ProcessGroup, folder: Path) -> list[dict[str, Any]]:
    """Rows of the table, of all pipelines of a case; collective."""
    steps: int = options.steps
    runs: dict[str, Run] = {}
    for variant in VARIANTS:
        if variant == AGAIN and case != "nothing changes":
            continue
        settings = [*MODEL, *CASES[case](group.size(), steps), *VARIANTS[variant]]
        settings += [f"training.steps={steps}", f"sleep.forward_s={options.forward_s}"]
        settings.append(f"balance.profile_every={options.profile_every}")
        settings += [f"output.folder={folder}/{case}/{variant}".replace(",", ""), "output.progress=false"]
        config = load_config("small", settings)
        torch.manual_seed(0)
        runs[variant] = prepare(config, load_text(config), group, resume=False)
    rows: dict[str, dict[str, Any]] = {
        variant: {"turn_s": [], "bubbles": [], "config": run.config} for variant, run in runs.items()
    }
    for turn in range(math.ceil(steps / _TURN)):
        names = list(runs)
        for variant in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds, bubbles = _take_turn(runs[variant], min(_TURN, steps - runs[variant].step), group)
            rows[variant]["turn_s"].append(seconds)
            rows[variant]["bubbles"].append(bubbles)
    for run in runs.values():
        if run.recorder is not None:
            run.recorder.close({})
        run.held.close()
    return [_row(case, variant, runs[variant], rows[variant], group) for variant in runs]


def _take_turn(run: Run, num_steps: int, group: ProcessGroup) -> tuple[float, float]:
    """Mean seconds of the steps on rank 0, and the stages' mean share of them that nobody's block slept; collective."""
    dist.barrier(group)
    run.pace.lap()
    run.clock.lap()
    run.clock.start()
    for _ in range(num_steps):
        run.step += 1
        train_step(run)
    step_s = run.clock.lap()
    idle = gather_from_ranks(1.0 - run.pace.lap() / (num_steps * step_s))
    return gather_from_ranks(step_s)[0], statistics.fmean(idle)


def _row(case: str, variant: str, run: Run, turns: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    config: RunConfig = turns["config"]
    moves = [line for line in read_json_lines(Path(config.output.folder) / "pipeline.jsonl") if line["kind"] == "move"]
    last = 3 * len(turns["turn_s"]) // 4
    return {
        "case": case,
        "variant": variant,
        "num_stages": group.size(),
        "turn_s": turns["turn_s"],
        "step_s": statistics.fmean(turns["turn_s"]),
        "last_step_s": statistics.fmean(turns["turn_s"][last:]),
        "first_bubbles": statistics.fmean(turns["bubbles"][:2]),
        "last_bubbles": statistics.fmean(turns["bubbles"][last:]),
        "moves": len(moves),
        "move_s": math.fsum(line["seconds"] for line in moves),
        "boundaries": run.pipeline.boundaries,
    }


def faster(row: dict[str, Any], static: dict[str, Any]) -> tuple[float, tuple[float, float]]:
    """How many times as fast as a static pipeline, over the whole run; and 95 % of what turns say, turn by turn."""
    ratios = [before / after for before, after in zip(static["turn_s"], row["turn_s"], strict=True)]
    return static["step_s"] / row["step_s"], bootstrap_interval(ratios, np.mean)


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "stages", "case", "partition", *HEADINGS, "moves", "layers", "faster", "turn by turn", "last", "paper"
    )
    for row in rows:
        of_case = pipelines_of(row, rows)
        static = min((other for other in of_case if other["variant"] in list(VARIANTS)[:2]), key=lambda x: x["step_s"])
        cells = ["", "", ""]
        if row["variant"] in (AGAIN, BALANCED):
            ratio, (low, high) = faster(row, static if row["variant"] == BALANCED else of_case[1])
            last = static["last_step_s"] / row["last_step_s"]
            cells = [f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", f"{last:.2f}"]
        is_balanced = row["variant"] == BALANCED
        table.add_row(
            *cells_of(row),
            str(row["moves"]) if is_balanced else "",
            " ".join(map(str, Partition(tuple(row["boundaries"])).counts)),
            *cells,
            PAPER.get(row["case"], "") if is_balanced else "",
            end_section=is_balanced,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--forward-s", type=float, default=0.0015, help="that a dense block sleeps in forward")
    parser.add_argument("--profile-every", type=int, default=10, help="steps from one profile to the next")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    group = join(300.0)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    folders: list[Any] = [tempfile.mkdtemp() if group.rank() == 0 else None]
    dist.broadcast_object_list(folders, group=group)
    rows: list[dict[str, Any]] = []
    for case in options.only:
        rows += measured(case, options, group, Path(folders[0]))
        if group.rank() == 0:
            of_case = pipelines_of(rows[-1], rows)
            Console(width=160).print(table_of(of_case))
            name = "_".join(("pipeline_cases", *case.split()))
            save(name, {**vars(options), "rows": of_case})
    if group.rank() == 0:
        Console(width=160).print(table_of(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
