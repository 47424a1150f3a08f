"""What backward of a parallel layer holds, computes and overlaps."""

import itertools

import pytest
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import HIDDEN, IN, Comparison, PrunedPair, plan_keeping, randn, seeded_linear
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zeroresize import ColumnParallelLinear
from zeroresize.kernels.probe import ProductProbe
from zeroresize.layers import functional


@on_ranks(2)
def test_nothing_but_x_and_w_by_reference_is_held_for_backward(rank, group):
    def history(y):
        """The Functions of the package behind ``y``, whose attributes could hold tensors as well."""
        nodes = [y.grad_fn]
        while nodes:
            node = nodes.pop()
            nodes += [earlier for earlier, _ in node.next_functions if earlier is not None]
            if "Products" in type(node).__name__:
                yield node

    pair = PrunedPair(group)
    for layer, num_columns in [(pair.model[0], IN), (pair.model[2], HIDDEN // 2)]:
        saved = []
        x = randn(4, 5, num_columns).requires_grad_()
        with saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor):
            y = layer(x)
        assert sorted(t.data_ptr() for t in saved) == sorted(t.data_ptr() for t in (x, layer.weight))
        assert sorted(t.shape for t in saved) == sorted(t.shape for t in (x, layer.weight))
        assert not any(isinstance(value, Tensor) for node in history(y) for value in vars(node).values())


@on_ranks(2, itertools.product(["column", "row"], (True, False), (True, False)))
def test_no_product_is_computed_for_what_is_frozen(rank, group, kind, x_learns, w_learns):
    class CountGemms(ProductProbe):
        num_gemms = 0

        def gemm_begins(self, operands):
            self.num_gemms += 1

    linear = seeded_linear()
    linear.weight.requires_grad_(w_learns)
    both, count = Comparison(kind, linear, group), CountGemms()
    both.layer.probes.add_outermost(count)
    both.forward(4, 5, x_learns=x_learns)
    both.backward()
    assert count.num_gemms == 1 + x_learns + w_learns


@pytest.mark.parametrize("has_plan", [True, False])
def test_the_all_reduce_of_dx_runs_while_dw_is_computed(run_ranks, has_plan):
    events = []

    class Watch(ProductProbe):
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
