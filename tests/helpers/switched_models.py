"""Tiny models for strategies that are switched, and what they must hold."""

import torch
from torch import nn

from zeroresize.layers.segment import Segment
from zeroresize.plan.strategy import Strategy

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
        return [Segment(["qkv"], "out", unit_size=HEAD, num_blocks=3), Segment(["up"], "down")]

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


def own_part(model, strategy, name, whole):
    """What this rank must hold of a whole tensor; None for nothing."""
    number = [one.name for one in model.tensors].index(name)
    spec, position = model.tensors[number], strategy.position_of(model.rank)
    if position is None or strategy.partition(model.num_layers).stages[spec.layer] != position.stage:
        return None
    if spec.division is None:
        return whole
    cuts, own = strategy.units(spec), spec.division
    rows = whole.movedim(own.dim, 0).unflatten(0, (own.num_blocks, own.num_units, own.rows))
    part = rows[:, cuts[position.shard] : cuts[position.shard + 1]].flatten(0, 2)
    return part.movedim(0, own.dim)


def assert_holds(model, wholes, of=lambda parameter: parameter.data):
    """The stage in force holds its parts of these whole tensors, bit for bit."""
    found = {
        f"layers.{number}.{name}": of(one)
        for number, layer in model.stage_layers.items()
        for name, one in layer.named_parameters()
    }
    for name, whole in wholes.items():
        expected = own_part(model, model.current, name, whole)
        assert (expected is None) == (name not in found), name
        if expected is not None:
            assert found[name].shape == expected.shape, (name, found[name].shape, expected.shape)
            assert torch.equal(found[name], expected), name


FOUR = [Strategy(4), Strategy(2, 2), Strategy(1, 2, 2), Strategy(2, 1, 2), Strategy(1, 3, 1, shares=(1, 2, 3))]
