"""A small transformer block of plain parallel layers whose units can move, and what it is as a whole."""

import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.layers.segment import OwnedSegment, UnitTensor
from zeroresize.optim.optimizers import states_like
from zeroresize.plan.ownership import OwnershipMap
from zeroresize.resharding.messages import stack

WIDTH, NEURONS, HEADS, HEAD_SIZE = 8, 24, 12, 2


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        # A bias of k has no gradient but for rounding, which some optimizers make large.
        biases = (True, False, True)
        whole = [nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=bias, dtype=torch.float64) for bias in biases]
        self.q, self.k, self.v = (ColumnParallelLinear.from_linear(one, process_group=group) for one in whole)
        out = nn.Linear(HEADS * HEAD_SIZE, WIDTH, dtype=torch.float64)
        self.out = RowParallelLinear.from_linear(out, process_group=group)
        self.num_heads = HEADS // dist.get_world_size(group)

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:-1], self.num_heads, HEAD_SIZE).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = (q @ k.transpose(-1, -2) / HEAD_SIZE**0.5).softmax(dim=-1)
        return x + self.out((scores @ v).transpose(1, 2).reshape(*x.shape[:-1], self.num_heads * HEAD_SIZE))


class FeedForward(nn.Module):
    def __init__(self, group):
        super().__init__()
        up, down = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((WIDTH, NEURONS), (NEURONS, WIDTH)))
        self.up = ColumnParallelLinear.from_linear(up, process_group=group)
        self.down = RowParallelLinear.from_linear(down, process_group=group)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def block(group, seed=0):
    """The same whole model on every rank and at every call."""
    torch.manual_seed(seed)
    last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    return nn.Sequential(Attention(group), FeedForward(group), last).train()


def segments_of(model, group):
    """As its conversion would find them: ``"0.out"`` of 12 heads and ``"1.down"`` of 24 neurons."""
    attention, feed_forward, _ = model
    ranks = dist.get_world_size(group)

    def follow(heads):
        attention.num_heads = len(heads)

    heads, neurons = [], []
    for name in "qkv":
        layer = getattr(attention, name)
        kinds = [kind for kind, _ in layer.named_parameters()]
        heads += [UnitTensor(layer, kind, f"0.{name}.{kind}", 0, HEAD_SIZE) for kind in kinds]
    heads.append(UnitTensor(attention.out, "weight", "0.out.weight", 1, HEAD_SIZE))
    neurons += [UnitTensor(feed_forward.up, kind, f"1.up.{kind}", 0, 1) for kind in ("weight", "bias")]
    neurons.append(UnitTensor(feed_forward.down, "weight", "1.down.weight", 1, 1))
    layers = ("0.q", "0.k", "0.v", "0.out"), ("1.up", "1.down")
    return [
        OwnedSegment("0.out", "heads", layers[0], tuple(heads), OwnershipMap.even(HEADS, ranks), on_change=follow),
        OwnedSegment("1.down", "neurons", layers[1], tuple(neurons), OwnershipMap.even(NEURONS, ranks)),
    ]


def uneven(num_ranks, turn=0):
    """Targets by name: the first rank keeps little, its neighbours take; with ``turn`` 1 the last rank has nothing."""
    if turn == 0:
        owners = {
            "0.out": [1, *[HEADS // num_ranks] * (num_ranks - 2), 2 * HEADS // num_ranks - 1],
            "1.down": [3, *[NEURONS // num_ranks] * (num_ranks - 2), 2 * NEURONS // num_ranks - 3],
        }
        return {name: OwnershipMap.even(sum(counts), num_ranks).with_counts(counts) for name, counts in owners.items()}
    generator = np.random.default_rng(turn)
    return {
        name: OwnershipMap(generator.integers(max(num_ranks - 1, 1), size=number), num_ranks)
        for name, number in (("0.out", HEADS), ("1.down", NEURONS))
    }


def home(num_ranks):
    return {"0.out": OwnershipMap.even(HEADS, num_ranks), "1.down": OwnershipMap.even(NEURONS, num_ranks)}


def whole_of(tensor, where, owned, group):
    """All ranks' units of a tensor, in the order of the units: [pre, blocks, units, inner]."""
    rank = dist.get_rank(group)
    own = stack(tensor.detach(), where, owned.counts[rank]).clone()
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    whole = own.new_empty(*own.shape[:2], len(owned.owners), own.shape[3])
    for peer, part in enumerate(parts):
        whole[:, :, torch.from_numpy(owned.units_of(peer))] = part
    return whole


def everything_of(segments, optimizer, group):
    """Weights, gradients and optimizer state of all units by name, as wholes."""
    found = {}
    for segment in segments:
        for where in segment.tensors:
            parameter = where.parameter
            tensors = {"": parameter}
            if parameter.grad is not None:
                tensors[" gradient"] = parameter.grad
            if optimizer is not None:
                like = {id(value) for value in states_like(optimizer, parameter)}
                state = optimizer.state.get(parameter, {})
                tensors |= {f" {key}": value for key, value in state.items() if id(value) in like}
            for kind, tensor in tensors.items():
                found[where.name + kind] = whole_of(tensor, where, segment.owned, group)
    return found


def held(segments, optimizer):
    """What this rank holds, to be compared with what it holds later: identities, and copies of all values."""
    objects, values = [], []
    for segment in segments:
        values.append(segment.owned.owners.copy())
        for where in segment.tensors:
            parameter = where.parameter
            state = optimizer.state.get(parameter) if optimizer is not None else None
            of_state = [] if state is None else [*state.values()]
            objects += [parameter, parameter.grad, state, *of_state]
            values += [copy.deepcopy(one) for one in (parameter.data, parameter.grad, *of_state)]
    return [one if one is None else id(one) for one in objects], values


def same(ones, others):
    """Whether two lists or dictionaries hold equal values, bit for bit."""
    if isinstance(ones, dict):
        assert ones.keys() == others.keys()
        ones, others = ones.values(), [others[name] for name in ones]
    return all(
        torch.equal(one, other) if isinstance(one, torch.Tensor) else np.array_equal(one, other)
        for one, other in zip(ones, others, strict=True)
    )
