"""check_segments() of models that torch's parallelize_module has split into DTensors."""

import pytest
import torch
from helpers.dtensor_models import ATTENTION, batch, mesh_of, split, whole_model
from helpers.on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import zeroresize as zr
from zeroresize.conversion import balanced_layers
from zeroresize.layers.local_parts import local_of
from zeroresize.layers.segments import owned_segments


def converted(segments, **layout):
    model = split(whole_model().float(), mesh_of(), **layout)
    return zr.convert(model, segments=segments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [{}, {"sequence": True}, {"head": {"output_layouts": Shard(-1), "use_local_output": False}}],
    ids=["whole", "sequence", "logits that stay divided"],
)
@on_ranks(2)
def test_segments_that_move_soundly_pass_and_the_model_is_left_as_it_was(rank, group, *, layout):
    model = converted(ATTENTION, **layout)
    parameters = dict(model.named_parameters())
    values = {name: local_of(one).detach().clone() for name, one in parameters.items()}
    checks = zr.check_segments(model, batch(0))
    assert sorted((one.kind, one.problem) for one in checks) == [("heads", None)] * 2 + [("neurons", None)] * 2
    assert all(max(one.output_difference, one.gradient_difference) < 1e-12 for one in checks)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and isinstance(parameter, DTensor) and parameter.grad is None
        assert torch.equal(local_of(parameter), values[name]), name
    assert all(one.owned.is_home for one in owned_segments(balanced_layers(model)))


@on_ranks(4)
def test_parameters_that_fsdp_gathers_in_every_forward_are_refused_on_every_rank(rank, group):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = zr.convert(split(whole_model(), grid["tp"]), segments=ATTENTION)
    fully_shard(model, mesh=grid["dp"])
    with pytest.raises(ValueError, match="of which FSDP shards and gathers the values"):
        zr.check_segments(model, batch(0))
