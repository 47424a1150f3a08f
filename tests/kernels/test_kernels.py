"""The three products of a layer on the columns that a plan keeps, in float64 against the formulas."""

import pytest
import torch
import torch.nn.functional as F
from helpers.parallel_layers import plan_keeping
from helpers.resized_products import Operands, agree_with_formulas, cases
from hypothesis import given, settings

from zeroresize import kernels
from zeroresize.kernels import reference
from zeroresize.plan.columns import Columns


def multiply(function, *operands):
    """The ``gemm`` of a layer that nobody watches."""
    return function(*operands)


def random_operands(num_tokens, num_outputs, num_columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, num_columns), (num_outputs, num_columns), (num_outputs,), (num_tokens, num_outputs)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_only_the_kept_columns_are_multiplied():
    x_TK, w_NK, bias_N, dy_TN = random_operands(3, 4, 10)
    plan = plan_keeping({2, 7}, 10)
    shapes = []

    def spy(function, *operands):
        shapes.append([tuple(operand.shape) for operand in operands])
        return function(*operands)

    kernels.forward(x_TK, w_NK, bias_N, plan, spy)
    kernels.dgrad(dy_TN, w_NK, plan, None, spy)
    kernels.wgrad(dy_TN, x_TK, plan, None, spy)

    assert shapes == [[(3, 2), (4, 2), (4,)], [(3, 4), (4, 2)], [(4, 3), (3, 2)]]


def test_without_a_plan_products_are_those_of_torch_bit_for_bit():
    x_TK, w_NK, bias_N, dy_TN = random_operands(17, 5, 123)

    assert torch.equal(kernels.forward(x_TK, w_NK, bias_N, None, multiply), F.linear(x_TK, w_NK, bias_N))
    assert torch.equal(kernels.dgrad(dy_TN, w_NK, None, None, multiply), dy_TN @ w_NK)
    dx_TK = kernels.dgrad_by_columns(dy_TN, w_NK, multiply)
    assert torch.equal(dx_TK, (w_NK.t() @ dy_TN.t()).t()) and dx_TK.stride() == (1, len(dy_TN))
    assert torch.equal(kernels.wgrad(dy_TN, x_TK, None, None, multiply), dy_TN.T @ x_TK)


@settings(max_examples=200)
@given(cases())
def test_products_of_any_shape_are_those_of_the_formulas_and_read_nothing_else(case):
    tokens, outputs, plan = case
    agree_with_formulas(reference, Operands.random(tokens, outputs, plan, torch.float32), plan)


@pytest.mark.parametrize(
    ("first", "expected"), [([0], 64), ([64, 192], 64), ([32, 128], 32), ([48], 16), ([0, 24], 1), ([8], 1)]
)
def test_columns_that_come_in_aligned_blocks_say_so(first, expected):
    blocks = torch.tensor(first)[:, None] + torch.arange(64 if expected == 64 else 32 if expected == 32 else 16)
    assert Columns.at(blocks.flatten()).block == expected


@pytest.mark.parametrize("columns", [[], list(range(15)), [*range(15), 16], [*range(15, -1, -1)]])
def test_columns_that_do_not_have_no_block(columns):
    assert Columns.at(torch.tensor(columns, dtype=torch.int64)).block == 1
