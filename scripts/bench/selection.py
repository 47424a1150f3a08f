"""What choosing columns costs: torchrun --nproc-per-node 2 -m scripts.bench.selection

For every mode and statistic: seconds spent at an epoch's end (taking the statistic, ordering the columns, installing
the plan) and in its steps (watching inputs or updates, freezing), as a share of an epoch of --epoch-steps steps; and
the memory the statistic holds, in bytes a balanced parameter. Costs are summed where they arise, not told from
differences.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import zeroresize as zr
from scripts.bench.colossalai_ranks import ColossalAIRanks
from scripts.bench.common import save
from vit_examples.config import ModelConfig
from zeroresize.convert import balanced_layers

CASES: dict[str, dict[str, Any]] = {
    "Rd": {"mode": "zero-rd"},
    "Pri variation, host": {"mode": "zero-pri", "priority": "variation", "paper": {"snapshot": "host"}},
    "Pri variation, bf16": {"mode": "zero-pri", "priority": "variation", "paper": {"snapshot": "bf16"}},
    "Pri activation": {"mode": "zero-pri", "priority": "activation"},
    "Pri path length": {"mode": "zero-pri", "priority": "path_length"},
    "PriDiff variation, host": {"mode": "zero-pridiff", "priority": "variation", "paper": {"snapshot": "host"}},
    "Rd, freeze": {"mode": "zero-rd", "pruned_update": "freeze"},
}


class Spent:
    """Seconds spent in wrapped functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def cost_of(case: dict[str, Any], arguments: argparse.Namespace, ranks: ColossalAIRanks) -> dict[str, float]:
    """Measured on this rank with γ = ½ forced on all ranks."""
    config = zr.BalanceConfig(**case, ratio=0.5, ranks="all")
    shape = ModelConfig(hidden_size=arguments.hidden, depth=arguments.depth, num_heads=12)
    trainer = ranks.trainer(shape, batch_size=arguments.batch)
    in_steps = Spent()
    optimizer = trainer.optimizer.optim
    for kind in ("pre", "post"):  # what the balancer hooks onto the optimizer is timed
        name = f"register_step_{kind}_hook"
        register = getattr(optimizer, name)
        setattr(optimizer, name, lambda hook, register=register: register(in_steps.wrap(hook)))
    zr.convert(trainer.model, process_group=ranks.group)
    balancer = zr.Balancer(trainer.model, trainer.optimizer, process_group=ranks.group, config=config)
    layers = balanced_layers(trainer.model)
    step_s, end_s = [], []
    for step in range(arguments.steps):
        for layer in layers.values():
            if layer.watch_input is not None:
                layer.watch_input = in_steps.wrap(layer.watch_input)
        step_s.append(trainer.timed_step())
        balancer.step()
        if (step + 1) % 10 == 0:
            began = time.perf_counter()
            balancer.epoch_end()
            end_s.append(time.perf_counter() - began)
    held = balancer.metrics()["balance/statistic_bytes"]
    balancer.close()
    usual_s = statistics.median(step_s)
    epoch_s = usual_s * arguments.epoch_steps
    return {
        "step_ms": 1e3 * usual_s,
        "end_ms": 1e3 * statistics.median(end_s),
        "in_step_ms": 1e3 * in_steps.seconds / arguments.steps,
        "share": (statistics.median(end_s) + arguments.epoch_steps * in_steps.seconds / arguments.steps) / epoch_s,
        "bytes_per_parameter": held / sum(layer.weight.numel() for layer in layers.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--epoch-steps", type=int, default=156, help="10,000 pictures in batches of 64")
    arguments = parser.parse_args()
    ranks = ColossalAIRanks()
    results = {name: cost_of(case, arguments, ranks) for name, case in CASES.items()}
    if ranks.rank == 0:
        table = Table(
            "selection", "step, ms", "epoch end, ms", "in a step, ms", "share of an epoch", "bytes a parameter"
        )
        for name, cost in results.items():
            table.add_row(
                name,
                f"{cost['step_ms']:.0f}",
                f"{cost['end_ms']:.1f}",
                f"{cost['in_step_ms']:.2f}",
                f"{100 * cost['share']:.2f} %",
                f"{cost['bytes_per_parameter']:.3f}",
            )
        Console(width=120).print(table)
        save(f"selection_h{arguments.hidden}_d{arguments.depth}_b{arguments.batch}", results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
