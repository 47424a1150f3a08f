"""Planned micro-batches for real, on stages that sleep: python -m scripts.bench.microbatch_sleeping

Two and four stages of blocks that sleep in place of work, for each token and each pair of tokens of a row, train
FLAN-like mini-batches of samples of up to 512 and 1,024 tokens; ``t5``: sources of as many and targets of up to a
quarter. Costs are measured as a user's are. The four ways train the same mini-batches in turns; each other way has the
size that its plans take least time with. Seconds are those in which the slowest rank carries out a plan; planning is
not in them, as it is done ahead.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lm_examples.microbatches.blocks import summed_loss
from lm_examples.microbatches.tasks import TaskLengths
from lm_examples.pace import Pace
from scripts.bench.common import machine, save
from scripts.bench.modelled_pipelines import powers
from zeroresize.microbatch.measured_table import measure_model
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.microbatch.profile import ProfiledShapes
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.iteration_plan import IterationPlan
from zeroresize.policy.microbatches.micro_batch import Indices, MicroBatchCosts
from zeroresize.policy.microbatches.planning import plan_iteration
from zeroresize.policy.microbatches.planning_options import DoesNotFitError, PlanningOptions
from zeroresize.strategy.model import SwitchableModel

WIDTH, VOCABULARY, NUM_BLOCKS = 4, 16, 8
#: Seconds of a block's forward for a token, and for a pair of tokens of a row; its backward takes twice as long.
TOKEN_S, PAIR_S = 5e-6, 1e-8
WAYS = {"packing": powers(16), "fixed": powers(256), "tokens": powers(16384, 256)}
_NAMES = {"gpt": ("size", "length"), "t5": ("size", "source", "target")}


class Embedding(nn.Module):
    """[B, L] of int64 to [B, L, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens_BL: Tensor, batch: Any) -> Tensor:
        return self.tokens(tokens_BL)


class Block(nn.Module):
    """Of a decoder-only model, or of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def seconds_of(batch: Any) -> float:
        rows, length, *_ = batch.sizes.values()
        return float(rows * (TOKEN_S * length + PAIR_S * length * length))

    def forward(self, x: Tensor, batch: Any) -> Tensor:
        return x + torch.tanh(self.linear(x))


class TargetEmbedding(nn.Module):
    """Begins a decoder: [B, S, WIDTH] to the same and [B, T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, x: Tensor, batch: PairBatch) -> tuple[Tensor, Tensor]:
        return x, self.tokens(batch.tokens)


class Decoder(nn.Module):
    """Whose tokens look at each other and at those of the source."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    def seconds_of(batch: Any) -> float:
        rows, source, target = batch.sizes.values()
        return float(rows * (TOKEN_S * target + PAIR_S * target * (target + source)))

    def forward(self, x: tuple[Tensor, Tensor], batch: PairBatch) -> tuple[Tensor, Tensor]:
        source, target = x
        return source, target + torch.tanh(self.linear(target)) + source.mean(dim=1, keepdim=True)


class Head(nn.Module):
    """Logits [B, L, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Any, batch: Any) -> Tensor:
        return self.linear(x[1] if isinstance(x, tuple) else x)


def layers_of(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    if kind == "gpt":
        layers = [Embedding(), *(Block() for _ in range(NUM_BLOCKS)), Head()]
    else:
        half = NUM_BLOCKS // 2
        layers = [Embedding(), *(Block() for _ in range(half)), TargetEmbedding()]
        layers += [*(Decoder() for _ in range(half)), Head()]
    for layer in layers:
        if isinstance(layer, Block | Decoder):
            Pace(seconds_of=layer.seconds_of).hold_up([layer])
    return layers


class PlansInTurn:
    """Gives the plan that was set last."""

    plan_now: IterationPlan | None = None

    def plan(self, iteration: int, batch: str, /) -> IterationPlan:
        assert self.plan_now is not None
        return self.plan_now


def best_of(way: str, lengths: Sequence[Indices], costs: Any, options: PlanningOptions) -> list[IterationPlan]:
    """The plans of all mini-batches with the one size that takes least time."""
    tried = []
    for size in WAYS[way]:
        of_size = replace(options, method=way, size=size, schedule="1f1b", num_clusters=1)
        try:
            plans = [plan_iteration(number, each, costs, of_size) for number, each in enumerate(lengths)]
        except DoesNotFitError:  # larger than what was measured
            continue
        tried.append((sum(plan.expected_s for plan in plans), plans))
    return min(tried, key=lambda each: each[0])[1]


def even_by_work(costs: Any, num_layers: int, num_stages: int, lengths: Sequence[Indices]) -> tuple[int, ...]:
    """Boundaries by which stages take about equally long, whichever way trains."""
    of_layer: MicroBatchCosts = costs(tuple(range(num_layers + 1)))["none"]
    samples = np.concatenate(lengths)
    prices = of_layer.prices(np.ones(len(samples), dtype=np.int64), samples)
    ends = np.cumsum((prices.forward_s + prices.backward_s).sum(axis=0))
    inner = [int(np.abs(ends - ends[-1] * stage / num_stages).argmin()) + 1 for stage in range(1, num_stages)]
    return (0, *inner, num_layers)


def cell(kind: str, longest: int, tokens: int, num_batches: int) -> dict[str, Any]:
    num_stages = dist.get_world_size()
    group = dist.group.WORLD
    limits = (longest,) if kind == "gpt" else (longest, longest // 4)
    lengths_of = TaskLengths(kind == "gpt", tokens, longest, longest // 4)
    lengths = [lengths_of(number) for number in range(num_batches + 1)]
    batch_kind: Any = PaddedBatch if kind == "gpt" else PairBatch
    shapes = ProfiledShapes(_NAMES[kind], 16, limits, shortest=32, most_tokens=8192.0)
    layers = layers_of(kind)
    measuring = SwitchableModel(layers, strategies=[Strategy(pp=num_stages)], process_group=group)
    table = measure_model(measuring, batch_kind.hollow, shapes, loss=summed_loss, recomputations=("none",))
    measuring.close()
    strategy = Strategy(pp=num_stages, boundaries=even_by_work(table.costs, len(layers), num_stages, lengths[1:]))
    costs = table.costs(strategy.partition(len(layers)).boundaries)
    options = PlanningOptions(row_lengths=limits)
    plans = {"planned": [plan_iteration(number, each, costs, options) for number, each in enumerate(lengths)]}
    plans |= {way: best_of(way, lengths, costs, options) for way in WAYS}
    source = PlansInTurn()
    model = SwitchableModel(layers_of(kind), strategies=[strategy], process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = MicroBatchTrainer(
        model, optimizer, source, batch_from=batch_kind.of, hollow=batch_kind.hollow, sizes=_NAMES[kind],
        loss=summed_loss,
    )  # fmt: skip
    seconds: dict[str, list[float]] = {way: [] for way in plans}
    errors: dict[str, list[float]] = {way: [] for way in plans}
    for number, of_batch in enumerate(lengths):
        random = np.random.default_rng(number)
        samples = [
            tuple(torch.from_numpy(random.integers(1, VOCABULARY, length + 1)) for length in row) for row in of_batch
        ]
        given: Any = [sample[0] for sample in samples] if kind == "gpt" else [(s[:-1], t[:-1]) for s, t in samples]
        for way, of_way in plans.items():
            source.plan_now = of_way[number]
            report = trainer.step(given, of_batch)
            slowest = torch.tensor(report.work_s)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:  # the first one warms up
                seconds[way].append(float(slowest))
                errors[way].append(report.expected_s / float(slowest) - 1.0)
    model.close()
    return {
        "kind": kind,
        "num_stages": num_stages,
        "longest": longest,
        "seconds": seconds,
        "errors": errors,
        "boundaries": strategy.boundaries,
        "microbatches": {
            way: statistics.fmean(len(p.replicas[0].microbatches) for p in of_way) for way, of_way in plans.items()
        },
    }


def _rank(rank: int, num_ranks: int, path: str, options: Any, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=num_ranks)
    for kind in options.kinds:
        for longest in options.max_lengths:
            row = cell(kind, longest, options.tokens, options.batches)
            if rank == 0:
                results.put(row)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", choices=list(_NAMES), default=list(_NAMES))
    parser.add_argument("--max-lengths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--tokens", type=int, default=8192, help="of a mini-batch, without padding")
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    rows = []
    context = torch.multiprocessing.get_context("spawn")
    for num_ranks in options.stages:
        results = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = num_ranks, str(Path(folder) / "store"), options, results
            torch.multiprocessing.spawn(_rank, arguments, nprocs=num_ranks)
        while not results.empty():
            rows.append(results.get())
            print({key: value for key, value in rows[-1].items() if key != "errors"}, flush=True)
    table = Table("model", "stages", "longest", "planned, s", *(f"{way} / planned" for way in WAYS))
    table.add_column("predicted: mean, largest error")
    for row in rows:
        seconds = {way: statistics.fmean(values) for way, values in row["seconds"].items()}
        errors = [abs(error) for values in row["errors"].values() for error in values]
        ratios = [f"{seconds[way] / seconds['planned']:.2f}" for way in WAYS]
        predicted = f"{100 * statistics.fmean(errors):.1f} %, {100 * max(errors):.1f} %"
        cells = row["kind"], str(row["num_stages"]), str(row["longest"]), f"{seconds['planned']:.3f}"
        table.add_row(*cells, *ratios, predicted)
    Console(width=150).print(table)
    save("microbatch_sleeping", {"machine": machine(), **vars(options), "rows": rows})


if __name__ == "__main__":
    main()
