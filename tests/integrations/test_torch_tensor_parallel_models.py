"""The cases of torch's own examples of tensor parallelism, for converted models whose units have moved."""

import pytest
import torch.distributed as dist
from helpers.dtensor_models import ATTENTION, adamw, split, train, whole_model
from torch.distributed.device_mesh import init_device_mesh

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

pytestmark = pytest.mark.slow

EXACT = zr.BalanceConfig(mode="exact")


@pytest.mark.few(1)
@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp"), ("replica", "model")], ids="-".join)
def test_the_tensor_parallel_dimension_of_a_mesh_is_balanced_alike_on_all_replicas(run_ranks, names):
    tensor = "model" if "model" in names else "tp"
    other = next(name for name in names if name != tensor)
    whole = whole_model()
    expected = train(whole, adamw(whole), 4)

    def check(rank, group):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = split(whole_model(), grid[tensor])
        zr.convert(model, segments=ATTENTION)
        optimizer = adamw(model)
        balancer = zr.Balancer(model, optimizer, EXACT, data_parallel_group=grid[other])

        def average(*_):
            """What data parallelism does."""
            for parameter in model.parameters():
                dist.all_reduce(local_of(parameter.grad).div_(2), group=grid[other].get_group())

        def after(step):
            balancer.step()
            balancer.move((3, 1) if step < 2 else (1, 1))

        optimizer.register_step_pre_hook(average)
        assert train(model, optimizer, 4, after) == pytest.approx(expected, abs=1e-9)
        balancer.close()

    run_ranks(check, 4)
