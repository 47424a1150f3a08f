"""fully_shard over data-parallel ranks around layers that Colossal-AI's ShardFormer has split."""

import pytest
import torch
from helpers.fsdp2 import assert_refused_at_once, train_beside_host
from helpers.hosts import Host, batch, small_vit
from helpers.on_ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zeroresize as zr

pytestmark = [
    pytest.mark.usefixtures("colossalai_vit_modules"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("order", ["before", "after"])
@on_ranks(4)
def test_at_home_it_is_the_host_and_moves_change_nothing(rank, group, *, order):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tensor"))
    tensor, replicas = grid["tensor"].get_group(), grid["replicas"].get_group()
    host, model = (Host(tensor).shard(small_vit()).double() for _ in range(2))
    fully_shard(host, mesh=grid["replicas"])
    if order == "before":
        fully_shard(model, mesh=grid["replicas"])
    zr.convert(model, process_group=tensor)
    if order == "after":
        fully_shard(model, mesh=grid["replicas"])

    def loss_of(each, step):
        images, labels = batch(2 * step + torch.distributed.get_rank(replicas))
        return torch.nn.functional.cross_entropy(each(images.double()).logits, labels)

    moves = {1: (3, 1), 3: (1, 1)} if order == "after" else {}
    balancer = train_beside_host(host, model, loss_of, moves, process_group=tensor)
    if order == "before":  # the class of a wrapped model is another one, whose segments are not known
        assert_refused_at_once(balancer, ValueError, "no unit can change hands: the model has no segment")
