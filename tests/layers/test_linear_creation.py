"""New parallel layers: what they take over, how they start, and what is refused."""

import pytest
import torch
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import LAYERS, Comparison, seeded_linear
from torch import nn

from zeroresize import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.same_ranks


@on_ranks(2, LAYERS.values())
def test_from_linear_keeps_what_the_linear_is(rank, group, kind, options):
    linear = seeded_linear(dtype=torch.float64).eval()
    linear.bias.requires_grad_(False)
    layer = Comparison(kind, linear, group, **options).layer
    assert layer.weight.dtype == layer.bias.dtype == torch.float64
    assert layer.weight.requires_grad and not layer.bias.requires_grad
    assert not layer.training
    with torch.no_grad():
        layer.weight.zero_()
    assert linear.weight.abs().min() > 0  # the layer has a copy


@on_ranks(2)
def test_new_layers_of_all_ranks_make_up_the_linear_of_the_whole_size(rank, group):
    torch.manual_seed(0)
    up, down = torch.nn.Linear(100, 400), torch.nn.Linear(400, 100, bias=False)
    torch.manual_seed(0)
    column = ColumnParallelLinear(100, 400, process_group=group)
    row = RowParallelLinear(400, 100, process_group=group)
    assert torch.equal(column.weight, up.weight.chunk(2)[rank])
    assert torch.equal(column.bias, up.bias.chunk(2)[rank])
    assert torch.equal(row.weight, down.weight.chunk(2, dim=1)[rank])
    assert row.bias.eq(0).all()  # replicated, so it must be alike on every rank, however the ranks are seeded


@on_ranks(2)
def test_features_that_do_not_divide_are_named(rank, group):
    for make in (
        lambda: ColumnParallelLinear(4, 5, process_group=group),
        lambda: ColumnParallelLinear.from_linear(nn.Linear(4, 5), process_group=group),
    ):
        with pytest.raises(ValueError, match="out_features=5 is not divisible by the 2 ranks"):
            make()
    for make in (
        lambda: RowParallelLinear(5, 4, process_group=group),
        lambda: RowParallelLinear.from_linear(nn.Linear(5, 4), process_group=group),
    ):
        with pytest.raises(ValueError, match="in_features=5 is not divisible by the 2 ranks"):
            make()


@on_ranks(2)
def test_own_features_are_those_of_uneven_shares_on_meta(rank, group):
    column = ColumnParallelLinear(3, 5, process_group=group, own_features=(5, 0)[rank], device="meta")
    row = RowParallelLinear(5, 3, process_group=group, own_features=(5, 0)[rank], device="meta")
    assert [tuple(one.shape) for one in (*column.parameters(), *row.parameters())] == [
        ((5, 0)[rank], 3), ((5, 0)[rank],), (3, (5, 0)[rank]), (3,)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="own_features=6 of out_features=5 is not allowed: it must be from 0 to 5"):
        ColumnParallelLinear(3, 5, process_group=group, own_features=6, device="meta")
    with pytest.raises(ValueError, match="own_features=2 of in_features=5 is not allowed"):
        RowParallelLinear(5, 3, process_group=group, own_features=2)
