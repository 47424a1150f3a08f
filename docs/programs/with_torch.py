"""A model that torch's styles split: torchrun --nproc-per-node 2 docs/programs/with_torch.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import zeroresize as zr


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Sequential):
    def __init__(self, num_words=32, width=16):
        embed, head = nn.Embedding(num_words, width), nn.Linear(width, num_words)
        super().__init__(embed, Block(width), Block(width), nn.LayerNorm(width), head)


PLAN = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "[12].norm": SequenceParallel(use_local_output=True),
    "[12].up": ColwiseParallel(input_layouts=Shard(1)),
    "[12].down": RowwiseParallel(output_layouts=Shard(1)),
    "3": SequenceParallel(use_local_output=True),
    "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def main(mesh, folder, num_steps=6):
    """Losses of a training in which rank 0 owns three quarters of the neurons from the third step on."""
    torch.manual_seed(0)  # equal weights on every rank, and equal batches
    model = parallelize_module(Model(), mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # after the split, which makes new weights
    balancer = zr.Balancer(model, optimizer)
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
        weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    balancer.close(at_home=True)
    return losses, weights


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, _ = main(dist.init_device_mesh("cpu", (dist.get_world_size(),)), "checkpoint")
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    dist.destroy_process_group()
