"""FSDP2 around layers that torch's styles split: torchrun --nproc-per-node 4 docs/programs/with_fsdp2.py folder"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zeroresize as zr


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(grid):
    """Split first, then converted, then sharded: segments are looked for while the weights are whole."""
    torch.manual_seed(0)  # equal weights on every rank
    model = nn.Sequential(Block(), Block())
    parallelize_module(model, grid["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    zr.convert(model)
    for block in model:
        fully_shard(block, mesh=grid["dp"])
    return fully_shard(model, mesh=grid["dp"])


def main(grid, folder, num_steps=12, goes_on=False):
    """Losses of a training of two micro-batches a step; the first half is saved, and can be gone on from."""
    model = model_of(grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after fully_shard, which makes new Parameters
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    balancer = zr.Balancer(model, optimizer, process_group=grid["tp"])
    state = {**zr.sharded_state_dict(model, optimizer), "balancer": balancer, "scheduler": scheduler}
    if goes_on:
        dcp.load(state, storage_reader=zr.CheckpointReader(folder))

    replica, losses = grid["dp"].get_local_rank(), []
    for step in range(num_steps // 2 if goes_on else 0, num_steps):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)  # once a step is enough
            seed = 100 * step + 10 * number + replica  # replicas have other batches, tensor-parallel ranks the same
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))
            loss = (model(x) - x.roll(1, dims=1)).square().mean()
            (loss / 2).backward()
            losses.append(loss.item())
        zr.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        balancer.step()
        if step == 2:
            balancer.move((3, 1))  # by hand, to show it; the balancer does it for a slow rank
        if step + 1 == num_steps // 2 and not goes_on:
            dcp.save(state, checkpoint_id=folder)  # whole tensors, wherever units are
    balancer.close(at_home=True)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print("losses:", *main(dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), sys.argv[1]))
    dist.destroy_process_group()
