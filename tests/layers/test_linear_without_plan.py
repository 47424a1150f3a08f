"""Parallel layers without a plan against the unsharded ``nn.Linear``."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import IN, LAYERS, OUT, TOLERANCES, Comparison, bf16_autocast, randn, seeded_linear
from helpers.processes import for_each

from zeroresize import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.versions


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_layer_equals_linear(run_ranks, num_ranks):
    @for_each(itertools.product(LAYERS.values(), TOLERANCES, (True, False), [(7,), (4, 5), (2, 3, 5), ()]))
    def check(rank, group, layer, dtype, bias, leading):
        kind, options = layer
        both = Comparison(kind, seeded_linear(bias=bias, dtype=dtype), group, **options)
        both.forward(*leading)
        both.backward()
        both.assert_close()

    run_ranks(check, num_ranks)


@on_ranks(2, itertools.product(LAYERS.values(), (True, False), (torch.float32, torch.bfloat16)))
def test_layer_equals_linear_under_autocast(rank, group, layer, backward_inside, x_dtype):
    kind, options = layer
    both = Comparison(kind, seeded_linear(), group, **options)
    with bf16_autocast():
        both.forward(4, 5, dtype=x_dtype)
    with bf16_autocast(enabled=backward_inside):
        both.backward()
    assert (both.own_y.dtype, both.own_x.grad.dtype) == (torch.bfloat16, x_dtype)
    assert both.layer.weight.grad.dtype == both.layer.bias.grad.dtype == torch.float32
    both.assert_close(precision=torch.bfloat16)


@on_ranks(2, itertools.product(LAYERS.values(), ["x", "weight", "bias", "weight and bias"]))
def test_what_is_frozen_gets_no_gradient(rank, group, layer, frozen):
    kind, options = layer
    linear = seeded_linear()
    linear.weight.requires_grad_("weight" not in frozen)
    linear.bias.requires_grad_("bias" not in frozen)
    both = Comparison(kind, linear, group, **options)
    both.forward(4, 5, x_learns=frozen != "x")
    both.backward()
    both.assert_close()


@on_ranks(2)
def test_without_a_plan_a_layer_is_its_products_and_one_all_reduce_bit_for_bit(rank, group):
    x, dy = randn(4, 5, IN).requires_grad_(), randn(4, 5, OUT // 2, seed=2 + rank)
    layer = ColumnParallelLinear.from_linear(seeded_linear(), process_group=group)
    y = layer(x)
    y.backward(dy)
    dx = dy @ layer.weight
    dist.all_reduce(dx, group=group)
    assert torch.equal(y, F.linear(x, layer.weight, layer.bias))
    assert torch.equal(x.grad, dx)
    assert torch.equal(layer.weight.grad, dy.flatten(0, 1).T @ x.flatten(0, 1))
    assert torch.equal(layer.bias.grad, dy.flatten(0, 1).sum(dim=0))

    x, dy = randn(4, 5, IN // 2, seed=rank).requires_grad_(), randn(4, 5, OUT, seed=2)
    layer = RowParallelLinear.from_linear(seeded_linear(), process_group=group)
    y = layer(x)
    y.backward(dy)
    products = F.linear(x, layer.weight).detach()
    dist.all_reduce(products, group=group)
    assert torch.equal(y, products + layer.bias)
    assert torch.equal(x.grad, dy @ layer.weight)
    assert torch.equal(layer.weight.grad, dy.flatten(0, 1).T @ x.flatten(0, 1))
