"""Which files of the package run between a measurement and what it changes: four walks, traced in small runs.

python scripts/size.py --walk

Each walk is a training of two CPU ranks. Its files are those in which functions run on rank 0 between the measurement
and the change, but for the rooms that compute and send a step as they always do.
"""

from __future__ import annotations

import socket
import sys
import tempfile
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
from zeroresize.microbatch import (
    IterationPlanner,
    MicroBatchTrainer,
    PaddedBatch,
    PlanningOptions,
    ProfiledShapes,
    RunPlanners,
    measure_model,
    share_store,
)
from zeroresize.pipeline import Pipeline, PipelineBalancer
from zeroresize.strategy import LengthRange, Strategy, StrategyTrainer, SwitchableModel

PACKAGE = Path(zr.__file__).parent
NUM_RANKS, WIDTH = 2, 256
#: Rooms that compute and send.
COMPUTING = ("kernels", "layers", "runtime", "comm")


class Tracer:
    """Keeps the files of the package whose functions are called while it is on, in every thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(str(PACKAGE)):
            self.files.add(code.co_filename)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Trace for as long as this lasts."""
        threading.setprofile(self)
        sys.setprofile(self)
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
        """What tensor parallelism divides."""
        return [zr.Segment(["up"], "down")]


class Plain(nn.Sequential):
    """Layers that every rank of a group has whole."""

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return super().forward(x)


def product_time_to_units(tracer: Tracer) -> None:
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
            with tracer.on() if is_slow else nullcontext():
                balancer.step()
        if balancer.plan.ranks[1].owned < 1.0:
            return
    raise RuntimeError("no units moved")


def layer_profile_to_layers(tracer: Tracer) -> None:
    """Layers of which four are slow leave the stage that has these."""
    layers = [Block(), Block(), Block(), Block(), *(Block(0.004) for _ in range(4))]
    pipeline = Pipeline(layers, nn.functional.mse_loss, num_microbatches=4, process_group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    balancer = PipelineBalancer(pipeline, optimizer, profile_every=2)
    boundaries = pipeline.boundaries
    for _ in range(80):
        x = torch.randn(16, WIDTH)
        optimizer.zero_grad()
        with tracer.on(), balancer.step():
            pipeline.step(x, target=x)
        optimizer.step()
        if pipeline.boundaries != boundaries:
            return
    raise RuntimeError("no layer moved")


def whole_layers() -> list[nn.Module]:
    """A small language model, for strategies and micro-batches."""
    return [Plain(nn.Embedding(64, WIDTH)), Block(), Block(), Plain(nn.Linear(WIDTH, 64))]


def rows_of(lengths: list[int]) -> list[Tensor]:
    """Rows of words, each of one more than its length."""
    return [torch.randint(64, (length + 1,)) for length in lengths]


def lengths_to_switch(tracer: Tracer) -> None:
    """Short rows are computed by copies of the model, long ones by layers that are divided."""
    ranges = [LengthRange(32, Strategy(dp=NUM_RANKS)), LengthRange(256, Strategy(tp=NUM_RANKS))]
    model = SwitchableModel(whole_layers(), strategies=[length_range.strategy for length_range in ranges])
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = StrategyTrainer(
        model,
        optimizer,
        ranges,
        loss=lambda output, packed: nn.functional.cross_entropy(output, packed.targets),
        max_tokens=256,
    )
    for _ in range(2):
        with tracer.on():
            trainer.step(rows_of([8, 16, 24, 32, 100, 200]))


def lengths_of_iteration(iteration: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths [samples, 1]."""
    return np.random.default_rng(iteration).integers(2, 64, (8, 1))


def samples_to_plan(tracer: Tracer) -> None:
    """Samples of different lengths are cut into micro-batches."""
    group, device, sizes = dist.group.WORLD, torch.device("cpu"), ("size", "length")
    strategy = Strategy(pp=NUM_RANKS)
    model = SwitchableModel(whole_layers(), strategies=[strategy])
    optimizer = torch.optim.AdamW(model.parameters())

    def loss(output: Tensor, batch: PaddedBatch) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), batch.targets.flatten())

    shapes = ProfiledShapes(sizes, most_rows=8, longest=(64,), most_tokens=512)
    table = measure_model(model, PaddedBatch.hollow, shapes, loss=loss)
    planner = IterationPlanner(lengths_of_iteration, table, strategy.partition(4).boundaries, PlanningOptions())
    store = share_store(group)
    planners = RunPlanners(planner, store, group, device, last=1)
    trainer = MicroBatchTrainer(
        model, optimizer, planners, batch_from=PaddedBatch.of, hollow=PaddedBatch.hollow, sizes=sizes, loss=loss
    )
    for iteration in range(2):
        lengths = lengths_of_iteration(iteration)
        torch.manual_seed(iteration)  # equal rows on both ranks
        rows = rows_of(lengths[:, 0].tolist())
        with tracer.on():
            planner(iteration)  # as a planner's process does
            trainer.fetch(rows, lengths)
        trainer.step(rows, lengths)
    planners.close()
    store.close()


WALKS: dict[str, Callable[[Tracer], None]] = {
    "product time → units moved": product_time_to_units,
    "layer profile → layer moved": layer_profile_to_layers,
    "lengths → switch": lengths_to_switch,
    "samples → plan": samples_to_plan,
}


def run_rank(rank: int, port: int, walk: Callable[[Tracer], None], path: str) -> None:
    """One rank of a training; rank 0 writes its files to ``path``."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tracer = Tracer()
    walk(tracer)
    if rank == 0:
        Path(path).write_text("\n".join(sorted(tracer.files)))
    dist.barrier()
    dist.destroy_process_group()


def files_of(walk: Callable[[Tracer], None]) -> set[str]:
    """The files of the package that run in a training."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, path = free.getsockname()[1], f"{folder}/files"
        free.close()
        torch.multiprocessing.spawn(run_rank, (port, walk, path), nprocs=NUM_RANKS)
        return set(Path(path).read_text().splitlines())


def walks() -> Iterator[tuple[str, list[str]]]:
    """The name of each walk, and its files."""
    for name, walk in WALKS.items():
        files = [Path(file).relative_to(PACKAGE) for file in files_of(walk)]
        yield name, sorted(str(file) for file in files if file.parts[0] not in COMPUTING)
