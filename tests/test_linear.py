"""Parallel layers against the unsharded ``nn.Linear`` on real ranks; with plans against one with masked weights.

Masked weights are what zero imputation means: with w ⊙ mask in place of w, y and dx lack the terms of the pruned
columns, and dw is zero there.
"""

import functools

import formulas
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from zeroresize import ColumnParallelLinear, RowParallelLinear, functional
from zeroresize.plan import LayerPlan
from zeroresize.probe import Probe

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

# ---- a whole layer --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3])
@each_layer
def test_layer_equals_linear(run_ranks, kind, options, num_ranks):
    def check(rank, group):
        for dtype in TOLERANCES:
            for bias in (True, False):
                for leading in [(7,), (4, 5), (2, 3, 5), ()]:
                    both = Comparison(kind, seeded_linear(bias=bias, dtype=dtype), group, **options)
                    both.forward(*leading)
                    both.backward()
                    both.assert_close()

    run_ranks(check, num_ranks)


@pytest.mark.parametrize("backward_inside", [True, False])
@each_layer
def test_layer_equals_linear_under_autocast(run_ranks, kind, options, backward_inside):
    def check(rank, group):
        for x_dtype in (torch.float32, torch.bfloat16):
            both = Comparison(kind, seeded_linear(), group, **options)
            with bf16_autocast():
                both.forward(4, 5, dtype=x_dtype)
            with bf16_autocast(enabled=backward_inside):
                both.backward()
            assert (both.own_y.dtype, both.own_x.grad.dtype) == (torch.bfloat16, x_dtype)
            assert both.layer.weight.grad.dtype == both.layer.bias.grad.dtype == torch.float32
            both.assert_close(precision=torch.bfloat16)

    run_ranks(check, 2)


@each_layer
def test_autocast_leaves_float64_as_it_is(run_ranks, kind, options):
    def check(rank, group):
        both = Comparison(kind, seeded_linear(dtype=torch.float64), group, **options)
        with bf16_autocast():
            both.forward(4, 5)
            both.backward()
        both.assert_close()

    run_ranks(check, 2)


@each_layer
def test_gradients_accumulate(run_ranks, kind, options):
    def check(rank, group):
        both = Comparison(kind, seeded_linear(), group, **options)
        for micro_batch in range(3):
            both.forward(4, 5, seed=micro_batch)
            both.backward(seed=micro_batch + 10)
        both.assert_close()

    run_ranks(check, 2)


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "weight and bias"])
@each_layer
def test_what_is_frozen_gets_no_gradient(run_ranks, kind, options, frozen):
    def check(rank, group):
        linear = seeded_linear()
        linear.weight.requires_grad_("weight" not in frozen)
        linear.bias.requires_grad_("bias" not in frozen)
        both = Comparison(kind, linear, group, **options)
        both.forward(4, 5, x_learns=frozen != "x")
        both.backward()
        both.assert_close()

    run_ranks(check, 2)


def test_without_a_plan_a_layer_is_its_products_and_one_all_reduce_bit_for_bit(run_ranks):
    def check(rank, group):
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

    run_ranks(check, 2)


@each_layer
def test_from_linear_keeps_what_the_linear_is(run_ranks, kind, options):
    def check(rank, group):
        linear = seeded_linear(dtype=torch.float64).eval()
        linear.bias.requires_grad_(False)
        layer = Comparison(kind, linear, group, **options).layer
        assert layer.weight.dtype == layer.bias.dtype == torch.float64
        assert layer.weight.requires_grad and not layer.bias.requires_grad
        assert not layer.training
        with torch.no_grad():
            layer.weight.zero_()
        assert linear.weight.abs().min() > 0  # the layer has a copy

    run_ranks(check, 2)


def test_new_layers_of_all_ranks_make_up_the_linear_of_the_whole_size(run_ranks):
    def check(rank, group):
        torch.manual_seed(0)
        up, down = torch.nn.Linear(100, 400), torch.nn.Linear(400, 100, bias=False)
        torch.manual_seed(0)
        column = ColumnParallelLinear(100, 400, process_group=group)
        row = RowParallelLinear(400, 100, process_group=group)
        assert torch.equal(column.weight, up.weight.chunk(2)[rank])
        assert torch.equal(column.bias, up.bias.chunk(2)[rank])
        assert torch.equal(row.weight, down.weight.chunk(2, dim=1)[rank])
        assert row.bias.eq(0).all()  # replicated, so it must be alike on every rank, however the ranks are seeded

    run_ranks(check, 2)


# ---- with plans -----------------------------------------------------------------------------------------------------

#: Columns that each rank keeps of the pair's two layers; the third rank computes in full.
KEEPS = [([0, 3, 4, 11], [1, 2]), ([2], [0, 3, 5, 7]), (None, None)]


class PrunedPair:
    """Column-parallel → GELU → row-parallel with a plan on every rank, beside the same with masked whole weights."""

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


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_pruned_pair_equals_one_with_masked_weights(run_ranks, dtype, num_ranks):
    def check(rank, group):
        pair = PrunedPair(group, dtype)
        pair.assert_equals(pair.masked)

    run_ranks(check, num_ranks)


def test_a_pruned_pair_equals_one_with_masked_weights_under_autocast(run_ranks):
    def check(rank, group):
        pair = PrunedPair(group)
        with bf16_autocast():
            pair.assert_equals(pair.masked, precision=torch.bfloat16)

    run_ranks(check, 2)


def test_a_pair_without_plans_equals_the_whole_one(run_ranks):
    def check(rank, group):
        pair = PrunedPair(group, torch.float64)
        pair.model[0].plan = pair.model[2].plan = None
        pair.assert_equals(pair.whole)

    run_ranks(check, 2)


def test_evaluation_computes_in_full_and_training_prunes_again(run_ranks):
    def check(rank, group):
        pair = PrunedPair(group, torch.float64)
        for _ in range(2):
            pair.model.eval()
            pair.assert_equals(pair.whole)
            pair.model.train()
            pair.assert_equals(pair.masked)

    run_ranks(check, 2)


@pytest.mark.parametrize("imputation", ["zero", "average"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_gradient(run_ranks, use_reentrant, imputation):
    def check(rank, group):
        pair = PrunedPair(group, imputation=imputation)
        plain = pair.gradients(pair.model, 4, 5)
        checkpointed = pair.gradients(lambda x: checkpoint(pair.model, x, use_reentrant=use_reentrant), 4, 5)
        assert all(torch.equal(one, other) for one, other in zip(plain, checkpointed, strict=True))

    run_ranks(check, 2)


def test_gradients_of_micro_batches_accumulate_under_a_plan(run_ranks):
    def check(rank, group):
        pair = PrunedPair(group, torch.float64)
        separate = [pair.gradients(pair.model, 4, 5, seed=seed)[2:] for seed in (1, 2)]
        for seed in (1, 2):
            y = pair.model(randn(4, 5, IN, seed=seed, dtype=torch.float64))
            y.backward(randn(*y.shape, seed=2, dtype=y.dtype))
        for parameter, one, other in zip(pair.model.parameters(), *separate, strict=True):
            close(parameter.grad, one + other)

    run_ranks(check, 2)


def test_nothing_but_x_and_w_by_reference_is_held_for_backward(run_ranks):
    def check(rank, group):
        pair = PrunedPair(group)
        for layer, num_columns in [(pair.model[0], IN), (pair.model[2], HIDDEN // 2)]:
            saved = []
            x = randn(4, 5, num_columns).requires_grad_()
            with saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor):
                y = layer(x)
            assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in (x, layer.weight))
            assert sorted(t.shape for t in saved) == sorted(t.shape for t in (x, layer.weight))
            assert not any(isinstance(value, Tensor) for node in history(y) for value in vars(node).values())

    def history(y):
        """The Functions of the package behind ``y``, whose attributes could hold tensors as well."""
        nodes = [y.grad_fn]
        while nodes:
            node = nodes.pop()
            nodes += [earlier for earlier, _ in node.next_functions if earlier is not None]
            if "Products" in type(node).__name__:
                yield node

    run_ranks(check, 2)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_no_product_is_computed_for_what_is_frozen(run_ranks, kind):
    class CountGemms(Probe):
        num_gemms = 0

        def gemm_begins(self, operands):
            self.num_gemms += 1

    def check(rank, group):
        for x_learns, w_learns, num_products in [
            (True, True, 3),
            (False, True, 2),
            (True, False, 2),
            (False, False, 1),
        ]:
            linear = seeded_linear()
            linear.weight.requires_grad_(w_learns)
            both, count = Comparison(kind, linear, group), CountGemms()
            both.layer.probes.add_outermost(count)
            both.forward(4, 5, x_learns=x_learns)
            both.backward()
            assert count.num_gemms == num_products

    run_ranks(check, 2)


@pytest.mark.parametrize("has_plan", [True, False])
def test_the_all_reduce_of_dx_runs_while_dw_is_computed(run_ranks, has_plan):
    events = []

    class Watch(Probe):
        def gemm_begins(self, operands):
            events.append("gemm begins")

        def gemm_ends(self, operands):
            events.append("gemm ends")

    class WatchedWork:
        def __init__(self, work):
            self._work = work

        def wait(self):
            self._work.wait()
            events.append("all-reduce waited for")

    def check(rank, group):
        def start_all_reduce(tensor, process_group, start=functional.start_all_reduce):
            events.append("all-reduce started")
            return WatchedWork(start(tensor, process_group))

        functional.start_all_reduce = start_all_reduce
        layer = ColumnParallelLinear.from_linear(seeded_linear(), process_group=group)
        layer.plan = plan_keeping([1, 5], IN) if has_plan else None
        layer.probes.add_outermost(Watch())
        y = layer(randn(4, IN).requires_grad_())
        events.clear()
        y.sum().backward()
        return events

    dgrad = wgrad = ["gemm begins", "gemm ends"]
    expected = [*dgrad, "all-reduce started", *wgrad, "all-reduce waited for"]
    assert run_ranks(check, 2) == [expected, expected]


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_input_that_does_not_fit_is_named_with_the_weight(run_ranks):
    def check(rank, group):
        layer = ColumnParallelLinear.from_linear(seeded_linear(), process_group=group)
        with pytest.raises(ValueError, match=r"input \(3, 6\) does not fit weight \(9, 12\).*must be 12"):
            layer(randn(3, 6))

    run_ranks(check, 2)


def test_features_that_do_not_divide_are_named(run_ranks):
    def check(rank, group):
        for make in (
            lambda: ColumnParallelLinear(4, 5, process_group=group),
            lambda: ColumnParallelLinear.from_linear(nn.Linear(4, 5), process_group=group),
        ):
            with pytest.raises(ValueError, match="out_features=5 does not divide by the 2 ranks"):
                make()
        for make in (
            lambda: RowParallelLinear(5, 4, process_group=group),
            lambda: RowParallelLinear.from_linear(nn.Linear(5, 4), process_group=group),
        ):
            with pytest.raises(ValueError, match="in_features=5 does not divide by the 2 ranks"):
                make()

    run_ranks(check, 2)


@pytest.mark.parametrize("layer_class", [ColumnParallelLinear, RowParallelLinear])
def test_a_layer_needs_a_group_that_this_rank_is_in(run_ranks, layer_class):
    def check(rank, group):
        with pytest.raises(ValueError, match="process_group=None is not allowed"):
            layer_class(4, 4, process_group=None)
        of_rank_0 = dist.new_group([0])
        if rank == 1:
            with pytest.raises(ValueError, match="not a member of process_group"):
                layer_class(4, 4, process_group=of_rank_0)

    run_ranks(check, 2)
