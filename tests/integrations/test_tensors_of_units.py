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


OF_HEADS = (
    lambda: nn.Parameter(torch.ones(HERE)),
    lambda: nn.Parameter(torch.ones(1, HERE, 1, 1)),
    lambda: nn.Parameter(distribute_tensor(torch.ones(HEADS), mesh_of(), [Shard(0)])),
    lambda: nn.Buffer(torch.ones(HERE, 1, 1)),
    lambda: nn.Parameter(torch.ones(HERE), requires_grad=False),
    lambda: torch.ones(HERE, 1, 1),
    lambda: nn.Embedding(32, HERE),
    lambda: nn.Linear(WIDTH, HERE),
    lambda: nn.Parameter(torch.ones(HERE * HEAD)),
)
OF_ALL = (
    lambda: nn.RMSNorm(HEAD),
    lambda: nn.Parameter(torch.ones(WIDTH)),
    lambda: nn.Buffer(torch.ones(1, 1, HERE, HERE)),
    lambda: nn.Parameter(torch.ones(1)),
    lambda: nn.Buffer(torch.ones(HEADS)),  # slopes of all ranks' heads
)


def convert_holding(kept, group):
    attention = Attention(group)
    attention.kept = kept

    def follow(heads):
        attention.num_heads = len(heads)

    segment = zr.Segment(["0.qkv"], "0.out", unit_size=HEAD, parts=3, kind="heads", on_change=follow)
    zr.convert(nn.Sequential(attention), process_group=group, segments=[segment])


@on_ranks(2)
def test_a_tensor_of_single_heads_is_refused_before_shapes_fail(rank, group):
    for make in OF_HEADS:
        with pytest.raises(ValueError, match=r"0\.kept.*does not follow them: (on_change must|parameters)"):
            convert_holding(make(), group)
    for make in OF_ALL:
        convert_holding(make(), group)
