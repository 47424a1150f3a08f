"""Checkpoints by torch's own functions of a converted model: at home whole, and refused while units are away."""

import copy

import pytest
import torch.distributed.checkpoint as dcp
from helpers.dtensor_models import ATTENTION, adamw, mesh_of, split, train, whole_model
from helpers.on_ranks import on_ranks
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import zeroresize as zr

pytestmark = pytest.mark.slow

EXACT = zr.BalanceConfig(mode="exact")


def converted(mesh):
    model = split(whole_model(), mesh)
    zr.convert(model, segments=ATTENTION)
    return model


@on_ranks(2)
def test_checkpoints_of_torch_go_round(rank, group, *, tmp_path):
    """At home by torch's own functions, sharded and whole, into a model whose units then move on."""

    mesh = mesh_of()
    model = converted(mesh)
    optimizer = adamw(model)
    balancer = zr.Balancer(model, optimizer, EXACT)
    train(model, optimizer, 2, lambda step: balancer.move((3, 1)))
    full = StateDictOptions(full_state_dict=True)
    with balancer.at_home():
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "sharded")
        whole, whole_moments = copy.deepcopy(get_state_dict(model, optimizer, options=full))
    assert all(not isinstance(one, DTensor) for one in whole.values())
    with pytest.raises(RuntimeError, match=r"at_home\(\)"):
        get_model_state_dict(model)
    with pytest.raises(RuntimeError, match="even"):
        set_model_state_dict(model, copy.deepcopy(whole), options=full)
    expected = train(model, optimizer, 2)

    for kind in ("sharded", "whole", "broadcast", "host"):
        other = split(whole_model(), mesh) if kind == "host" else converted(mesh)
        stepper = adamw(other)
        if kind == "sharded":
            state = dict(zip(("model", "optimizer"), get_state_dict(other, stepper), strict=True))
            dcp.load(state, checkpoint_id=tmp_path / "sharded")
            set_state_dict(other, stepper, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        else:
            broadcasts = StateDictOptions(full_state_dict=True, broadcast_from_rank0=kind == "broadcast")
            states = copy.deepcopy((whole, whole_moments))
            set_state_dict(other, stepper, model_state_dict=states[0], optim_state_dict=states[1], options=broadcasts)
        if kind == "host":
            assert train(other, stepper, 2) == pytest.approx(expected, abs=1e-9)
            continue
        follower = zr.Balancer(other, stepper, EXACT)
        follower.move((1, 3))
        assert train(other, stepper, 2) == pytest.approx(expected, abs=1e-9), kind
        follower.close()
