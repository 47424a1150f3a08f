"""zr.ColwiseParallel and zr.RowwiseParallel under torch's parallelize_module: the layers, and training with them."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.dtensor_linear import DTensorColumnParallelLinear, DTensorRowParallelLinear
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segments import owned_segments

pytestmark = [pytest.mark.versions, pytest.mark.same_ranks]

WIDTH, HIDDEN = 12, 48


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def whole_model(num_blocks=2, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(num_blocks)), nn.LayerNorm(WIDTH)).double()


def mesh_of(num_ranks=2):
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))["tp"]


def split(model, mesh, **options):
    plan = {"up": zr.ColwiseParallel(), "down": zr.RowwiseParallel()}
    for block in list(model)[:-1]:
        parallelize_module(block, mesh, plan, **options)
    return model


def x_of(seed=1):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@on_ranks(2)
def test_linear_layers_become_ours_in_place_and_count_as_converted(rank, group):
    model = whole_model()
    ups, downs = [block.up for block in list(model)[:2]], [block.down for block in list(model)[:2]]
    whole = [{key: value.clone() for key, value in one.state_dict().items()} for one in (ups[0], downs[0])]
    calls = []
    ups[0].register_forward_hook(lambda *_: calls.append(1))
    downs[1].eval()
    split(model, mesh_of())
    assert [model[0].up, model[1].up] == ups and [model[0].down, model[1].down] == downs
    assert {type(one) for one in ups} == {DTensorColumnParallelLinear}
    assert {type(one) for one in downs} == {DTensorRowParallelLinear}
    assert list(balanced_layers(model)) == ["0.up", "0.down", "1.up", "1.down"]
    assert not downs[1].training and ups[1].training
    assert all(isinstance(one, DTensor) for layer in (*ups, *downs) for one in layer.parameters())
    assert (ups[0].in_features, ups[0].out_features, downs[0].in_features) == (WIDTH, HIDDEN, HIDDEN)
    columns = slice(rank * HIDDEN // 2, (rank + 1) * HIDDEN // 2)
    assert torch.equal(local_of(ups[0].weight), whole[0]["weight"][columns])
    assert torch.equal(local_of(ups[0].bias), whole[0]["bias"][columns])
    assert torch.equal(local_of(downs[0].weight), whole[1]["weight"][:, columns])
    assert torch.equal(local_of(downs[0].bias), whole[1]["bias"])
    model(x_of())
    assert calls == [1]


@on_ranks(2)
def test_ranks_that_drew_different_weights_get_those_of_the_source(rank, group):
    """As torch's own styles, unless they are told to keep what each rank has."""

    for options, seeds in (({}, (0, 0)), ({"src_data_rank": 1}, (1, 1)), ({"src_data_rank": None}, (0, 1))):
        model = split(whole_model(seed=rank), mesh_of(), **options)
        expected = [whole_model(seed=seed)[0] for seed in seeds]
        assert torch.equal(local_of(model[0].up.weight), expected[rank].up.weight.chunk(2)[rank])
        assert torch.equal(local_of(model[0].down.weight), expected[rank].down.weight.chunk(2, dim=1)[rank])
        assert torch.equal(local_of(model[0].down.bias), expected[rank].down.bias)


@on_ranks(2)
def test_a_model_on_the_meta_device_is_split_before_it_is_materialised(rank, group):
    with torch.device("meta"):
        model = whole_model()
    split(model, mesh_of())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert local_of(model[0].up.weight).shape == (HIDDEN // 2, WIDTH)
    torch.manual_seed(0)
    whole = nn.Linear(WIDTH, HIDDEN, dtype=torch.float64)
    assert torch.equal(local_of(model[0].up.weight), whole.weight.chunk(2)[rank])


def test_other_layouts_are_errors():
    wrong = (
        (zr.ColwiseParallel, {"output_layouts": Shard(1)}, r"wanted is Shard\(-1\) or Replicate\(\)"),
        (zr.ColwiseParallel, {"input_layouts": Shard(-1)}, r"wanted is Replicate\(\) or Shard\(dim\) of a sequence"),
        (zr.RowwiseParallel, {"input_layouts": Shard(1)}, r"wanted is Shard\(-1\) or Replicate\(\)"),
        (zr.RowwiseParallel, {"output_layouts": Partial()}, r"wanted is Replicate\(\) or Shard\(dim\) of a sequence"),
    )
    for style, layouts, message in wrong:
        (key,) = layouts
        with pytest.raises(ValueError, match=rf"{style.__name__}\({key}=.*is not allowed: {message}"):
            style(**layouts)


class _WithMethod(nn.Linear):
    def norm(self):
        return self.weight.norm()


class _MadeOtherwise(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@on_ranks(2)
def test_what_cannot_be_split_is_told_and_stays_as_it_is(rank, group):
    mesh = mesh_of()
    split_already = nn.Linear(8, 8)
    parallelize_module(split_already, mesh, zr.ColwiseParallel())
    of_dtensors = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
    replaced = nn.Linear(8, 8)
    replaced.forward = lambda x: x
    with_scales = nn.Linear(8, 8)
    with_scales.register_buffer("scale", torch.ones(1))
    wrong = (
        (nn.Embedding(8, 8), "needs a whole torch.nn.Linear, found a Embedding"),
        (split_already, "found one of DTensors, which is split already"),
        (of_dtensors, "DTensors, which is split already"),
        (Scaled(8, 8), "found a Scaled with a forward of its own"),
        (replaced, "found a Linear with a forward of its own"),
        (with_scales, "holds scale beside its weight and bias"),
        (_WithMethod(8, 8), "found a _WithMethod: its norm would be lost"),
    )
    for style in (zr.ColwiseParallel(), zr.RowwiseParallel()):
        for module, message in wrong:
            kind, before = type(module), list(module.parameters())
            with pytest.raises(ValueError, match=message):
                parallelize_module(module, mesh, style)
            assert type(module) is kind and list(map(id, module.parameters())) == list(map(id, before))
    odd = nn.Linear(7, 7)
    for style, name in ((zr.ColwiseParallel(), "out_features"), (zr.RowwiseParallel(), "in_features")):
        with pytest.raises(ValueError, match=f"{name}=7 is not divisible by the 2 ranks"):
            parallelize_module(odd, mesh, style)
        assert type(odd) is nn.Linear
    made = parallelize_module(_MadeOtherwise(), mesh, zr.ColwiseParallel())
    assert local_of(made.weight).shape == (4, 8)


@on_ranks(2)
def test_a_group_without_this_rank_is_told_there(rank, group):
    """As of a mesh that a host made which takes itself for the only process: the rank that is in it goes on."""
    message = r"^process_group does not hold this rank, 1 of 2: [^\n]*\Z"
    mesh = init_device_mesh("cpu", (1,))
    for group_of_0 in (mesh, dist.new_group([0])):
        calls = [
            partial(zr.GradScaler, "cpu"),
            partial(zr.watch, nn.Linear(8, 8)),
            partial(zr.convert, nn.Linear(8, 8)),
        ]
        for call in calls[: 3 if rank else 2]:
            with pytest.raises(ValueError, match=message) if rank else nullcontext():
                call(process_group=group_of_0)
    if rank:
        with pytest.raises(ValueError, match=message):
            parallelize_module(nn.Linear(8, 8), mesh, zr.ColwiseParallel())


@on_ranks(2)
def test_a_mesh_of_two_dimensions_is_told(rank, group):
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    linear = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"has 2 dimensions: pass the one .* mesh\['tp'\]"):
        parallelize_module(linear, grid, zr.ColwiseParallel())
    assert type(linear) is nn.Linear
    parallelize_module(linear, grid["tp"], zr.ColwiseParallel())
    assert local_of(linear.weight).shape == (4, 8)


@on_ranks(2)
def test_segments_can_be_named_and_layers_left_out_after_parallelize_module(rank, group):
    model = split(whole_model(), mesh_of())
    with pytest.raises(ValueError, match="no layer 'up'"):
        zr.convert(model, segments=[zr.Segment(["up"], "0.down")])
    assert len(balanced_layers(model)) == 4, "they count as converted as before"
    zr.convert(
        model,
        segments=[zr.Segment(["0.up"], "0.down", unit_size=4)],
        module_filter_fn=lambda module, name: name.startswith("0."),
    )
    (segment,) = owned_segments(balanced_layers(model))
    assert list(balanced_layers(model)) == ["0.up", "0.down"] and len(segment.owned.owners) == HIDDEN // 4
    zr.Balancer(model, adamw(model)).close()
    assert list(balanced_layers(model)) == ["0.up", "0.down"]
