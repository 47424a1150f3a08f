"""Layers that gather and scatter a sequence compute what the whole layers do, also while columns are lent."""

import pytest
import torch
from helpers.compiled import compiled
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import PAIR_HIDDEN, PAIR_IN, equal_loans, lend, randn, shard_of
from torch import nn
from torch.testing import assert_close

from zeroresize import ColumnParallelLinear, RowParallelLinear

CASES = [(dim, lent) for dim in (0, 1) for lent in (None, 0.5, 1.0)]


@on_ranks(2, CASES)
def test_a_pair_gives_the_whole_layers_results_and_gradients(rank, group, dim, lent):
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(PAIR_IN, PAIR_HIDDEN), nn.GELU(), nn.Linear(PAIR_HIDDEN, PAIR_IN)).double()
    up = ColumnParallelLinear.from_linear(whole[0], process_group=group)
    down = RowParallelLinear.from_linear(whole[2], process_group=group)
    if lent is not None:
        lend({"up": up, "down": down}, group, equal_loans({1: lent}, 2), "broadcast-reduce")
    x = randn(6, 4, PAIR_IN, dtype=torch.float64).requires_grad_()
    part = shard_of(x, dim, group).clone().requires_grad_()
    y = whole(x)
    hidden = nn.functional.gelu(up.column_products(part, up.bias, sequence_dim=dim))
    part_of_y = down.row_products(hidden, down.bias, sequence_dim=dim)
    assert_close(part_of_y, shard_of(y, dim, group), rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    part_of_y.square().sum().backward()
    assert_close(part.grad, shard_of(x.grad, dim, group), rtol=1e-12, atol=1e-12)
    for layer, of_whole, split in ((up, whole[0], 0), (down, whole[2], 1)):
        assert_close(layer.weight.grad, shard_of(of_whole.weight.grad, split, group), rtol=1e-12, atol=1e-12)
        bias = shard_of(of_whole.bias.grad, 0, group) if split == 0 else of_whole.bias.grad
        assert_close(layer.bias.grad, bias, rtol=1e-12, atol=1e-12)


class Pair(nn.Module):
    def __init__(self, group, dim):
        super().__init__()
        torch.manual_seed(0)
        up, down = nn.Linear(PAIR_IN, PAIR_HIDDEN).double(), nn.Linear(PAIR_HIDDEN, PAIR_IN).double()
        self.up = ColumnParallelLinear.from_linear(up, process_group=group)
        self.down = RowParallelLinear.from_linear(down, process_group=group)
        self.dim = dim

    def forward(self, x):
        hidden = self.up.column_products(x, self.up.bias, sequence_dim=self.dim)
        return self.down.row_products(nn.functional.gelu(hidden), self.down.bias, sequence_dim=self.dim)


@pytest.mark.slow
@on_ranks(2, [(0,), (1,)], timeout_s=110)
def test_one_graph_gives_the_layers_results_and_gradients_while_loans_begin_and_end(rank, group, dim):
    torch._dynamo.reset()
    model = Pair(group, dim)
    (call, counter), layers, lender = compiled(model), {"up": model.up, "down": model.down}, None
    x = shard_of(randn(6, 4, PAIR_IN, dtype=torch.float64), dim, group)
    for owner in (None, 0, 1, None):
        if owner is not None:
            lender = lend(layers, group, equal_loans({owner: 0.5}, 2), "broadcast-reduce", owner, lender)
        elif lender is not None:
            lender.take_back()
            model.up.plan = model.down.plan = None
        outcomes = []
        for forward in (model, call):
            part = x.clone().requires_grad_()
            y = forward(part)
            y.square().sum().backward()
            outcomes.append([y, part.grad, *(each.grad for each in model.parameters())])
            model.zero_grad()
        assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
    assert counter.frame_count == 1


@on_ranks(2)
def test_a_sequence_that_ranks_do_not_divide_is_refused(rank, group):
    down = RowParallelLinear(8, 8, process_group=group)
    with pytest.raises(ValueError, match=r"a sequence of 5 \(dimension 0 of \(5, 2, 8\)\) is not divisible by 2"):
        down.row_products(torch.zeros(5, 2, 4), sequence_dim=0)
