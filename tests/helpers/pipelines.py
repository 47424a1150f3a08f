"""Pipelines: a small model with its undivided training, every partition tried, and pipelines that are only numbers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from zeroresize.pipeline import Pipeline, clip_grad_norm_
from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.division import PipelineLoad
from zeroresize.policy.pipeline.profiles import LayerProfile, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing, RebalancingRule
from zeroresize.runtime.simulated_steps import simulated_step

WORDS, WIDTH, LENGTH, BATCH, MICRO = 11, 6, 3, 8, 4
NUM_LAYERS = 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.down.bias.requires_grad_(False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Drifting(nn.Module):
    """Its buffer, a new object at every forward, and its gain both change what it returns."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("unused", None)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=(0, 1))
        return self.gain * (x - self.mean)


class Transposed(nn.Module):
    """What it returns is not contiguous; its weight is not either, and its statistics are buffers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm((x @ self.weight).transpose(1, 2)).transpose(1, 2)


def layers_of(seed=0):
    """The same layers at every call, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Embedding(WORDS, WIDTH), Block(), Drifting(), Transposed(), Block(), Block()]
        return [layer.double() for layer in (*layers, nn.Linear(WIDTH, WORDS))]


def batch(step):
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (2, BATCH, LENGTH), generator=generator)
    return words[0], words[1]


def loss_of(outputs, target):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())


def groups_of(named_parameters):
    """As many programs choose them: matrices in the first one, with weight decay and another learning rate."""
    parameters = [one for _, one in named_parameters]
    return [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": 0.1, "lr": 0.02},
        {"params": [one for one in parameters if one.dim() < 2]},
    ]


OPTIMIZERS = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "AdamW, foreach, amsgrad": functools.partial(torch.optim.AdamW, lr=0.01, foreach=True, amsgrad=True),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adafactor": functools.partial(torch.optim.Adafactor, lr=0.01),  # its state has other shapes
}
#: Home first; by the number of stages.
BOUNDARIES = {
    1: [(0, 7)],
    2: [(0, 3, 7), (0, 6, 7), (0, 1, 7)],
    3: [(0, 2, 4, 7), (0, 1, 6, 7), (0, 4, 5, 7)],
    4: [(0, 2, 4, 6, 7), (0, 1, 2, 3, 7), (0, 4, 5, 6, 7)],
}


def pipeline_of(group, boundaries=None, loss=loss_of, layers=None, **options):
    return Pipeline(
        layers_of() if layers is None else layers,
        loss,
        num_microbatches=MICRO,
        process_group=group,
        boundaries=boundaries or BOUNDARIES[group.size()][0],
        **options,
    )


def half_the_loss(outputs, target):
    return loss_of(outputs, target) / 2


def undivided(make, num_steps, max_norm, layers=None):
    """Losses, and weights and optimizer state by name, of training with two batches added up for each step."""
    model = nn.ModuleDict({"layers": nn.ModuleList(layers or layers_of())})
    optimizer = make(groups_of(model.named_parameters()))
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for part in range(2):
            total = 0.0
            words, target = batch(2 * step + part)
            for x, y in zip(words.chunk(MICRO), target.chunk(MICRO), strict=True):
                for layer in model["layers"]:
                    x = layer(x)
                loss = half_the_loss(x, y) / MICRO
                loss.backward()
                total += loss.item()
            losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        decay.step()
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors |= {f"{name} {key}": torch.as_tensor(one) for key, one in optimizer.state.get(parameter, {}).items()}
    return losses, tensors


def held(pipeline, optimizer):
    """Everything of this stage's layers by name, copied."""
    copies = {name: copy.deepcopy(value) for name, value in pipeline.state_dict().items()}
    for name, parameter in pipeline.named_parameters():
        if parameter.grad is not None:
            copies[f"{name} gradient"] = parameter.grad.clone()
        state = {} if optimizer is None else optimizer.state.get(parameter, {})
        copies |= {f"{name} {key}": copy.deepcopy(one) for key, one in state.items()}
    return copies


def accumulate(pipeline, step, between=lambda: None):
    """Two batches of a step of the optimizer; their losses on the last stage."""
    losses = []
    for part in range(2):
        words, target = (tensor.to(pipeline.device) for tensor in batch(2 * step + part))
        losses.append(pipeline.step(words, target=target))
        if part == 0:
            between()
    return [loss.item() for loss in losses if loss is not None]


def train_step(pipeline, optimizer, step, max_norm=None, between=lambda: None):
    """Two batches for one step of the optimizer; their losses on the last stage."""
    optimizer.zero_grad()
    losses = accumulate(pipeline, step, between)
    if max_norm is not None:
        clip_grad_norm_(pipeline, max_norm)
    optimizer.step()
    return losses


def assert_same(ones, others):
    """Bit for bit."""
    assert ones.keys() == others.keys()
    for name, value in ones.items():
        other = others[name]
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other), name
            assert value.dtype == other.dtype and value.stride() == other.stride(), name
        else:
            assert value == other, name


@st.composite
def loads(draw, max_layers=8, max_stages=5, is_limited=None, speeds=(0.5, 1.0, 2.0, 4.0)):
    """Costs and speeds whose quotients are exact."""
    num_layers = draw(st.integers(1, max_layers))
    num_stages = draw(st.integers(1, min(num_layers, max_stages)))

    def numbers(values, length):
        return draw(st.lists(values, min_size=length, max_size=length))

    memory = {}
    if draw(st.booleans()) if is_limited is None else is_limited:
        memory["layer_bytes"] = numbers(st.integers(0, 6), num_layers)
        memory["memory_limits"] = numbers(st.integers(3, 16), num_stages)
    costs = numbers(st.integers(0, 12), num_layers)
    return PipelineLoad.of(costs, num_stages, speeds=numbers(st.sampled_from(speeds), num_stages), **memory)


def on_stages(load, stages):
    """The same layers on some of the stages only."""
    chosen = list(stages)
    parts = {name: getattr(load, name)[chosen] for name in ("speeds", "memory_limits", "waits")}
    return dataclasses.replace(load, **parts)


def all_partitions(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield Partition((0, *inner, num_layers))


def slowest_of(load, partition):
    return max(
        sum(load.costs[layer] for layer in partition.layers_of(stage)) / load.speeds[stage]
        for stage in range(partition.num_stages)
    )


def fits_into(load, partition):
    return all(
        sum(load.layer_bytes[layer] for layer in partition.layers_of(stage)) <= load.memory_limits[stage]
        for stage in range(partition.num_stages)
    )


def fastest_possible(load):
    """The time of the slowest stage in the best of all partitions that fit; None where none does."""
    tried = all_partitions(load.num_layers, load.num_stages)
    return min((slowest_of(load, one) for one in tried if fits_into(load, one)), default=None)


def carried_out(start, transfers):
    """Every stage's layers, in order, after each of the transfers in turn; checks that the layer was at its source."""
    stages = [list(start.layers_of(stage)) for stage in range(start.num_stages)]
    yield [list(own) for own in stages]
    for transfer in transfers:
        stages[transfer.source].remove(transfer.layer)
        stages[transfer.destination] = sorted([*stages[transfer.destination], transfer.layer])
        yield [list(own) for own in stages]


NUM_MICROBATCHES = 8
COST_OF_MOVE = MoveCost(1e-9, 0.05)


@dataclass
class World:
    """Layers have ``work`` [L] and run on devices of ``speeds`` [S]; a third of the seconds is forward."""

    work: list[float]
    speeds: list[float]
    boundaries: tuple[int, ...]
    weight_bytes: int = 1000
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self):
        self._random = np.random.default_rng(self.seed)

    def profile(self):
        seconds = np.array(self.work) / np.array(self.speeds)[Partition(self.boundaries).stages]
        seconds *= self._random.uniform(1.0, 1.0 + self.noise, len(seconds))
        layers = tuple(
            LayerProfile(layer_s / 3, layer_s * 2 / 3, self.weight_bytes, self.weight_bytes, 2 * self.weight_bytes, 100)
            for layer_s in seconds.tolist()
        )
        return PipelineProfile(layers, self.load.stage_times(Partition(self.boundaries)), self.boundaries)

    @property
    def load(self):
        return PipelineLoad.of(self.work, len(self.speeds), speeds=self.speeds)

    @property
    def slowest(self):
        return self.load.slowest(Partition(self.boundaries))

    @property
    def step_s(self):
        """Of a 1F1B step, simulated."""
        times = self.load.stage_times(Partition(self.boundaries)) / NUM_MICROBATCHES
        return simulated_step((times / 3).tolist(), (times * 2 / 3).tolist(), NUM_MICROBATCHES).step_s

    def train(self, rebalancing, num_profiles):
        """The boundaries after each move."""
        moves = []
        for _ in range(num_profiles):
            proposal = rebalancing.update(self.profile())
            if proposal is not None:
                assert proposal.before == self.boundaries
                self.boundaries = proposal.after
                moves.append(self.boundaries)
                rebalancing.learn(proposal.num_bytes, 0.01)
        return moves


def rebalancing_of(cost_of_move=COST_OF_MOVE, **options):
    chosen = {
        "by": "time",
        "schedule": "1f1b",
        "num_microbatches": NUM_MICROBATCHES,
        "num_steps": 100,
    }
    return Rebalancing(RebalancingRule(**(chosen | options)), cost_of_move)


#: To which :class:`Training` clips.
MAX_NORM = 0.5


class Training:
    """Two batches for each step of the optimizer, clipping, and a schedule of the learning rate."""

    def __init__(self, group, boundaries=None, name="AdamW", **options):
        self.pipeline = pipeline_of(group, boundaries, loss=half_the_loss, **options)
        self.optimizer = OPTIMIZERS[name](groups_of(self.pipeline.named_parameters()))
        self.decay = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.losses, self.step = [], 0

    def train(self, num_steps, between=lambda: None):
        for _ in range(num_steps):
            self.losses += train_step(self.pipeline, self.optimizer, self.step, MAX_NORM, between)
            self.decay.step()
            self.step += 1


class Limited:
    """A pipeline that has made a step, in a group that waits for seconds only."""

    def __init__(self, group, limit_s=5.0, **options):
        self.limit_s = limit_s
        self.group = dist.new_group(list(range(group.size())), timeout=timedelta(seconds=limit_s))
        self.pipeline = pipeline_of(self.group, **options)
        self.optimizer = torch.optim.AdamW(groups_of(self.pipeline.named_parameters()))
        train_step(self.pipeline, self.optimizer, 0)
        self.boundaries = self.pipeline.boundaries

    def kept(self):
        """What a move that fails must leave as it was."""
        return held(self.pipeline, self.optimizer)

    @contextmanager
    def fails(self, *kinds, within_s=20.0):
        """A list that gets the text of the error with which the block must end; nothing has changed then."""
        before, begin, texts = self.kept(), time.perf_counter(), []
        with pytest.raises(kinds or RuntimeError) as caught:
            yield texts
        seconds = time.perf_counter() - begin
        assert seconds < within_s, f"it took {seconds:.1f} s of {within_s}: {caught.value}"
        pipeline = self.pipeline
        assert pipeline.boundaries == self.boundaries and pipeline.process_group is self.group
        assert (pipeline.stage, pipeline.num_stages) == (self.group.rank(), self.group.size())
        assert not pipeline.module.watchers.everyone
        assert_same(self.kept(), before)
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
