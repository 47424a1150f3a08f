"""fully_shard over data-parallel ranks around layers that torch's parallelize_module has split."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.dtensor_comparisons import assert_same
from helpers.dtensor_models import ATTENTION, adamw, split, train, whole_model
from helpers.on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zeroresize as zr

pytestmark = [pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"), pytest.mark.versions]


def sharded(model, grid):
    for block in model.blocks:
        fully_shard(block, mesh=grid["dp"])
    return fully_shard(model, mesh=grid["dp"])


def model_of(grid, order):
    model = split(whole_model(), grid["tp"])
    if order == "before":
        sharded(model, grid)
    zr.convert(model, segments=ATTENTION)
    return sharded(model, grid) if order == "after" else model


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_at_home_it_is_the_host_and_moves_change_nothing(run_ranks, tmp_path, order):
    def check(rank, group):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        host = sharded(split(whole_model(), grid["tp"]), grid)
        expected = train(host, adamw(host), 3)
        model = model_of(grid, order)
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="off"))
        assert train(model, optimizer, 3, lambda step: balancer.step()) == expected
        assert_same(list(model.parameters()), list(host.parameters()), "weights after training")
        balancer.move((3, 1))
        assert len(set(model.blocks[0].mlp.down.segment.owned.counts)) == 2
        dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=tmp_path)
        with pytest.raises(RuntimeError, match=r"full_tensor\(\) of a DTensor whose units are divided unevenly"):
            model.blocks[0].mlp.down.weight.full_tensor()
        balancer.close(at_home=True)
        return {name: one.full_tensor().detach().clone() for name, one in model.named_parameters()}

    values, *_ = run_ranks(check, 4)
    state = whole_model().state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, values[name]), name


@pytest.mark.slow
@on_ranks(4)
def test_columns_at_random_are_dropped_as_without_fully_shard(rank, group):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    config = zr.BalanceConfig(mode="zero-rd", ratio=0.5, ranks=[1])
    results = []
    for is_sharded in (True, False):
        model = split(whole_model(), grid["tp"])
        zr.convert(model, segments=ATTENTION)
        if is_sharded:
            sharded(model, grid)
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, config)
        results.append(train(model, optimizer, 3, lambda step, balancer=balancer: balancer.step()))
        assert isinstance(model.blocks[0].mlp.up.weight, DTensor)
        balancer.close()
    assert results[0] == pytest.approx(results[1], abs=1e-8)
