"""The three products of a layer on the columns that a plan keeps, in float64 against the formulas."""

import pytest
import torch
import torch.nn.functional as F
from helpers import parallel_layers
from helpers.parallel_layers import plan_keeping
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from zeroresize import kernels

IMPUTATIONS = ("zero", "average", "same")
SIZES = st.sampled_from([1, 2, 3, 5, 8, 17, 123])


def multiply(function, *operands):
    """The ``gemm`` of a layer that nobody watches."""
    return function(*operands)


def random_operands(num_tokens, num_outputs, num_columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, num_columns), (num_outputs, num_columns), (num_outputs,), (num_tokens, num_outputs)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@st.composite
def kept_of_columns(draw):
    """(keep, K): any columns but none at all."""
    num_columns = draw(SIZES)
    return draw(st.sets(st.integers(0, num_columns - 1), min_size=1)), num_columns


@given(kept_of_columns(), SIZES, SIZES, st.sampled_from(IMPUTATIONS), st.booleans())
@settings(deadline=None, max_examples=150)
def test_products_equal_the_formulas(kept, num_tokens, num_outputs, imputation, has_bias):
    keep, num_columns = kept
    x_TK, w_NK, bias_N, dy_TN = random_operands(num_tokens, num_outputs, num_columns)
    last_dx_TK, last_dw_NK, _, _ = random_operands(num_tokens, num_outputs, num_columns, seed=1)
    plan, kept_K = plan_keeping(keep, num_columns, imputation), parallel_layers.mask(keep, num_columns)
    bias_N = bias_N if has_bias else None

    y_TN = kernels.forward(x_TK, w_NK, bias_N, plan, multiply)
    dx_TK = kernels.dgrad(dy_TN, w_NK, plan, last_dx_TK, multiply)
    dw_NK = kernels.wgrad(dy_TN, x_TK, plan, last_dw_NK, multiply)

    assert_close(y_TN, parallel_layers.forward(x_TK, w_NK, kept_K) + (bias_N if has_bias else 0))
    assert_close(dx_TK, parallel_layers.dgrad(dy_TN, w_NK, kept_K, imputation, last_dx_TK))
    assert_close(dw_NK, parallel_layers.wgrad(dy_TN, x_TK, kept_K, imputation, last_dw_NK))


@pytest.mark.parametrize("last_shape", [None, (4, 3), (5, 4), (4, 6)])
def test_same_imputes_zero_in_the_first_step_and_after_a_change_of_shape(last_shape):
    x_TK, w_NK, _, dy_TN = random_operands(4, 4, 5)
    plan = plan_keeping({1, 4}, 5, "same")
    last = None if last_shape is None else torch.ones(last_shape, dtype=torch.float64)

    for gradient in [
        kernels.dgrad(dy_TN, w_NK, plan, last, multiply),
        kernels.wgrad(dy_TN, x_TK, plan, last, multiply),
    ]:
        assert gradient[:, [0, 2, 3]].eq(0).all()
        assert gradient[:, [1, 4]].ne(0).all()


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
