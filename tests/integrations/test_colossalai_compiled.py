"""Colossal-AI's swapped layers in compiled graphs: one graph, and what they compute as they are."""

import pytest
import torch
from helpers.compiled import compiled
from helpers.hosts import Host
from helpers.on_ranks import on_ranks
from helpers.parallel_layers import plan_keeping
from torch import nn

from zeroresize import convert

pytestmark = pytest.mark.usefixtures("colossalai_module")


def layer_of(host, kind):
    from colossalai.shardformer import layer
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    whole = Conv1D(24, 12) if kind.startswith("GPT2") else nn.Linear(12, 24)
    parts = {"split_sizes": [12, 12]} if kind in ("FusedLinear1D_Col", "GPT2FusedLinearConv1D_Col") else {}
    parts = {"split_sizes": [6, 6]} if kind == "FusedLinear1D_Row" else parts
    return getattr(layer, kind).from_native_module(whole, process_group=host.group, **parts)


@on_ranks(2, [("Linear1D_Col",), ("FusedLinear1D_Row",), ("GPT2FusedLinearConv1D_Col",)], timeout_s=110)
def test_a_swapped_layer_in_a_graph_is_the_layer(rank, group, kind):
    def results(layer, swapped, kind):
        x = torch.randn(2, 3, 6 if kind.endswith("Row") else 12, generator=torch.Generator().manual_seed(0))
        x.requires_grad_()
        swapped.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        return [y, x.grad, *(parameter.grad.clone() for parameter in swapped.parameters())]

    torch._dynamo.reset()
    swapped = nn.Sequential(layer_of(Host(group), kind))
    convert(swapped, process_group=group)
    call, counter = compiled(swapped)
    for keep in (None, [0, 2, 5], [1, 2]):
        swapped[0].plan = None if keep is None else plan_keeping(keep, swapped[0].num_columns)
        for expected, actual in zip(results(swapped, swapped, kind), results(call, swapped, kind), strict=True):
            assert torch.equal(expected, actual)
    assert counter.frame_count == 1
