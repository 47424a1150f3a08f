"""A host whose layers are swapped: torchrun --nproc-per-node 2 docs/programs/own_products.py"""

import torch
import torch.distributed as dist
from torch import nn

import zeroresize as zr
from zeroresize.integrations import SwappedClasses, register_host
from zeroresize.layers.balanced_linear import BalancedLinear


class Sum(torch.autograd.Function):
    """Sums over the ranks in the forward, or, where ``in_forward`` is false, in the backward."""

    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.group, ctx.in_forward, x = group, in_forward, x.clone()
        if in_forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        if not ctx.in_forward:
            dist.all_reduce(dx, group=ctx.group)
        return dx, None, None


# The host's layers, which know nothing of balancing.
class HostColumn(nn.Linear):
    def __init__(self, in_features, out_features, group):
        super().__init__(in_features, out_features // group.size())
        self.process_group = group

    def forward(self, x):
        return super().forward(Sum.apply(x, self.process_group, False))


class HostRow(nn.Linear):
    def __init__(self, in_features, out_features, group):
        super().__init__(in_features // group.size(), out_features, bias=False)
        self.process_group = group

    def forward(self, x):
        return Sum.apply(super().forward(x), self.process_group, True)


# What balancing needs to know of them.
class BalancedColumn(BalancedLinear, HostColumn):
    is_column_parallel = True

    def forward(self, x):
        return self.column_products(x, self.bias)


class BalancedRow(BalancedLinear, HostRow):
    is_column_parallel = False

    def forward(self, x):
        return self.row_products(x)


register_host(SwappedClasses({HostColumn: BalancedColumn, HostRow: BalancedRow}))


def main(group, num_steps=20):
    """Losses of a training in which rank 1 prunes half of its columns, whatever its speed, and the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(HostColumn(64, 256, group), nn.GELU(), HostRow(256, 64, group))
    optimizer = torch.optim.AdamW(model.parameters())
    balancer = zr.Balancer(model, optimizer, zr.BalanceConfig(mode="zero-pri", ratio=0.5, ranks=[1]))
    x, losses = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)), []
    for _ in range(num_steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        losses.append(loss.item())
    return losses, balancer.plan


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, plan = main(dist.group.WORLD)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; rank 1 prunes {plan.ranks[1].pruned:.0%}")
    dist.destroy_process_group()
