"""Sinks, slopes and scales of single heads beside a named segment's layers, which nothing moves along."""

import pytest
import torch
import torch.nn.functional as F
from helpers.dtensor_models import mesh_of
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import zeroresize as zr

WIDTH, HEADS, HEAD = 24, 8, 5
HERE = HEADS // 2


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.qkv = zr.ColumnParallelLinear(WIDTH, 3 * HEADS * HEAD, process_group=group)
        self.out = zr.RowParallelLinear(HEADS * HEAD, WIDTH, process_group=group)
        self.num_heads, self.head_dim = HERE, HEAD

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, HEAD)).movedim(-3, 0).transpose(-2, -3)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


def holding(*, parameter=None, buffer=None, child=None):
    def hold(attention):
        if parameter is not None:
            attention.kept = nn.Parameter(torch.ones(parameter))
        if buffer is not None:
            attention.register_buffer("kept", torch.ones(buffer))
        if child is not None:
            attention.kept = child()

    return hold


class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def sinks_as_dtensor(attention):
    attention.kept = nn.Parameter(distribute_tensor(torch.ones(HEADS), mesh_of(), [Shard(0)]))


OF_HEADS = {
    "sinks": holding(parameter=HERE),
    "sinks of a batch": holding(parameter=(1, HERE, 1, 1)),
    "sinks as DTensor": sinks_as_dtensor,
    "slopes": holding(buffer=(HERE, 1, 1)),
    "frozen scales": lambda attention: attention.register_parameter("kept", nn.Parameter(torch.ones(HERE), False)),
    "a plain tensor": lambda attention: setattr(attention, "kept", torch.ones(HERE, 1, 1)),
    "temperatures in a module": holding(child=lambda: Norm((HERE, 1, 1))),
    "a table of biases": holding(child=lambda: nn.Embedding(32, HERE)),
    "gates of heads": holding(child=lambda: nn.Linear(WIDTH, HERE)),
    "scales of all features": holding(parameter=HERE * HEAD),
}
OF_ALL = {
    "nothing": lambda attention: None,
    "a norm of heads": holding(child=lambda: Norm(HEAD)),
    "a norm of the stream": holding(child=lambda: Norm(WIDTH)),
    "a scale of the stream": holding(parameter=WIDTH),
    "a mask": holding(buffer=(1, 1, HERE, HERE)),
    "a number": holding(parameter=1),
    "slopes of all ranks' heads": holding(buffer=HEADS),
}


def segment(attention, on_change=None, name="attention"):
    follow = on_change or (lambda heads: setattr(attention, "num_heads", len(heads)))
    return zr.Segment([f"{name}.qkv"], f"{name}.out", unit_size=HEAD, parts=3, kind="heads", on_change=follow)


def attention_with(hold, group):
    model = nn.ModuleDict({"attention": Attention(group)})
    hold(model["attention"])
    return model


@on_ranks(2)
def test_a_tensor_of_single_heads_is_refused_before_shapes_fail(rank, group):
    for hold in OF_HEADS.values():
        model = attention_with(hold, group)
        with pytest.raises(ValueError, match=r"attention\.kept.*does not follow them: (on_change must|parameters)"):
            zr.convert(model, process_group=group, segments=[segment(model["attention"])])
    for hold in OF_ALL.values():
        model = attention_with(hold, group)
        zr.convert(model, process_group=group, segments=[segment(model["attention"])])


def test_what_on_change_sets_may_stand_between_and_is_as_it_was(run_ranks):
    slopes = torch.arange(1.0, HEADS + 1).view(-1, 1, 1)

    def check(rank, group):
        for hold in (OF_HEADS["slopes"], OF_HEADS["a plain tensor"], OF_HEADS["frozen scales"]):
            model = attention_with(hold, group)
            attention, calls = model["attention"], []
            before = attention.kept

            def follow(heads, attention=attention, calls=calls):
                calls.append(heads)
                new = slopes[heads]
                attention.num_heads = len(heads)
                attention.kept = nn.Parameter(new, False) if isinstance(attention.kept, nn.Parameter) else new

            zr.convert(model, process_group=group, segments=[segment(attention, follow)])
            assert attention.kept is before and attention.num_heads == HERE
            assert calls[-1] == list(range(rank * HERE, (rank + 1) * HERE)), "its last call is that of today"

    run_ranks(check, 2)
