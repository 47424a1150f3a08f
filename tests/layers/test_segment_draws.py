"""Random numbers between the layers of a named segment: what is replicated behind them is dropped alike."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.dtensor_models import mesh_of
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zeroresize as zr

pytestmark = pytest.mark.same_ranks

WIDTH, HEADS, HEAD = 8, 4, 2


def attend(h, p=0.4):
    heads = h.unflatten(-1, (-1, HEAD)).transpose(-2, -3)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p).transpose(-2, -3).flatten(-2)


def drop_path(h, draw):
    return h * draw(h.new_empty(h.shape[0], 1, 1)).div(0.6)


BETWEEN = {
    "nothing": torch.tanh,
    "F.dropout": partial(F.dropout, p=0.4),
    "nn.Dropout": nn.Dropout(0.4),
    "alpha_dropout": partial(F.alpha_dropout, p=0.4, training=True),
    "feature dropout": lambda h: F.dropout1d(h.transpose(1, 2), 0.4).transpose(1, 2),
    "SDPA": attend,
    "drop path by rand": lambda h: drop_path(h, lambda one: torch.rand_like(one).lt(0.6)),
    "drop path by bernoulli": lambda h: drop_path(h, lambda one: one.bernoulli_(0.6)),
    "noise": lambda h: h + torch.randn_like(h),
}
#: What of a block is checkpointed: from which of its parts on, and up to which.
CHECKPOINTED = {"all": (0, 4), "between": (1, 2), "with the row": (1, 4), "with the column": (0, 2)}


class Block(nn.Module):
    """x + dropout(down(between(up(x)))); whole until ``up`` and ``down`` are split."""

    def __init__(self, between, saved=(0, 0)):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, HEADS * HEAD).double(), nn.Linear(HEADS * HEAD, WIDTH).double()
        self.between, self.saved = between, saved

    def forward(self, x):
        parts = [lambda h: self.up(h), self.between, lambda h: self.down(h), lambda h: F.dropout(h, 0.5)]
        first, last = self.saved

        def inner(h):
            for part in parts[first:last]:
                h = part(h)
            return h

        h = x
        for part in parts[:first]:
            h = part(h)
        h = checkpoint(inner, h, use_reentrant=False) if last else h
        for part in parts[last:]:
            h = part(h)
        return x + h


def plain(block, group):
    block.up = zr.ColumnParallelLinear.from_linear(block.up, process_group=group)
    block.down = zr.RowParallelLinear.from_linear(block.down, process_group=group)


def dtensors(block, group):
    parallelize_module(block, mesh_of(), {"up": ColwiseParallel(), "down": RowwiseParallel()})


def blocks_of(group, split, between, saved=(0, 0)):
    model = nn.Sequential(*(Block(between, saved) for _ in range(2)))
    for block in model:
        split(block, group)
    return zr.convert(model, process_group=group, segments=[named(number) for number in range(2)]).train()


def named(number):
    return zr.Segment([f"{number}.up"], f"{number}.down", unit_size=HEAD, kind="heads", head_size=HEAD)


def moved(model, group, shares=(3, 1)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    balancer = zr.Balancer(model, optimizer, process_group=group, config=zr.BalanceConfig(mode="exact"))
    balancer.move(shares)
    return balancer


def results(model):
    """What two forwards return, one behind the other, and the gradients of what is replicated."""
    torch.manual_seed(1)
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    model.zero_grad()
    y = torch.stack([model(x), model(x)])
    y.square().sum().backward()
    biases = [block.down.bias.grad for block in model]
    return y.detach(), x.grad, *(bias.to_local() if hasattr(bias, "to_local") else bias for bias in biases)


def assert_alike(tensors, group):
    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, 0, group=group)
        assert torch.equal(tensor, first)


@pytest.mark.parametrize("split", [plain, dtensors])
@on_ranks(2)
def test_what_is_replicated_behind_a_named_segment_is_dropped_alike(rank, group, *, split):
    for name in BETWEEN if split is plain else ("nothing", "F.dropout"):
        model = blocks_of(group, split, BETWEEN[name])
        balancer = moved(model, group)
        away = results(model)
        assert_alike(away, group)
        assert not torch.equal(*away[0]), name
        with balancer.at_home():
            home = results(model)
            assert_alike(home, group)
            assert torch.allclose(home[0], away[0], atol=1e-12) == (name == "nothing"), name
        balancer.close()


@on_ranks(2)
def test_a_checkpointed_part_draws_again_what_it_drew(rank, group):
    expected = None
    for saved in ((0, 0), *CHECKPOINTED.values()):
        model = blocks_of(group, plain, BETWEEN["F.dropout"], saved)
        balancer = moved(model, group)
        seen = results(model)
        assert_alike(seen, group)
        expected = expected or seen
        assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True)), saved
        balancer.close()


@on_ranks(2)
def test_check_segments_says_dropout_where_ranks_would_drop_what_all_hold(rank, group):
    def in_order(*functions):
        def between(h):
            for function in functions:
                h = function(h)
            return h

        return between

    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    attention, path, noise = (BETWEEN[name] for name in ("SDPA", "drop path by rand", "noise"))
    keyed = nn.Sequential(nn.Dropout(0.2), nn.Dropout(0.4))
    for between in (in_order(path, attention, noise), keyed):
        zr.check_segments(blocks_of(group, plain, between, (1, 2)), x)
    with pytest.raises(ValueError, match=r"0\.down \(heads\): .*dropout: .*aten::rand_like of shape \[2, 1, 1\]"):
        zr.check_segments(blocks_of(group, plain, in_order(attention, path)), x)
