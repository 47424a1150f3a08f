"""Strategies: tiny models that are switched, tensors to plan switches of, and what steps take by a formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from lm_examples.llama import token_loss
from zeroresize.layers.segment import Segment
from zeroresize.plan.layout import Layout, TensorSpec, UnitDivision, unit_bounds
from zeroresize.plan.strategy import Strategy
from zeroresize.plan.transfers import Slices
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.packed import Packed


class FormulaCosts:
    """A range's tokens are shared by the replicas and the units by the shards; the slowest rank tells the time."""

    def __init__(self, work, *, num_layers=8, num_units=8, num_microbatches=8, bytes_per_switch=1.0, least_split=1):
        self.work, self.num_layers, self.num_units = work, num_layers, num_units
        self.num_microbatches, self.bytes_per_switch = num_microbatches, bytes_per_switch
        self.least_split = least_split  # tp × pp below which memory does not suffice
        self.optimizer_strategy = 0

    def range_s(self, number, strategy, speeds):
        dp, tp, pp = strategy.degrees
        units = np.diff(unit_bounds(self.num_units, strategy.shares or (1.0,) * tp)) / self.num_units
        layers = np.diff(strategy.partition(self.num_layers).boundaries) / self.num_layers
        speeds_of_ranks = np.array([speeds[rank] for rank in strategy.ranks]).reshape(pp, dp, tp)
        stage_s = self.work[number] / dp * layers * (units / speeds_of_ranks).max(axis=(1, 2))
        # Waiting for the pipeline to fill and communication make larger degrees a little worse.
        filling = 1.0 + (pp - 1) / self.num_microbatches
        return float(filling * (1.0 + 0.02 * (tp - 1)) * stage_s.max())

    def step_s(self, strategies, speeds):
        return sum(self.range_s(number, one, speeds) for number, one in enumerate(strategies))

    def fits(self, number, strategy, optimizer_strategy):
        return strategy.tp * strategy.pp >= self.least_split

    def switches_fit(self, strategies):
        return True

    def switch_bytes(self, before, after):
        """Only the optimizer's strategy holds weights between steps."""
        return 0.0 if before[self.optimizer_strategy] == after[self.optimizer_strategy] else self.bytes_per_switch


DEGREES = [(a, b, c) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4) for c in (1, 2) if a * b * c <= 8]


class SwitchCase(NamedTuple):
    before: Layout
    after: Layout
    tensors: list[TensorSpec]
    nodes: list[int]


@st.composite
def some_strategy(draw: st.DrawFn, num_ranks: int) -> Strategy:
    """On some of the ranks in any order, with any shares."""
    dp, tp, pp = draw(st.sampled_from([one for one in DEGREES if np.prod(one) <= num_ranks]))
    ranks = draw(st.permutations(range(num_ranks)))[: dp * tp * pp]
    shares = draw(st.lists(st.integers(0, 3), min_size=tp, max_size=tp).filter(any) | st.just([]))
    return Strategy(dp, tp, pp, tuple(ranks), tuple(shares))


@st.composite
def switch_cases(draw: st.DrawFn, most_ranks: int = 8) -> SwitchCase:
    """Two strategies of a small model, on nodes of any sizes."""
    num_ranks = draw(st.integers(1, most_ranks))
    num_layers = draw(st.integers(2, 3))
    divided = st.builds(lambda rows: UnitDivision(0, 12, rows), st.integers(1, 3))
    divisions = draw(st.lists(divided | st.none(), min_size=num_layers, max_size=5))
    tensors = [
        TensorSpec(f"tensor {number}", number % num_layers, (12 * division.rows, 2) if division else (5,), 4, division)
        for number, division in enumerate(divisions)
    ]
    layouts = [draw(some_strategy(num_ranks)).layout(tensors, num_ranks, num_layers) for _ in range(2)]
    nodes = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    return SwitchCase(*layouts, tensors, nodes)


def least_volumes(slices: Slices, nodes: Sequence[int]) -> tuple[int, int]:
    """The least bytes that the rank which sends most has to send, inside nodes and between nodes.

    Whatever a rank can get from its own node comes from there. Exact, by integer programming.
    """
    jobs: list[list[tuple[int, list[int]]]] = [[], []]  # of each link: bytes, and who may send
    for pattern, size in zip(slices.patterns, slices.num_bytes.tolist(), strict=True):
        holders = np.flatnonzero(slices.held[pattern]).tolist()
        for rank in np.flatnonzero(slices.wanted[pattern] & ~slices.held[pattern]):
            near = [holder for holder in holders if nodes[holder] == nodes[rank]]
            jobs[not near].append((size, near or holders))
    within, between = (_least_largest(own, len(nodes)) for own in jobs)
    return within, between


def _least_largest(jobs: list[tuple[int, list[int]]], num_ranks: int) -> int:
    if not jobs:
        return 0
    choices = [(job, rank) for job, (_, ranks) in enumerate(jobs) for rank in ranks]
    is_done = np.zeros((len(jobs), len(choices) + 1))
    volumes = np.zeros((num_ranks, len(choices) + 1))
    for column, (job, rank) in enumerate(choices):
        is_done[job, column] = 1.0
        volumes[rank, column] = jobs[job][0]
    volumes[:, -1] = -1.0  # the last variable is the largest volume
    objective: NDArray[np.float64] = np.append(np.zeros(len(choices)), 1.0)
    solution = milp(
        objective,
        integrality=1.0 - objective,
        bounds=Bounds(0.0, np.append(np.ones(len(choices)), np.inf)),
        constraints=[LinearConstraint(is_done, 1.0, 1.0), LinearConstraint(volumes, -np.inf, 0.0)],
    )
    assert solution.success, solution.message
    return round(solution.fun)


WIDTH, HEADS, HEAD = 6, 6, 2
VOCABULARY = 11


class Embedding(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)

    def forward(self, x, packed):
        return self.table(x)


class Block(nn.Module):
    """A segment with q, k and v in one weight and one of neurons, and a norm that is not divided."""

    def __init__(self, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD, dtype=dtype)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, dtype=dtype)
        self.up = nn.Linear(WIDTH, 12, bias=False, dtype=dtype)
        self.down = nn.Linear(12, WIDTH, dtype=dtype)
        self.register_buffer("scale", torch.full((), 0.5, dtype=dtype), persistent=False)

    def segments(self):
        return [Segment(["qkv"], "out", unit_size=HEAD, parts=3), Segment(["up"], "down")]

    def forward(self, x, packed):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        heads = (len(x), -1, HEAD)
        gate = (q.view(heads) * k.view(heads)).sum(dim=-1, keepdim=True).tanh()
        x = x + self.out((gate * v.view(heads)).flatten(1)) * self.scale
        return x + self.down(torch.tanh(self.up(x)))


class Output(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.project = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)

    def forward(self, x, packed):
        return self.project(x)


def layers_of(seed=0, num_blocks=2, dtype=torch.float64, device=None):
    with torch.device(device or "cpu"):
        torch.manual_seed(seed)
        return [Embedding(dtype), *(Block(dtype) for _ in range(num_blocks)), Output(dtype)]


def whole_tensors(layers):
    """By name, in the model's order."""
    return {f"layers.{n}.{name}": one for n, layer in enumerate(layers) for name, one in layer.named_parameters()}


def switchable(group, strategies, dtype=torch.float64, **options):
    """A model that may run under these strategies, and the whole tensors of which it holds parts."""
    model = SwitchableModel(layers_of(dtype=dtype), strategies=strategies, process_group=group, **options)
    return model, {name: one.detach() for name, one in whole_tensors(layers_of(dtype=dtype)).items()}


def give_ones(model):
    """Gradients of ones for the stage in force."""
    for layer in model.stage_layers.values():
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)


def mean_loss(layers, sequences):
    """Of the undivided model, a token."""
    packed = Packed.of(sequences)
    x = packed.tokens
    for layer in layers:
        x = layer(x, packed)
    return token_loss(x, packed) / packed.num_tokens


def own_part(model, strategy, name, whole):
    """What this rank must hold of a whole tensor; None for nothing."""
    number = [one.name for one in model.tensors].index(name)
    spec, position = model.tensors[number], strategy.position_of(model.rank)
    if position is None or strategy.partition(model.num_layers).stages[spec.layer] != position.stage:
        return None
    if spec.division is None:
        return whole
    cuts, division = strategy.units(spec), spec.division
    rows = whole.movedim(division.dim, 0).unflatten(0, (division.num_parts, division.num_units, division.rows))
    part = rows[:, cuts[position.shard] : cuts[position.shard + 1]].flatten(0, 2)
    return part.movedim(0, division.dim)


def assert_holds(model, wholes, of=lambda parameter: parameter.data):
    """The stage in force holds its parts of these whole tensors, bit for bit."""
    held = {
        f"layers.{number}.{name}": of(parameter)
        for number, layer in model.stage_layers.items()
        for name, parameter in layer.named_parameters()
    }
    for name, whole in wholes.items():
        expected = own_part(model, model.current, name, whole)
        assert (expected is None) == (name not in held), name
        if expected is not None:
            assert held[name].shape == expected.shape, (name, held[name].shape, expected.shape)
            assert torch.equal(held[name], expected), name


FOUR = [Strategy(4), Strategy(2, 2), Strategy(1, 2, 2), Strategy(2, 1, 2), Strategy(1, 3, 1, shares=(1, 2, 3))]
