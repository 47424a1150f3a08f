"""The shortest whole program: plain torch on CPU ranks, rank 1 four times as slow as the others.

torchrun --nproc-per-node 2 -m vit_examples.minimal
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroresize as zr

WIDTH, NUM_CLASSES, BATCH = 512, 10, 256


class Block(nn.Module):
    """A feed-forward block, split over ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.up = zr.ColumnParallelLinear.from_linear(nn.Linear(WIDTH, 4 * WIDTH), process_group=group)
        self.down = zr.RowParallelLinear.from_linear(nn.Linear(4 * WIDTH, WIDTH), process_group=group)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group()  # of all ranks
    torch.set_num_threads(1)
    torch.manual_seed(0)  # equal weights and equal batches on all ranks

    model = nn.Sequential(Block(group), Block(group), nn.Linear(WIDTH, NUM_CLASSES))
    optimizer = torch.optim.AdamW(model.parameters())

    config = zr.BalanceConfig(update_every=5)  # mode "exact": nothing is dropped
    balancer = zr.Balancer(model, optimizer, config)

    with zr.StragglerInjector(model, process_group=group, chi={1: 4.0}):
        for _ in range(6):
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
