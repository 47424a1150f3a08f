"""torch's ZeroRedundancyOptimizer, of which each replica steps other parameters: it trains right, or is refused."""

import pytest
import torch
import torch.distributed as dist
from helpers.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zeroresize as zr

WIDTH, NEURONS = 8, 16
SHARDED = "the optimizer is a ZeroRedundancyOptimizer, whose replicas keep different parts of its state"


def whole_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, NEURONS), nn.GELU(), nn.Linear(NEURONS, WIDTH)).double()


def split(group):
    column, activation, row = whole_model()
    return nn.Sequential(
        zr.ColumnParallelLinear.from_linear(column, process_group=group),
        activation,
        zr.RowParallelLinear.from_linear(row, process_group=group),
    )


def zero_of(model, **options):
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, **options)


def losses(model, optimizer, after=lambda: None):
    values = []
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        loss = (model(x) - x.flip(-1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
        after()
    return values


@on_ranks(2)
def test_over_ranks_of_other_shards_it_is_refused(rank, group):
    """By default it is over all ranks, and would put one rank's weights in place of another one's."""
    model = split(group)
    refusal = (
        r"ZeroRedundancyOptimizer gives ranks \[0, 1\] of the job each other's weights, which hold different shards"
    )
    for start_checks in (True, False):
        with pytest.raises(ValueError, match=refusal):
            zr.Balancer(model, zero_of(model), zr.BalanceConfig(mode="off", start_checks=start_checks))


@pytest.mark.parametrize("is_view", [False, True])
@on_ranks(4)
def test_over_replicas_units_stay_and_it_trains_as_the_undivided_model(rank, _, *, is_view):
    tensor_parallel = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    replicas = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    whole = whole_model()
    expected = losses(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2))
    options = {"process_group": replicas, "parameters_as_bucket_view": is_view}
    model = DistributedDataParallel(split(tensor_parallel), process_group=replicas)
    optimizer = zero_of(model, **options)
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="exact"), process_group=tensor_parallel)
    assert losses(model, optimizer, balancer.step) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=SHARDED):
        balancer.move((3, 1))
    model(torch.ones(2, WIDTH).double()).sum().backward()
    before = [each.detach().clone() for each in model.parameters()]
    with pytest.raises(ValueError, match=f"sharded_state_dict: {SHARDED}"):  # it would step, and save no moments
        zr.sharded_state_dict(model, optimizer)
    assert all(map(torch.equal, model.parameters(), before))
    balancer.close()

    uneven = split(tensor_parallel)
    optimizer = zero_of(uneven, **options)
    with pytest.raises(ValueError, match=rf"shares=.*: units cannot be divided so: {SHARDED}$"):
        zr.convert(uneven, tensor_parallel, shares=(3, 1), optimizer=optimizer)
    uneven = split(tensor_parallel)
    optimizer = zero_of(uneven, **options)
    zr.convert(uneven, tensor_parallel, shares=(3, 1))
    wrapped = DistributedDataParallel(uneven, process_group=replicas)
    with pytest.raises(ValueError, match=rf"units are divided by the shares \[1\.5, 0\.5\]: {SHARDED}$"):
        zr.Balancer(wrapped, optimizer, zr.BalanceConfig(mode="off"), process_group=tensor_parallel)

    sharded = fully_shard(split(tensor_parallel), mesh=DeviceMesh.from_group(replicas, "cpu"))
    with pytest.raises((NotImplementedError, RuntimeError), match=r"DTensor|sharding strategy"):  # torch's own
        losses(sharded, zero_of(sharded, **options))
