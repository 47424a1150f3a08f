"""A pair of split layers, converted and not: what both compute, at home and while units are away."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

import zeroresize as zr
from helpers.dtensor_models import mesh_of
from zeroresize.conversion import balanced_layers
from zeroresize.layers.local_parts import local_of

WIDTH, HIDDEN = 8, 24


class FeedForward(nn.Module):
    """y = down(silu(up(x))): x [..., WIDTH] → y [..., WIDTH]."""

    def __init__(self, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=bias), nn.Linear(HIDDEN, WIDTH, bias=bias)

    def forward(self, x):
        return self.down(functional.silu(self.up(x)))


def feed_forward(bias=True):
    torch.manual_seed(0)
    return FeedForward(bias).double()


def whole_x(*sizes, seed=1):
    return torch.randn(*(sizes or (4, 6)), WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def input_of(kind, mesh, layout):
    """This rank's x of a whole one, a leaf, as a plain tensor or a DTensor."""
    x = distribute_tensor(whole_x(), mesh, [layout], src_data_rank=None)
    return (x if kind == "DTensor" else x.to_local()).detach().requires_grad_()


def results(model, x, **options):
    """y, dx and all gradients of one backward, as this rank holds them."""
    model.zero_grad()
    y = model(x, **options)
    y.square().sum().backward()
    tensors = [y.detach(), x.grad, *(one.grad for one in model.parameters())]
    x.grad = None
    return tensors


def assert_same(ours, theirs, message, tolerance=0.0):
    assert len(ours) == len(theirs), message
    for mine, other in zip(ours, theirs, strict=True):
        assert isinstance(mine, DTensor) == isinstance(other, DTensor), message
        if isinstance(mine, DTensor):
            assert mine.placements == other.placements and mine.shape == other.shape, message
        if tolerance:  # whole tensors: of a Partial one the parts may differ
            mine, other = whole_of(mine), whole_of(other)
            torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance, msg=message)
        else:
            assert torch.equal(local_of(mine), local_of(other)), message


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_at_home(model, host, x, message="", **options):
    """What a model and its host compute is equal: bit for bit at home, and while units are away but for rounding."""
    assert_same(results(model, x, **options), results(host, x, **options), f"{message}, at home")


def assert_same_with_moves(model, host, x, message="", **options):
    """As at home; and with units elsewhere within 1e-9, gradients being brought home after they were computed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    assert_same_at_home(model, host, x, message, **options)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"), process_group=mesh_of())
    balancer.move((3, 1))
    assert local_of(segment_layer(model).weight).shape[0] != HIDDEN // 2, message
    y, dx, *_ = results(model, x, **options)
    balancer.move((1, 1))
    gradients = [one.grad for one in model.parameters()]
    assert_same([y, dx, *gradients], results(host, x, **options), f"{message}, units away", 1e-9)
    balancer.close()


def segment_layer(model):
    return next(layer for layer in balanced_layers(model).values() if layer.segment is not None)
