"""Column- and row-parallel products with a plan, on real ranks in float64: formulas and finite differences.

``x`` of a column-parallel product is the same on every rank and ``dy`` a rank's own; of a row-parallel one it is the
other way round. Every rank prunes columns of its own choice.
"""

import itertools

import pytest
import torch
from helpers import parallel_layers
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import plan_keeping
from helpers.processes import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from zeroresize.kernels.probe import Probes
from zeroresize.layers.functional import LastGradients, ProductContext, column_parallel_products, row_parallel_products
from zeroresize.plan.layer import LayerPlan

pytestmark = pytest.mark.same_ranks

KINDS = ("column", "row")
LEADING_SHAPES = [(), (1,), (7,), (5, 3), (2, 3, 5)]


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Case:
    """Operands of every rank, known to each, and what the formulas make of them."""

    def __init__(self, kind, keeps, leading, num_outputs=4, num_columns=5, imputation="zero", seed=0):
        self.kind, self.keeps, self.imputation = kind, keeps, imputation
        self.num_columns, ranks = num_columns, range(len(keeps))
        self.kept_K = [parallel_layers.mask(keep, num_columns) for keep in keeps]
        self.w_NK = [randn(num_outputs, num_columns, seed=seed + rank) for rank in ranks]
        self.bias_N = [randn(num_outputs, seed=seed + 20 + rank) for rank in ranks]
        self.x = [randn(*leading, num_columns, seed=seed + 40 + rank * (kind == "row")) for rank in ranks]
        self.dy = [randn(*leading, num_outputs, seed=seed + 60 + rank * (kind == "column")) for rank in ranks]

    def expected(self, rank, last=(None, None)):
        """``y``, this rank's own dx before any all-reduce, dw and db."""
        operands = zip(self.x, self.w_NK, self.kept_K, strict=True)
        products = [parallel_layers.forward(*operand) for operand in operands]
        y = products[rank] + self.bias_N[rank] if self.kind == "column" else sum(products)
        dx = parallel_layers.dgrad(self.dy[rank], self.w_NK[rank], self.kept_K[rank], self.imputation, last[0])
        dw_NK = parallel_layers.wgrad(self.dy[rank], self.x[rank], self.kept_K[rank], self.imputation, last[1])
        return y, dx, dw_NK, self.dy[rank].reshape(-1, len(dw_NK)).sum(dim=0)

    def computed(self, rank, group, last=None, x=None, dy=None):
        """``y``, dx, dw and db of the library."""
        x = self.x[rank].clone() if x is None else x
        x, w_NK, bias_N = (
            tensor.requires_grad_() for tensor in (x, self.w_NK[rank].clone(), self.bias_N[rank].clone())
        )
        y = products(self.kind, x, w_NK, bias_N, self.plan(rank), group, last)
        inputs = (x, w_NK, bias_N) if self.kind == "column" else (x, w_NK)
        gradients = torch.autograd.grad(y, inputs, self.dy[rank] if dy is None else dy)
        return y, *gradients

    def plan(self, rank):
        return plan_keeping(self.keeps[rank], self.num_columns, self.imputation)


def products(kind, x, w_NK, bias_N, plan, group, last=None):
    if kind == "column":
        return column_parallel_products(x, w_NK, bias_N, ProductContext(plan, group, Probes(), last))
    return row_parallel_products(x, w_NK, None, ProductContext(plan, group, Probes(), last))


def assert_all_close(computed, expected):
    """The first tensors of ``expected``: a row-parallel product has no bias gradient of its own."""
    for actual, exact in zip(computed, expected, strict=False):
        assert_close(actual, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_products_and_gradients_equal_the_formulas(run_ranks, num_ranks):
    @for_each(itertools.product(KINDS, ("zero", "average"), LEADING_SHAPES))
    def check(rank, group, kind, imputation, leading):
        case = Case(kind, [[0, 3], [2], [1, 2, 3, 4]][:num_ranks], leading, imputation=imputation)
        y, dx, *rest = case.expected(rank)
        if kind == "column":
            dx = sum(case.expected(other)[1] for other in range(num_ranks))
        assert_all_close(case.computed(rank, group), (y, dx, *rest))

    run_ranks(check, num_ranks)


@on_ranks(2, [(kind,) for kind in KINDS])
def test_same_imputes_what_this_rank_computed_in_its_previous_backward(rank, group, kind):
    """Also across a change of plan, and beginning again after a change of shape."""

    last = LastGradients()
    before = [(None, None), (None, None)]  # dx and dw of the previous step by rank
    for step, (keeps, leading) in enumerate(
        [([[0, 3], [2]], (7,)), ([[0, 3], [2]], (7,)), ([[1], [0, 4]], (7,)), ([[1], [0, 4]], (2, 3))]
    ):
        case = Case(kind, keeps, leading, imputation="same", seed=100 * step)
        if step == 3:
            before = [(None, dw_NK) for _, dw_NK in before]  # dx has another shape, dw has not
        expected = [case.expected(other, before[other]) for other in range(2)]
        y, dx, *rest = expected[rank]
        if kind == "column":
            dx = sum(own_dx for _, own_dx, *_ in expected)
        computed = case.computed(rank, group, last)
        assert_all_close(computed, (y, dx, *rest))
        for gradient in computed[1:]:
            gradient.zero_()  # as clipping may change it: what the next step imputes must not notice
        before = [(own_dx, dw_NK) for _, own_dx, dw_NK, _ in expected]


def test_any_shape_and_any_kept_columns(run_ranks):
    @given(st.data(), st.sampled_from(KINDS), st.sampled_from(["zero", "average"]), st.sampled_from(LEADING_SHAPES))
    @settings(database=None)
    def check(group, data, kind, imputation, leading):
        num_outputs, num_columns = data.draw(st.tuples(*[st.sampled_from([1, 2, 5, 17, 123])] * 2))
        keep = data.draw(st.sets(st.integers(0, num_columns - 1), min_size=1))
        case = Case(kind, [keep], leading, num_outputs, num_columns, imputation)
        assert_all_close(case.computed(0, group), case.expected(0))

    run_ranks(lambda rank, group: check(group), 1)


@on_ranks(1, itertools.product(KINDS, (True, False)))
def test_operands_in_any_memory_layout(rank, group, kind, has_plan):
    case = Case(kind, [[0, 3] if has_plan else range(5)], (2, 3))
    case.plan = lambda rank: plan_keeping([0, 3], 5) if has_plan else None
    layouts = {
        "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        "every second": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    }
    for layout in layouts.values():
        x, dy = layout(case.x[0]), layout(case.dy[0])
        assert not x.is_contiguous() and not dy.is_contiguous()
        assert_all_close(case.computed(0, group, x=x.detach(), dy=dy), case.expected(0))

    case.dy[0] = torch.ones(1, 1, 1, dtype=torch.float64).expand(2, 3, 4)  # what sum().backward() makes
    assert_all_close(case.computed(0, group), case.expected(0))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_of_layers_that_read_the_same_input_are_added_in_place(run_ranks, num_ranks):
    @for_each(itertools.product(KINDS, (True, False)))
    def check(rank, group, kind, has_plan):
        case = Case(kind, num_ranks * [[0, 3] if has_plan else range(5)], (2, 3))
        plan, weights = case.plan(rank) if has_plan else None, [factor * case.w_NK[rank] for factor in (1, 2, 3)]

        def backward(weights):
            x = case.x[rank].clone().requires_grad_()
            read = x * 1
            y = sum(products(kind, read, w_NK, None, plan, group).mul(case.dy[rank]).sum() for w_NK in weights)
            with torch.profiler.profile() as profile:
                y.backward()
            return x.grad, {event.key: event.count for event in profile.key_averages()}

        dx, called = backward(weights)
        assert_close(dx, sum(backward([w_NK])[0] for w_NK in weights), rtol=1e-10, atol=1e-12)
        if num_ranks == 1:  # a collective's thread may hold what it has summed a while longer
            assert called["aten::add_"] == 2 and "aten::add" not in called

    run_ranks(check, num_ranks)


@on_ranks(2)
def test_a_second_derivative_is_an_error_not_a_wrong_number(rank, group):
    x, w = (torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = column_parallel_products(x, w, None, ProductContext(None, group, Probes()))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@on_ranks(2)
def test_an_overflow_is_not_remembered_for_columns_that_take_the_same_values(rank, group):
    last, plan = LastGradients(), LayerPlan.from_pruned(torch.tensor([1, 3]), 4, imputation="same")
    x, w = torch.randn(5, 4), torch.randn(3, 4, requires_grad=True)

    def backward(plan, dy):
        w.grad = None
        column_parallel_products(x, w, None, ProductContext(plan, group, Probes(), last)).backward(dy)
        return w.grad.clone()

    good = backward(None, torch.ones(5, 3))
    backward(None, torch.full((5, 3), float("inf")))
    assert torch.equal(backward(plan, torch.zeros(5, 3))[:, [1, 3]], good[:, [1, 3]])
