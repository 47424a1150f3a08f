"""The three products of a layer on the columns that a plan keeps, in float64 against the formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.parallel_layers import plan_keeping
from helpers.resized_products import Operands, agree_with_formulas, cases, drawn_plan
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from zeroresize import kernels
from zeroresize.kernels import reference
from zeroresize.plan.columns import Columns
from zeroresize.plan.layer import LayerPlan


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
@given(cases(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.booleans())
def test_products_of_any_shape_are_those_of_the_formulas_and_read_nothing_else(case, dtype, lie_as_they_like):
    tokens, outputs, plan = case
    assume(dtype != torch.bfloat16 or plan.imputation != "average")  # an average of rounded values
    operands = Operands.random(tokens, outputs, plan, dtype)
    if lie_as_they_like:
        operands.lie_as_they_like()
    agree_with_formulas(reference, operands, plan)


class Gathers(TorchDispatchMode):
    """Notes how many columns at once are gathered."""

    def __init__(self):
        super().__init__()
        self.lengths = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index_select.default:
            self.lengths.add(math.prod(args[0].shape[2:]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("num_columns", "kept", "lengths"),
    [
        pytest.param(128, range(16, 96), set(), id="a run is a view"),
        pytest.param(128, [*range(16, 48), *range(64, 128)], {16}, id="blocks"),
        pytest.param(100, [*range(16, 48), *range(64, 96)], {16, 1}, id="blocks that do not divide all columns"),
        pytest.param(128, [*range(8, 24), *range(64, 72)], {1}, id="columns"),
    ],
)
def test_blocks_are_gathered_as_a_whole(num_columns, kept, lengths):
    pruned = torch.tensor([column for column in range(num_columns) if column not in kept])
    plan = LayerPlan.from_pruned(pruned, num_columns)
    with Gathers() as gathers:
        agree_with_formulas(reference, Operands.random(5, 7, plan, torch.float32), plan)
    assert gathers.lengths == lengths


def test_products_of_no_tokens_are_empty_or_zero():
    plan = drawn_plan(48, 16, 0, "zero", block=16)
    x_TK, w_NK, dy_TN = torch.ones(0, 48), torch.ones(3, 48), torch.ones(0, 3)
    assert reference.forward(x_TK, w_NK, None, plan, multiply).shape == (0, 3)
    assert reference.dgrad(dy_TN, w_NK, plan, None, multiply).shape == (0, 48)
    assert torch.equal(reference.wgrad(dy_TN, x_TK, plan, None, multiply), torch.zeros(3, 48))


@pytest.mark.parametrize(
    ("first", "expected"), [([0], 64), ([64, 192], 64), ([32, 128], 32), ([48], 16), ([0, 24], 1), ([8], 1)]
)
def test_columns_that_come_in_aligned_blocks_say_so(first, expected):
    blocks = torch.tensor(first)[:, None] + torch.arange(64 if expected == 64 else 32 if expected == 32 else 16)
    assert Columns.at(blocks.flatten()).block == expected


@pytest.mark.parametrize("columns", [[], list(range(15)), [*range(15), 16], [*range(15, -1, -1)]])
def test_columns_that_do_not_have_no_block(columns):
    assert Columns.at(torch.tensor(columns, dtype=torch.int64)).block == 1
