"""Injected slowness of any other model: which of torch's ops are slowed, and when they are watched."""

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import gathered, on_ranks
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from zeroresize.injection import SlowOps, StragglerInjector, round_robin


def slowed_ops(run, scope="gemm"):
    slow = SlowOps(scope=scope)
    with slow:
        slow.chi = 1.001
        run()
    return slow.num_products


def test_every_way_torch_multiplies_by_a_weight_counts_and_attention_does_not():
    x, weight = torch.randn(4, 5, 8), torch.randn(8, 8)
    layer = nn.Linear(8, 4)
    y = layer(x.clone().requires_grad_())
    assert slowed_ops(lambda: layer(x)) == 1
    assert slowed_ops(lambda: y.sum().backward()) == 2
    strided = torch.randn(5, 4, 8).transpose(0, 1)
    heads = torch.randn(2, 4, 5, 8)
    assert slowed_ops(lambda: strided.matmul(weight)) == 1  # which torch carries out as a batched product
    assert slowed_ops(lambda: torch.bmm(x, x.transpose(1, 2))) == 0
    assert slowed_ops(lambda: nn.functional.scaled_dot_product_attention(heads, heads, heads)) == 0
    assert slowed_ops(lambda: heads @ heads.transpose(2, 3)) == 0
    with torch.inference_mode():
        assert slowed_ops(lambda: nn.functional.linear(x, weight)) == 1
        assert slowed_ops(lambda: x @ weight) == 1
        assert slowed_ops(lambda: x @ x.transpose(1, 2)) == 0


def test_parameters_pass_and_of_subclasses_the_ops_inside_count():
    weight = nn.Parameter(torch.ones(2, 2))
    assert slowed_ops(lambda: weight.data @ weight.data) == 1
    pair = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
    assert slowed_ops(lambda: pair @ pair) == 2


@pytest.mark.parametrize("scope", ["gemm", "all"])
@on_ranks(2)
def test_products_of_a_model_that_torch_has_split_are_slowed(rank, group, *, scope):
    """Also with batches of new shapes, which torch works out by tensors without numbers."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    injector = StragglerInjector(model, process_group=group, chi={1: 1.001}, scope=scope)
    with injector:
        for num_rows in (3, 5):
            x = torch.ones(num_rows, 8, requires_grad=True)
            model(x).sum().backward()
    assert injector.num_products == 12 * rank if scope == "gemm" else (injector.num_products > 12) == rank


@on_ranks(2)
def test_scope_all_slows_every_op_but_views_and_collectives(rank, group):
    x = torch.ones(4)
    assert [
        slowed_ops(lambda: x.add(1).mul(2), scope="all"),
        slowed_ops(lambda: x.view(2, 2), scope="all"),
        slowed_ops(lambda: dist.all_reduce(x, group=group), scope="all"),
        slowed_ops(lambda: dist.all_reduce(x, group=group, async_op=True).wait(), scope="all"),
    ] == [2, 0, 0, 0]


@on_ranks(2)
def test_rank_that_is_not_slow_does_not_watch_its_ops(rank, group):
    counts = []
    with StragglerInjector(nn.Linear(2, 2), process_group=group, schedule=round_robin()) as injector:
        for epoch in range(3):
            injector.set_epoch(epoch)
            counts.append(len(_get_current_dispatch_mode_stack()))
    assert gathered(group, [*counts, len(_get_current_dispatch_mode_stack())]) == [[1, 0, 1, 0], [0, 1, 0, 0]]


@pytest.mark.gpu
def test_slow_ops_on_a_gpu_reach_backward():
    layer = nn.Linear(2048, 2048, device="cuda")
    x = torch.rand(2048, 2048, device="cuda", requires_grad=True)
    slow = SlowOps()
    with slow:
        slow.chi = 2.0
        layer(x).sum().backward()
        torch.cuda.synchronize()
    assert slow.num_products == 3
    assert slow.seconds_added > 0
