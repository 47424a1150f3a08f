"""Six models whose work changes, and a slow stage, on 2 and 4 stages: python -m scripts.bench.pipeline_cases

Each case is trained three times by ``lm_examples.train``: static with equally many layers on each stage, static with
equally many parameters, and balanced from there on, measured in every tenth step. Blocks compute for real and sleep
for as long as their multiplications take on a device of one speed (``sleep.forward_s``), so stages wait for nobody's
core. Steps are means over the whole run, profiles, decisions, moves and what the case itself does included; the last
ones are those after everything has changed. Bubbles are the share of stages' time in which none of their blocks sleeps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.bench.changing_work import CASES, HEADINGS, MODEL, PAPER, cells_of, pipelines_of
from scripts.bench.common import save
from zeroresize.plan.partition import Partition
from zeroresize.utils.json_lines import read_json_lines

#: Sleeps are not the processor's time, by which a profile's cost is measured: it would seem many times dearer.
_MEASURING = ("balance.profile_every=10", "balance.max_measuring=null")
VARIANTS = {
    "uniform": ("pipeline.boundaries=uniform", "balance.mode=off"),
    "by parameters": ("pipeline.boundaries=parameters", "balance.mode=off"),
    "balanced": ("pipeline.boundaries=parameters", "balance.mode=on", *_MEASURING),
}


def trained(settings: Sequence[str], num_stages: int) -> dict[str, Any]:
    """The summary and all logged lines of a run of its own processes."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [*settings, f"output.folder={folder}/run", "output.progress=false"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_stages)]
        command += ["-m", "lm_examples.train", "--config", "small"]
        command += [part for one in settings for part in ("--set", one)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
        run = Path(folder) / "run"
        return {
            **json.loads((run / "summary.json").read_text(encoding="utf-8")),
            "lines": read_json_lines(run / "metrics.jsonl"),
            "records": [one for one in read_json_lines(run / "pipeline.jsonl") if one["kind"] == "move"],
        }


def measured(case: str, variant: str, num_stages: int, steps: int, forward_s: float) -> dict[str, Any]:
    """One row of the table."""
    settings = [*MODEL, *CASES[case](num_stages, steps), *VARIANTS[variant]]
    settings += [f"training.steps={steps}", f"sleep.forward_s={forward_s}"]
    run = trained(settings, num_stages)
    last = [line for line in run["lines"] if line["step"] > 3 * steps // 4]
    return {
        "case": case,
        "variant": variant,
        "num_stages": num_stages,
        "step_s": run["mean_step_s"],
        "last_step_s": statistics.fmean(line["step_s"] for line in last),
        "first_bubbles": run["lines"][0]["bubble_ratio"],
        "last_bubbles": statistics.fmean(line["bubble_ratio"] for line in last),
        "moves": len(run["records"]),
        "move_s": sum(line["seconds"] for line in run["records"]),
        "boundaries": run["boundaries"],
        "loss": run["loss"],
        "figures": run["figures"],
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("stages", "case", "partition", *HEADINGS, "moves", "layers", "faster", "paper")
    for row in rows:
        static = min(other["step_s"] for other in pipelines_of(row, rows) if other["variant"] != "balanced")
        is_balanced = row["variant"] == "balanced"
        table.add_row(
            *cells_of(row),
            str(row["moves"]) if is_balanced else "",
            " ".join(map(str, Partition(tuple(row["boundaries"])).counts)),
            f"{static / row['step_s']:.2f}" if is_balanced else "",
            PAPER.get(row["case"], "") if is_balanced else "",
            end_section=is_balanced,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--forward-s", type=float, default=0.0015, help="that a dense block sleeps in forward")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args()
    rows = []
    for num_stages in options.stages:
        for case in options.only:
            for variant in VARIANTS:
                rows.append(measured(case, variant, num_stages, options.steps, options.forward_s))
                print(json.dumps(rows[-1]), flush=True)
    Console(width=140).print(table_of(rows))
    save("pipeline_cases", {"steps": options.steps, "forward_s": options.forward_s, "rows": rows})


if __name__ == "__main__":
    main()
