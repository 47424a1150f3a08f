"""What a run would do, found out on any machine: no process group, the model on torch's meta device."""

from __future__ import annotations

import os

import numpy as np
from rich.console import Console
from rich.table import Table

from lm_examples.microbatches.config import RunConfig
from lm_examples.microbatches.padding import padding_efficiency
from lm_examples.microbatches.run import load_samples
from zeroresize.microbatch.cost_table import CostTable
from zeroresize.policy.microbatches.planning import plan_iteration

#: Mini-batches that stand for all.
_NUM_SAMPLED = 4


def dry_run(config: RunConfig, num_ranks: int = 2, *, console: Console | None = None) -> None:
    """Check ``config`` for so many ranks and print, on rank 0 if under torchrun, samples and, with costs, plans.

    Raises:
        ValueError: naming what does not fit.
    """
    if num_ranks < 1:
        raise ValueError(f"--ranks {num_ranks}: at least 1 is needed")
    config.validate_ranks(num_ranks)
    load_samples(config)
    tables = [_samples_table(config)]
    if config.microbatches.costs is not None:
        tables.append(_plans_table(config, CostTable.load(config.microbatches.costs)))
    if os.environ.get("RANK", "0") == "0":
        (console or Console()).print(*tables)


def _samples_table(config: RunConfig) -> Table:
    table = Table(title="samples of a mini-batch", title_justify="left")
    for heading in ("iteration", "samples", "tokens", "median length", "longest", "padding, all to the longest"):
        table.add_column(heading, justify="right")
    for iteration in range(_NUM_SAMPLED):
        lengths = config.lengths(iteration)
        padded = len(lengths) * lengths.max(axis=0).sum()
        table.add_row(
            str(iteration),
            str(len(lengths)),
            f"{lengths.sum():,}",
            ", ".join(f"{length:.0f}" for length in np.median(lengths, axis=0)),
            ", ".join(map(str, lengths.max(axis=0).tolist())),
            f"{100 * (1 - lengths.sum() / padded):.0f} %",
        )
    return table


def _plans_table(config: RunConfig, costs: CostTable) -> Table:
    boundaries = config.parallel.strategy.partition(config.num_layers).boundaries
    by_way = {way: costs.costs(boundaries)[way] for way in config.microbatches.recompute if way in costs.grids}
    table = Table(title=f"plans by costs of {costs.device}", title_justify="left")
    for heading in ("iteration", "micro-batches", "padding", "computed again", "step, ms", "activations, MB"):
        table.add_column(heading, justify="right")
    for iteration in range(_NUM_SAMPLED):
        lengths = config.lengths(iteration)
        plan = plan_iteration(iteration, lengths, by_way, config.options)
        microbatches = [each for replica in plan.replicas for each in replica.microbatches]
        most = max(max(replica.expected_bytes) for replica in plan.replicas)
        table.add_row(
            str(iteration),
            str(len(microbatches)),
            ", ".join(f"{100 * (1 - share):.1f} %" for share in padding_efficiency(microbatches, lengths)),
            plan.recomputation,
            f"{1e3 * plan.expected_s:.1f}",
            f"{most / 1e6:.1f}",
        )
    return table
