"""fully_shard over data-parallel ranks around layers that Colossal-AI's ShardFormer has split."""

import time

import pytest
import torch
from helpers.hosts import Host, batch, small_vit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroresize as zr
from zeroresize.layers.local_parts import local_of

pytestmark = [
    pytest.mark.usefixtures("colossalai_vit_modules"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]

#: Before convert the class of a wrapped model is another one, whose segments are not known.
_WHY = {"before": "the model has no segment", "after": ".* is a DTensor, .* fully_shard"}


@pytest.mark.parametrize("order", ["before", "after"])
def test_what_does_not_move_is_that_of_the_host_and_moves_are_refused_at_once(run_ranks, order):
    def check(rank, group):
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tensor"))
        tensor, replicas = grid["tensor"].get_group(), grid["replicas"].get_group()
        host, model = (Host(tensor).shard(small_vit()) for _ in range(2))
        fully_shard(host, mesh=grid["replicas"])
        if order == "before":
            fully_shard(model, mesh=grid["replicas"])
        zr.convert(model, process_group=tensor)
        if order == "after":
            fully_shard(model, mesh=grid["replicas"])
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (host, model)]
        config = zr.BalanceConfig(mode="off")
        balancer = zr.Balancer(model, optimizers[1], process_group=tensor, config=config, data_parallel_group=replicas)
        for step in range(3):
            images, labels = batch(2 * step + torch.distributed.get_rank(replicas))
            losses = []
            for each, optimizer in zip((host, model), optimizers, strict=True):
                loss = torch.nn.functional.cross_entropy(each(images).logits, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            balancer.step()
            assert losses[0] == losses[1]
        for ours, theirs in zip(model.parameters(), host.parameters(), strict=True):
            assert torch.equal(local_of(ours), local_of(theirs))
        began = time.perf_counter()
        with pytest.raises(ValueError, match="no unit can change hands: " + _WHY[order]):
            balancer.move((3, 1))
        assert time.perf_counter() - began < 5

    run_ranks(check, 4)
