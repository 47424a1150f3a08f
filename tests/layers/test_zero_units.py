"""A rank that owns no unit of a segment computes all the same: N = 0 in its column-parallel layer, K = 0 in its row."""

import torch
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import bf16_autocast, close, randn, seeded_linear
from torch import nn

from zeroresize import ColumnParallelLinear, RowParallelLinear


@on_ranks(2, [((4,), True), ((2, 3), False), ((), True)])
def test_forward_and_backward_are_the_whole_models(rank, group, leading, bias):
    up, down = seeded_linear(6, 8, bias=bias), seeded_linear(8, 4, bias=bias, seed=1)
    column, row = (
        kind.from_linear(layer, process_group=group)
        for kind, layer in ((ColumnParallelLinear, up), (RowParallelLinear, down))
    )
    owned = slice(0, 8 if rank == 0 else 0)
    column.weight.data = up.weight.detach()[owned].clone()
    row.weight.data = down.weight.detach()[:, owned].clone()
    if bias:
        column.bias.data = up.bias.detach()[owned].clone()
    tokens = []
    row.watch_forward = lambda num_tokens, training: tokens.append(num_tokens)
    x = randn(*leading, 6)
    own_x, whole_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, whole_y = row(nn.functional.gelu(column(own_x))), down(nn.functional.gelu(up(whole_x)))
    close(y, whole_y)
    y.sum().backward()
    whole_y.sum().backward()
    close(own_x.grad, whole_x.grad)
    close(column.weight.grad, up.weight.grad[owned])
    close(row.weight.grad, down.weight.grad[:, owned])
    if bias:
        close(column.bias.grad, up.bias.grad[owned])
    assert tokens == [x.numel() // 6] and row.num_tokens == column.num_tokens == x.numel() // 6
    with bf16_autocast():
        assert row(nn.functional.gelu(column(x))).dtype == torch.bfloat16
    row.eval(), column.eval()
    close(row(nn.functional.gelu(column(x))), whole_y)
