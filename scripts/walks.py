"""Which files of the package run between a measurement and what it changes: four walks, traced in small runs.

python scripts/size.py --walk

Each walk is a training of two CPU ranks. Its files are those in which functions run on rank 0 between the measurement
and the change, but for the rooms that compute and send a step as they always do.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import zeroresize as zr
from scripts.bench.common import results_of_ranks
from zeroresize import microbatch
from zeroresize.microbatch import PaddedBatch
from zeroresize.pipeline import Pipeline, PipelineBalancer
from zeroresize.strategy import LengthRange, Strategy, StrategyTrainer, SwitchableModel

PACKAGE = Path(zr.__file__).parent
NUM_RANKS, WIDTH = 2, 256
#: Rooms that compute and send.
COMPUTING = ("kernels", "layers", "runtime", "comm")


@contextmanager
def traced(files: set[str]) -> Iterator[None]:
    """Add the files of the package whose functions are called meanwhile, in every thread."""

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(str(PACKAGE)):
            files.add(code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Block(nn.Module):
    """A feed-forward block; rank 1 takes longer for those that are to be slow there."""

    def __init__(self, slow_s: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.slow_s = slow_s

    def forward(self, x: Tensor, _: Any = None) -> Tensor:
        if dist.get_rank() == 1:
            time.sleep(self.slow_s)
        return x + self.down(torch.relu(self.up(x)))

    def segments(self) -> list[zr.Segment]:
        return [zr.Segment(["up"], "down")]


class Plain(nn.Sequential):
    """Layers that every rank of a group has whole."""

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return super().forward(x)


def product_time_to_units(files: set[str]) -> None:
    """A rank whose products take six times as long gives units away."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh, {"up": zr.ColwiseParallel(), "down": zr.RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())
    zr.convert(model)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(update_every=3))
    for step in range(150):
        is_slow = step > 12  # what is done once, at the start, belongs to no walk
        slow = zr.StragglerInjector(model, process_group=mesh, chi={1: 6.0})
        with slow if is_slow else nullcontext():
            model(torch.randn(512, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with traced(files) if is_slow else nullcontext():
                balancer.step()
        if balancer.plan.ranks[1].owned < 1.0:
            return
    raise RuntimeError("no units moved")


def layer_profile_to_layers(files: set[str]) -> None:
    """Layers of which four are slow leave the stage that has these."""
    layers = [Block(), Block(), Block(), Block(), *(Block(0.004) for _ in range(4))]
    pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, process_group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    balancer = PipelineBalancer(pipeline, optimizer, profile_every=2)
    boundaries = pipeline.boundaries
    for _ in range(80):
        x = torch.randn(16, WIDTH)
        optimizer.zero_grad()
        with traced(files), balancer.step():
            pipeline.step(x, target=x)
        optimizer.step()
        if pipeline.boundaries != boundaries:
            return
    raise RuntimeError("no layer moved")


def whole_layers() -> list[nn.Module]:
    return [Plain(nn.Embedding(64, WIDTH)), Block(), Block(), Plain(nn.Linear(WIDTH, 64))]


def rows_of(lengths: list[int]) -> list[Tensor]:
    """Rows of words, each of one more than its length."""
    return [torch.randint(64, (length + 1,)) for length in lengths]


def loss(output: Tensor, batch: Any) -> Tensor:
    """Of words that are packed or padded."""
    return nn.functional.cross_entropy(output.flatten(0, -2), batch.targets.flatten())


def lengths_to_switch(files: set[str]) -> None:
    """Short rows are computed by copies of the model, long ones by layers that are divided."""
    ranges = [LengthRange(32, Strategy(dp=NUM_RANKS)), LengthRange(256, Strategy(tp=NUM_RANKS))]
    model = SwitchableModel(whole_layers(), strategies=[length_range.strategy for length_range in ranges])
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = StrategyTrainer(model, optimizer, ranges, loss=loss, max_tokens=256)
    for _ in range(2):
        with traced(files):
            trainer.step(rows_of([8, 16, 24, 32, 100, 200]))


def lengths_of_iteration(iteration: int) -> Any:
    return np.random.default_rng(iteration).integers(2, 64, (8, 1))


def samples_to_plan(files: set[str]) -> None:
    """Samples of different lengths are cut into micro-batches."""
    group, device, sizes = dist.group.WORLD, torch.device("cpu"), ("size", "length")
    strategy = Strategy(pp=NUM_RANKS)
    model = SwitchableModel(whole_layers(), strategies=[strategy])
    optimizer = torch.optim.AdamW(model.parameters())
    shapes = microbatch.ProfiledShapes(sizes, most_rows=8, longest=(64,), most_tokens=512)
    table = microbatch.measure_model(model, PaddedBatch.hollow, shapes, loss=loss)
    boundaries, options = strategy.partition(4).boundaries, microbatch.PlanningOptions()
    planner = microbatch.IterationPlanner(lengths_of_iteration, table, boundaries, options)
    store = microbatch.share_store(group)
    planners = microbatch.RunPlanners(planner, store, group, device, last=1)
    trainer = microbatch.MicroBatchTrainer(
        model, optimizer, planners, batch_from=PaddedBatch.of, hollow=PaddedBatch.hollow, sizes=sizes, loss=loss
    )
    for iteration in range(2):
        lengths = lengths_of_iteration(iteration)
        torch.manual_seed(iteration)  # equal rows on both ranks
        rows = rows_of(lengths[:, 0].tolist())
        with traced(files):
            planner(iteration)  # as a planner's process does
            trainer.fetch(rows, lengths)
        trainer.step(rows, lengths)
    planners.close()
    store.close()


WALKS: dict[str, Callable[[set[str]], None]] = {
    "product time → units moved": product_time_to_units,
    "layer profile → layer moved": layer_profile_to_layers,
    "lengths → switch": lengths_to_switch,
    "samples → plan": samples_to_plan,
}


def run_rank(rank: int, name: str, tell: Callable[[list[str]], None]) -> None:
    """One rank of a training; rank 0 tells its files."""
    torch.manual_seed(0)
    files: set[str] = set()
    WALKS[name](files)
    tell(sorted(files))


def walks() -> Iterator[tuple[str, list[str]]]:
    """The name of each walk, and the files of the package that run in it."""
    for name in WALKS:
        (traced,) = results_of_ranks(run_rank, NUM_RANKS, name, 1)
        files = [Path(file).relative_to(PACKAGE) for file in traced]
        yield name, sorted(str(file) for file in files if file.parts[0] not in COMPUTING)
