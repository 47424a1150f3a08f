"""The cases of torch's own tests of parallel styles, for layers that were converted and whose units have moved."""

import itertools

import pytest
import torch
from helpers.dtensor_comparisons import (
    WIDTH,
    assert_same_at_home,
    assert_same_with_moves,
    feed_forward,
    input_of,
    results,
)
from helpers.dtensor_models import mesh_of
from helpers.on_ranks import on_ranks
from helpers.processes import caught_log_lines
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.segments import owned_segments

pytestmark = pytest.mark.same_ranks

X_LAYOUTS = {"whole": Replicate(), "batch": Shard(0), "sequence": Shard(1)}


#: How x comes and how y goes.
LAYOUTS = [
    ("whole", "whole"),
    ("whole", "batch"),
    ("batch", "sequence"),
    ("sequence", "whole"),
    ("sequence", "sequence"),
]


@on_ranks(2, itertools.product(("plain", "DTensor"), LAYOUTS))
def test_a_pair_of_layers_reads_and_writes_every_layout_as_the_hosts(rank, group, kind, layouts):
    mesh, (x_name, y_name) = mesh_of(), layouts
    x_layout, y_layout = X_LAYOUTS[x_name], X_LAYOUTS[y_name]
    bias, is_local = x_name != y_name, (x_name == "whole") != (y_name == "batch")
    host, model = feed_forward(bias), feed_forward(bias)
    for module in (host, model):
        plan = {
            "up": ColwiseParallel(input_layouts=x_layout),
            "down": RowwiseParallel(output_layouts=y_layout, use_local_output=is_local),
        }
        parallelize_module(module, mesh, plan)
    zr.convert(model)
    assert len(owned_segments(balanced_layers(model))) == 1
    assert_same_with_moves(model, host, input_of(kind, mesh, x_layout))


@on_ranks(2)
def test_layers_that_hand_dtensors_to_each_other_stay_even_and_are_the_hosts(rank, group):
    mesh = mesh_of()
    for row_reads in (Shard(-1), Replicate()):
        host, model = feed_forward(), feed_forward()
        for module in (host, model):
            plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel(input_layouts=row_reads)}
            parallelize_module(module, mesh, plan)
        zr.convert(model)
        assert balanced_layers(model)["up"].stays_even == "it returns a DTensor (use_local_output=False)"
        x = input_of("plain", mesh, Replicate())
        assert_same_at_home(model, host, x, str(row_reads))
        with pytest.raises(ValueError, match="no segment that is known to be divisible unevenly"):
            zr.Balancer(model, torch.optim.SGD(model.parameters()), zr.BalanceConfig(mode="exact")).move((3, 1))
        named = [zr.Segment(["up"], "down")]
        other = parallelize_module(feed_forward(), mesh, plan)
        with pytest.raises(ValueError, match="it returns a DTensor"):
            zr.convert(other, segments=named)


@on_ranks(2, [(False,), (True,)])
def test_a_converted_pair_sends_as_many_messages_as_the_hosts(rank, group, sequence):
    mesh = mesh_of()
    layout = Shard(1) if sequence else Replicate()
    plan = {"up": ColwiseParallel(input_layouts=layout), "down": RowwiseParallel(output_layouts=layout)}
    host, model = (parallelize_module(feed_forward(), mesh, plan) for _ in range(2))
    balancer = zr.Balancer(model, torch.optim.SGD(model.parameters()), zr.BalanceConfig(mode="exact"))
    x = input_of("plain", mesh, layout)
    expected = messages(host, x)
    assert messages(model, x) == expected == (4 if sequence else 2)
    balancer.move((3, 1))
    assert messages(model, x) == expected


def messages(model, x):
    """How many collectives a forward and its backward take."""
    with CommDebugMode() as counts:
        results(model, x)
    return counts.get_total_counts()


@on_ranks(2)
def test_what_gathers_or_is_no_linear_layer_is_left_alone_and_told(rank, group):
    mesh = mesh_of()
    model = nn.ModuleDict({"embed": nn.Embedding(8, WIDTH), "head": nn.Linear(WIDTH, 8), "mlp": feed_forward()})
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    with caught_log_lines() as lines:
        zr.convert(model)
    assert list(balanced_layers(model)) == ["mlp.up", "mlp.down"]
    assert type(model["embed"]) is nn.Embedding and type(model["head"]) is nn.Linear
    assert any("head is left alone: gather_output=True" in line for line in lines)
    odd = parallelize_module(feed_forward(), mesh, {"up": ColwiseParallel(output_layouts=Shard(0))})
    with pytest.raises(ValueError, match=r"up: output_layouts=S\(0\) of a column-parallel layer are not known"):
        zr.convert(odd)
    odd = parallelize_module(feed_forward(), mesh, {"down": RowwiseParallel(input_layouts=Shard(0))})
    with pytest.raises(ValueError, match=r"down: input_layouts=S\(0\) of a row-parallel layer are not known"):
        zr.convert(odd)
