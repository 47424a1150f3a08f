"""Parallel layers on real ranks beside the whole ``nn.Linear`` that they are parts of."""

import functools

import formulas
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from zeroresize import ColumnParallelLinear, RowParallelLinear
from zeroresize.plan.layer import LayerPlan

IN, HIDDEN, OUT = 12, 24, 18  # all divide by 2 and by 3 ranks

#: How far a result may be from one that adds the same numbers in another order.
TOLERANCES = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-5},
}

bf16_autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def close(actual, expected, precision=None):
    """Of the same shape and dtype, and as near as ``precision`` (the own dtype by default) allows."""
    assert_close(actual, expected, **TOLERANCES[precision or expected.dtype])


def own(whole, dim, group):
    """This rank's part of a tensor."""
    return whole.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seeded_linear(in_features=IN, out_features=OUT, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias=bias, dtype=dtype)


def plan_keeping(keep, num_columns, imputation="zero"):
    pruned = [column for column in range(num_columns) if column not in keep]
    return LayerPlan.from_pruned(torch.tensor(pruned, dtype=torch.int64), num_columns, imputation=imputation)


class Comparison:
    """A whole ``nn.Linear`` and this rank's part of it, given the same input and the same dy."""

    def __init__(self, kind, linear, group, **options):
        self.kind, self.linear, self.group = kind, linear, group
        layer_class = ColumnParallelLinear if kind == "column" else RowParallelLinear
        self.layer = layer_class.from_linear(linear, process_group=group, **options)
        self.splits_x = kind == "row" and options.get("input_is_parallel", True)
        self.splits_y = kind == "column" and not options.get("gather_output", False)

    def forward(self, *leading, dtype=None, seed=1, x_learns=True):
        x = randn(*leading, IN, seed=seed, dtype=dtype or self.linear.weight.dtype)
        self.x = x.clone().requires_grad_(x_learns)
        self.own_x = (own(x, -1, self.group) if self.splits_x else x).clone().requires_grad_(x_learns)
        self.y, self.own_y = self.linear(self.x), self.layer(self.own_x)

    def backward(self, seed=2):
        """Gradients add up in the parameters as they always do."""
        dy = randn(*self.y.shape, seed=seed, dtype=self.y.dtype)
        self.y.backward(dy)
        self.own_y.backward(own(dy, -1, self.group) if self.splits_y else dy)

    def assert_close(self, precision=None):
        """What this rank holds is its part of what the whole layer has, and where that has nothing, nothing."""
        layer, linear = self.layer, self.linear
        for own_tensor, whole, split_dim in [
            (self.own_y, self.y, -1 if self.splits_y else None),
            (self.own_x.grad, self.x.grad, -1 if self.splits_x else None),
            (layer.weight.grad, linear.weight.grad, 0 if self.kind == "column" else 1),
            (
                getattr(layer.bias, "grad", None),
                getattr(linear.bias, "grad", None),
                0 if self.kind == "column" else None,
            ),
        ]:
            if whole is None:
                assert own_tensor is None
            else:
                close(own_tensor, whole if split_dim is None else own(whole, split_dim, self.group), precision)


LAYERS = {
    "column": ("column", {}),
    "column, y gathered": ("column", {"gather_output": True}),
    "row": ("row", {}),
    "row, x whole": ("row", {"input_is_parallel": False}),
}
each_layer = pytest.mark.parametrize(("kind", "options"), LAYERS.values(), ids=LAYERS.keys())

#: Columns that each rank keeps of the pair's two layers; the third rank computes in full.
KEEPS = [([0, 3, 4, 11], [1, 2]), ([2], [0, 3, 5, 7]), (None, None)]


class PrunedPair:
    """Column-parallel → GELU → row-parallel with a plan on every rank, beside the same with masked whole weights.

    Masked weights are what zero imputation means: with w ⊙ mask in place of w, y and dx lack the terms of the pruned
    columns, and dw is zero there.
    """

    def __init__(self, group, dtype=torch.float32, imputation="zero"):
        self.group = group
        num_ranks = dist.get_world_size(group)
        self.fc1, self.fc2 = seeded_linear(IN, HIDDEN, dtype=dtype), seeded_linear(HIDDEN, OUT, dtype=dtype, seed=1)
        self.model = nn.Sequential(
            ColumnParallelLinear.from_linear(self.fc1, process_group=group),
            nn.GELU(),
            RowParallelLinear.from_linear(self.fc2, process_group=group),
        )
        columns = [IN, HIDDEN // num_ranks]
        keeps = [[kept or range(k) for kept, k in zip(pair, columns, strict=True)] for pair in KEEPS[:num_ranks]]
        masks = [[formulas.mask(kept, k) for kept, k in zip(pair, columns, strict=True)] for pair in keeps]
        self.mask1 = torch.cat([mask1.expand(HIDDEN // num_ranks, -1) for mask1, _ in masks])
        self.mask2 = torch.cat([mask2 for _, mask2 in masks])
        own_layers, own_keeps = (self.model[0], self.model[2]), KEEPS[dist.get_rank(group)]
        for layer, kept, num_columns in zip(own_layers, own_keeps, columns, strict=True):
            layer.plan = None if kept is None else plan_keeping(kept, num_columns, imputation)

    def masked(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(x, self.fc1.weight * self.mask1, self.fc1.bias))
        return F.linear(hidden, self.fc2.weight * self.mask2, self.fc2.bias)

    def whole(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))

    def gradients(self, function, *shape, seed=1) -> list[Tensor]:
        """y, dx and the gradients of all parameters, which are taken away again."""
        x = randn(*shape, IN, seed=seed, dtype=self.fc1.weight.dtype).requires_grad_()
        y = function(x)
        y.backward(randn(*y.shape, seed=2, dtype=y.dtype))
        both = [*self.model.parameters(), *self.fc1.parameters(), *self.fc2.parameters()]
        parameters = [parameter for parameter in both if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return [y.detach(), x.grad, *gradients]

    def assert_equals(self, function, precision=None):
        y, dx, dw1, db1, dw2, db2 = self.gradients(function, 4, 5)
        own_results = self.gradients(self.model, 4, 5)
        parts = [y, dx, own(dw1, 0, self.group), own(db1, 0, self.group), own(dw2, 1, self.group), db2]
        for own_result, part in zip(own_results, parts, strict=True):
            close(own_result, part, precision)
