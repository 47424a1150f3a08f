"""A host whose layers keep their own forward: torchrun --nproc-per-node 2 docs/programs/own_forward.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroresize as zr
from zeroresize.integrations import HostForwardClasses, register_host, register_segments


class Sum(torch.autograd.Function):
    """Sums over the ranks, in the forward or in the backward."""

    @staticmethod
    def forward(ctx, x, group, in_forward):
        ctx.group, ctx.in_forward, x = group, in_forward, x.clone()
        if in_forward and group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, dx):
        dx = dx.clone()
        if not ctx.in_forward and ctx.group is not None:
            dist.all_reduce(dx, group=ctx.group)
        return dx, None, None


class FusedMlp(nn.Module):
    """The host's layer: gate, up and down in one, with a scale for each neuron; it is split over the ranks."""

    def __init__(self, width, neurons, group=None):
        super().__init__()
        whole = torch.randn(2, neurons, width) / width**0.5, torch.randn(width, neurons) / neurons**0.5
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        self.gate_up = nn.Parameter(whole[0].chunk(ranks, 1)[rank].flatten(0, 1))
        self.scale = nn.Parameter(torch.ones(neurons // ranks))
        self.down = nn.Parameter(whole[1].chunk(ranks, 1)[rank].clone())
        self.bias = nn.Parameter(torch.zeros(width))
        self.process_group = group

    def forward(self, x):
        gate, up = (Sum.apply(x, self.process_group, False) @ self.gate_up.t()).chunk(2, -1)
        y = (F.silu(gate) * up * self.scale) @ self.down.t()
        return Sum.apply(y, self.process_group, True) + self.bias


# What moving units needs to know of it: neurons lie along dimension 1 of ``down``, and so on; in ``gate_up`` in two
# parts, one after the other; all ranks hold the same bias.
register_host(HostForwardClasses(segments={FusedMlp: {"down": 1, "gate_up": (0, 2), "scale": 0, "bias": None}}))
register_segments(FusedMlp, lambda mlp: zr.Segment([], mlp, kind="neurons"))


def main(group, num_steps=12):
    """Losses of a training in which rank 1 gives neurons away, and how many each rank has at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(FusedMlp(16, 128, group), FusedMlp(16, 128, group))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    balancer = zr.Balancer(model, optimizer)  # mode "exact" moves by itself where a rank is slow
    zr.check_segments(model, torch.randn(4, 16))  # each neuron is computed by itself: that was our word
    losses = []
    for step in range(num_steps):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x).square().mean()
        loss.backward()
        zr.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        balancer.step()
        if step == num_steps // 2:
            balancer.move((3, 1))  # or by hand
        losses.append(loss.item())
    return losses, model[0].segment.counts


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses, counts = main(dist.group.WORLD)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; the ranks have {counts} neurons")
    dist.destroy_process_group()
