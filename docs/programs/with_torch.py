"""A model that torch's styles split: torchrun --nproc-per-node 2 docs/programs/with_torch.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zeroresize as zr


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, num_words=32, width=16, num_blocks=2):
        super().__init__()
        self.embed = nn.Embedding(num_words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_words)

    def forward(self, words):
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def split(model, mesh):
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(use_local_output=True),
            "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    return model


def main(mesh, folder, num_steps=6):
    """Losses of a training in which rank 0 owns three quarters of the neurons from the third step on."""
    torch.manual_seed(0)  # equal weights on every rank, and equal batches
    model = split(Model(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after the split, which makes new weights
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig())
    losses = []
    for step in range(num_steps):
        words = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        if step == 1:
            balancer.move((3, 1))  # by hand, to show it; the balancer does it for a slow rank
        losses.append(loss.item())
    dcp.save(zr.sharded_state_dict(model, optimizer), checkpoint_id=folder)  # in any division
    with balancer.at_home():  # or as torch does, with all units at home
        weights = {
            name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in model.state_dict().items()
        }
    balancer.close(at_home=True)
    return losses, weights


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, _ = main(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"], "checkpoint")
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    dist.destroy_process_group()
