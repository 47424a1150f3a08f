"""Small models, samples and plans of micro-batches."""

import numpy as np
import torch
from torch import nn

from helpers.sample_lengths import Lengths
from lm_examples.layers import summed_loss
from lm_examples.microbatches.models import ModelConfig, padded_layers
from zeroresize.microbatch.padded import PaddedBatch, PairBatch
from zeroresize.microbatch.planning_process import IterationPlanner
from zeroresize.microbatch.trainer import MicroBatchTrainer
from zeroresize.policy.microbatches.costs import CostTable, LayerGrid, grid_points
from zeroresize.policy.microbatches.plan import IterationPlan, MicroBatch, PlanningOptions
from zeroresize.strategy.model import SwitchableModel

MAKE = {"gpt": (padded_layers, PaddedBatch), "t5": (padded_layers, PairBatch)}
SIZES = {"gpt": ("size", "length"), "t5": ("size", "source", "target")}


def layers_of(kind, dtype=torch.float64):
    torch.manual_seed(0)
    config = ModelConfig(kind=kind, num_blocks=2, hidden_size=16, num_heads=2, vocabulary=19)
    return nn.ModuleList(MAKE[kind][0](config)).to(dtype)


def samples_of(kind, lengths_NA, seed=0):
    random = np.random.default_rng(seed)

    def row(length):
        return torch.from_numpy(random.integers(1, 19, length))

    if kind == "gpt":
        return [row(lengths[0] + 1) for lengths in lengths_NA]
    return [(row(source), row(target)) for source, target in lengths_NA]


def table_of(kind, recomputations=("none", "layers"), num_layers=None, scale=1.0):
    """Costs that grow with the tokens of a micro-batch and the squares of its lengths."""
    num_layers, num_axes = num_layers or len(layers_of(kind)), len(SIZES[kind]) - 1
    sizes, points = (1, 4, 16), ((1, 8, 64),) * num_axes
    rows, lengths = grid_points(sizes, points)
    seconds = scale * (1e-3 + 1e-5 * rows * lengths.sum(axis=1) + 1e-7 * rows * (lengths**2).sum(axis=1))
    shape = (len(sizes), *map(len, points))
    grids = {}
    for recomputation in recomputations:
        is_again = recomputation == "layers"
        values = seconds, (3.0 if is_again else 2.0) * seconds, rows * lengths.sum(axis=1) * (1.0 if is_again else 8.0)
        values = [each.astype(np.float64).reshape(shape) for each in (*values, 0.0 * seconds)]
        grids[recomputation] = {"layer": LayerGrid(tuple(range(num_axes)), sizes, points, *values)}
    return CostTable(("layer",) * num_layers, SIZES[kind], grids, "nowhere")


def planner_of(kind, strategy, number=9, *, recomputations=("none", "layers"), scale=1.0, **options):
    table = table_of(kind, recomputations, scale=scale)
    boundaries = strategy.partition(len(table.kinds)).boundaries
    return IterationPlanner(
        Lengths(kind, number), table, boundaries, PlanningOptions(num_replicas=strategy.dp, **options)
    )


class LocalPlans:
    """Plans that are made when they are asked for, in place of those of a store."""

    def __init__(self, planner):
        self.planner = planner

    def plan(self, iteration, batch):
        plan = IterationPlan.from_json(self.planner(iteration))
        assert plan.batch == batch
        return plan


class Undivided:
    """Training of the whole model on the same mini-batches, each sample by itself."""

    def __init__(self, kind, dtype=torch.float64, grad_clip=0.5):
        self.kind, self.layers, self.grad_clip = kind, layers_of(kind, dtype), grad_clip
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-2, eps=1e-4)

    def step(self, samples, lengths_NA):
        self.optimizer.zero_grad()
        total, count = 0.0, int(lengths_NA[:, -1].sum())
        for number in range(len(samples)):
            batch = MAKE[self.kind][1].of(samples, MicroBatch.of([number], lengths_NA))
            x = batch.inputs
            for layer in self.layers:
                x = layer(x, batch)
            loss = summed_loss(x, batch) / count
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.layers.parameters(), self.grad_clip)
        self.optimizer.step()
        return total, float(norm)


def trainer_of(kind, strategy, group, plans, dtype=torch.float64, *, layers=None, loss=summed_loss, **options):
    """What trains a small model by plans."""
    layers = layers_of(kind, dtype) if layers is None else layers
    model = SwitchableModel(layers, strategies=[strategy], process_group=group, **options)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=1e-2, eps=1e-4)
    make = {"batch_from": MAKE[kind][1].of, "hollow": MAKE[kind][1].hollow, "sizes": SIZES[kind]}
    return MicroBatchTrainer(model, optimizer, plans, loss=loss, grad_clip=0.5, **make)
