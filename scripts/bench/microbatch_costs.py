"""What layers take by size and length, how well that is predicted, and steps: python -m scripts.bench.microbatch_costs

Layers of a decoder-only and an encoder-decoder model are measured on a power-of-two grid, with nothing and with whole
layers computed again. At points between, chosen at random, the grid's linear values are compared with measured ones.
Then FLAN-like mini-batches are planned and trained for real on this one device, all layers as one stage: seconds and
peak memory of an iteration beside what was predicted. On a GPU peak memory is the allocator's; on a CPU tensors are
counted operation by operation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lm_examples.microbatches.blocks import ModelConfig, summed_loss
from lm_examples.microbatches.gpt import gpt_layers
from lm_examples.microbatches.t5 import t5_layers
from lm_examples.task_lengths import mini_batch_of_pairs
from scripts.bench.common import machine, save
from zeroresize.measure.memory_meter import memory_meter
from zeroresize.microbatch.cost_table import CostTable
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.microbatch.profile import LayerProbe, ProfiledShapes, device_name, handed_by, kinds_of, measure_layers
from zeroresize.policy.microbatches.iteration_plan import ReplicaPlan
from zeroresize.policy.microbatches.planning import plan_iteration
from zeroresize.policy.microbatches.planning_options import PlanningOptions
from zeroresize.runtime.activations import find_activations
from zeroresize.runtime.stage import Stage

#: Of the paper's Table 1, with fewer layers: those of one kind cost the same.
ON_GPU = {
    "gpt": ModelConfig(kind="gpt", num_blocks=4, hidden_size=4096, num_heads=32, mlp_size=16384, vocabulary=32768),
    "t5": ModelConfig(
        kind="t5", num_blocks=2, hidden_size=1024, num_heads=128, head_size=128, mlp_size=65536, vocabulary=32768
    ),
}
ON_CPU = {
    "gpt": ModelConfig(kind="gpt", num_blocks=4, hidden_size=128, num_heads=4),
    "t5": ModelConfig(kind="t5", num_blocks=2, hidden_size=128, num_heads=4),
}
_MAKE: dict[str, Any] = {"gpt": (gpt_layers, PaddedBatch), "t5": (t5_layers, PairBatch)}
_NAMES = {"gpt": ("size", "length"), "t5": ("size", "source", "target")}


class Model:
    """Layers of one kind of model on a device."""

    def __init__(self, kind: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.kind, self.config, self.device = kind, config, device
        torch.manual_seed(0)
        with device:
            self.layers = nn.ModuleList(_MAKE[kind][0](config)).to(dtype)

    def batch_of(self, sizes: Any) -> Any:
        """A micro-batch of these sizes, on the device that is the default."""
        return _MAKE[self.kind][1].hollow(sizes)

    def on_device(self, sizes: Any) -> Any:
        return self.batch_of(sizes).to(self.device)

    def probe_of(self, number: int, recomputation: str) -> LayerProbe:
        handed = [None, *find_activations(self.layers, self.batch_of, _NAMES[self.kind]), None]
        around = handed[number], handed[number + 1]
        return LayerProbe(self.layers[number], around, self.on_device, summed_loss, recomputation, self.device)


def measured_table(model: Model, shapes: ProfiledShapes, recomputations: Sequence[str]) -> CostTable:
    def batch_of(sizes: Any) -> Any:  # shapes are found on meta
        is_meta = torch.empty(0).is_meta
        return model.batch_of(sizes) if is_meta else model.on_device(sizes)

    grids, activations = measure_layers(
        dict(enumerate(model.layers)),
        model.layers,
        batch_of,
        shapes,
        loss=summed_loss,
        recomputations=recomputations,
        device=model.device,
    )
    return CostTable(kinds_of(model.layers), shapes.names, grids, device_name(model.device), handed_by(activations))


def errors_between(model: Model, table: CostTable, shapes: ProfiledShapes, num_points: int) -> dict[str, Any]:
    """Mean and largest relative errors of blocks, at points between those of the grid."""
    random = np.random.default_rng(0)
    number = len(model.layers) - 2
    grid = table.grids["none"][table.kinds[number]]
    points: list[tuple[int, list[int]]] = []
    while len(points) < num_points:
        rows = int(np.exp(random.uniform(0.0, np.log(shapes.most_rows))))
        lengths = [int(np.exp(random.uniform(np.log(shapes.shortest), np.log(most)))) for most in shapes.longest]
        if rows * sum(lengths) <= shapes.most_tokens:
            points.append((max(rows, 1), lengths))
    probe = model.probe_of(number, "none")
    measured = np.array(
        [probe.measure(dict(zip(shapes.names, [rows, *lengths], strict=True))) for rows, lengths in points]
    ).T
    sizes, lengths_KA = np.array([rows for rows, _ in points]), np.array([lengths for _, lengths in points])
    result: dict[str, Any] = {"measured": measured.tolist(), "rows": sizes.tolist(), "lengths": lengths_KA.tolist()}
    predicted = grid.values(sizes, lengths_KA)
    compared = {"seconds": (predicted[:2].sum(axis=0), measured[:2].sum(axis=0)), "bytes": (predicted[2], measured[2])}
    for what, (expected, taken) in compared.items():
        errors = np.abs(expected / taken - 1.0)  # infinite or not a number where memory did not hold a point
        errors = errors[np.isfinite(errors)]
        result[what] = [float(errors.mean()), float(errors.max())]
    return result


def trained(model: Model, replica: ReplicaPlan, recomputation: str, repetitions: int) -> tuple[float, float]:
    """Seconds of an iteration, and bytes at its peak beyond weights and gradients."""
    batches = [
        model.on_device(dict(zip(_NAMES[model.kind], [each.size, *each.lengths], strict=True)))
        for each in replica.microbatches
    ]
    for parameter in model.layers.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stage = Stage(list(model.layers), 0, [], None, model.device, recompute=recomputation)
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        stage.train(replica.stages[0], batches, summed_loss)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    with memory_meter(model.device) as meter:
        stage.train(replica.stages[0], batches, summed_loss)
        return min(times), float(meter.most())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=24, help="between those of the grid")
    parser.add_argument("--batches", type=int, default=10, help="mini-batches that are planned and trained")
    parser.add_argument("--only", nargs="+", choices=list(_MAKE), default=list(_MAKE))
    parser.add_argument("--save", type=Path, help="folder for the tables of costs")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    torch.set_num_threads(1 if not is_gpu else torch.get_num_threads())
    table = Table("model", "seconds between points: mean, largest", "bytes: mean, largest")
    steps = Table(
        "model", "iterations", "seconds: mean, largest error", "peak memory: mean, largest error", "longest, s"
    )
    result: dict[str, Any] = {"machine": machine(), "device": torch.cuda.get_device_name() if is_gpu else "CPU"}
    for kind in options.only:
        begin = time.perf_counter()
        model = Model(kind, (ON_GPU if is_gpu else ON_CPU)[kind], device, torch.bfloat16 if is_gpu else torch.float32)
        longest = (4096, 1024)[: len(_NAMES[kind]) - 1] if is_gpu else (512, 128)[: len(_NAMES[kind]) - 1]
        most_tokens = (32768 if kind == "gpt" else 16384) if is_gpu else 4096
        shapes = ProfiledShapes(_NAMES[kind], 64, longest, shortest=64 if is_gpu else 32, most_tokens=most_tokens)
        costs = measured_table(model, shapes, ("none", "layers"))
        print(f"{kind}: measured in {time.perf_counter() - begin:.0f} s", flush=True)
        if options.save is not None:
            options.save.mkdir(parents=True, exist_ok=True)
            costs.save(options.save / f"{kind}.json")
        of_points = errors_between(model, costs, shapes, options.points)
        errors = (of_points[what] for what in ("seconds", "bytes"))
        table.add_row(kind, *(", ".join(f"{100 * error:.1f} %" for error in of_kind) for of_kind in errors))
        rows = iterations(model, costs, longest, options.batches, is_gpu=is_gpu)
        seconds, memory = ([abs(row[what] - 1.0) for row in rows] for what in ("seconds", "bytes"))
        steps.add_row(
            kind,
            str(len(rows)),
            f"{100 * statistics.fmean(seconds):.1f} %, {100 * max(seconds):.1f} %",
            f"{100 * statistics.fmean(memory):.1f} %, {100 * max(memory):.1f} %",
            f"{max(row['measured_s'] for row in rows):.3f}",
        )
        result[kind] = {"points": of_points, "iterations": rows}
        del model
    console = Console(width=140)
    console.print(table, steps)
    save("microbatch_costs", result)


def iterations(
    model: Model, costs: CostTable, longest: tuple[int, ...], num_batches: int, *, is_gpu: bool
) -> list[dict[str, float]]:
    """Predicted over measured seconds and bytes of planned iterations."""
    random, rows = np.random.default_rng(1), []
    by_recomputation = costs.costs((0, len(model.layers)))
    for number in range(num_batches):
        recomputation = ("none", "layers")[number % 2]
        tokens = 16384 if is_gpu else 2048
        lengths = mini_batch_of_pairs(
            tokens,
            longest[0],
            random,
            joined=model.kind == "gpt",
            max_target=longest[-1] if model.kind == "t5" else None,
        )
        plan = plan_iteration(number, lengths, {recomputation: by_recomputation[recomputation]}, PlanningOptions())
        (replica,) = plan.replicas
        seconds, peak = trained(model, replica, recomputation, 3)
        rows.append(
            {
                "seconds": replica.expected_s / seconds,
                "bytes": replica.expected_bytes[0] / peak if peak else float("nan"),
                "measured_s": seconds,
                "measured_bytes": peak,
                "microbatches": float(len(replica.microbatches)),
            }
        )
    return rows


if __name__ == "__main__":
    main()
