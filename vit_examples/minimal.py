"""The shortest whole program: plain torch on CPU ranks, where products take rank 1 four times as long.

torchrun --nproc-per-node 2 -m vit_examples.minimal
"""

import logging
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import zeroresize as zr

WIDTH, NUM_CLASSES, BATCH = 512, 10, 256


class Block(nn.Module):
    """A feed-forward block with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")  # tells what the balancer does, and why
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.set_num_threads(1)
    torch.manual_seed(0)  # equal weights and equal batches on all ranks

    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, NUM_CLASSES))
    for block in model[:2]:
        parallelize_module(block, mesh, {"up": zr.ColwiseParallel(), "down": zr.RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters())  # after the split, which makes new weights

    config = zr.BalanceConfig(update_every=5)  # mode "exact": nothing is dropped
    balancer = zr.Balancer(model, optimizer, config)

    with zr.StragglerInjector(model, process_group=mesh, chi={1: 4.0}):
        for _ in range(12):
            begin = time.perf_counter()
            for _ in range(config.update_every):
                x, target = torch.randn(BATCH, WIDTH), torch.randint(NUM_CLASSES, (BATCH,))
                nn.functional.cross_entropy(model(x), target).backward()
                optimizer.step()
                optimizer.zero_grad()
                balancer.step()
            step_ms = 1e3 * (time.perf_counter() - begin) / config.update_every
            if dist.get_rank() == 1:
                computed = 1.0 - balancer.metrics()["balance/relieved"]  # the rest is lent, or has moved to rank 0
                print(f"{step_ms:5.0f} ms a step, rank 1 computes {computed:.0%} of an even share", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
