"""Every collective of the package, in the field's terms, and the one place that knows torch's versions.

The all-reduces of the column-parallel dx and the row-parallel y stand inside the Functions of ``functional.py``, which
start them here, because one is overlapped and the other works in place on the product's own output.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def require_group(process_group: ProcessGroup | None) -> ProcessGroup:
    """``process_group`` itself.

    Raises:
        ValueError: if it is None, or this rank is not a member.
    """
    if process_group is None:
        raise ValueError("process_group=None is not allowed: name the tensor-parallel group explicitly")
    if dist.get_rank(process_group) < 0:
        raise ValueError("this rank is not a member of process_group: pass the tensor-parallel group that it is in")
    return process_group


def group_size(process_group: ProcessGroup) -> int:
    return dist.get_world_size(process_group)


def group_rank(process_group: ProcessGroup) -> int:
    return dist.get_rank(process_group)


def same_ranks(one: ProcessGroup, other: ProcessGroup) -> bool:
    """Whether two groups hold the same ranks in the same order."""
    return one is other or dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)


def all_reduce(tensor: Tensor, process_group: ProcessGroup) -> None:
    """Sum ``tensor`` over the group in place."""
    if group_size(process_group) > 1:
        dist.all_reduce(tensor, group=process_group)


def start_all_reduce(tensor: Tensor, process_group: ProcessGroup) -> dist.Work | None:
    """Start summing ``tensor`` over the group in place; None where there is nothing to wait for."""
    if group_size(process_group) == 1:
        return None
    return dist.all_reduce(tensor, group=process_group, async_op=True)


def start_all_gather(parts: list[Tensor], tensor: Tensor, process_group: ProcessGroup) -> dist.Work:
    """Start filling ``parts`` with every rank's ``tensor``."""
    return dist.all_gather(parts, tensor, group=process_group, async_op=True)


def exchange_group(process_group: ProcessGroup) -> ProcessGroup:
    """A CPU (gloo) group of the same ranks, for numbers: no device synchronisation, no interleaving with the host's
    collectives. Only the members of ``process_group`` take part in making it (safe under DP × TP)."""
    ranks = dist.get_process_group_ranks(process_group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def destroy_group(process_group: ProcessGroup) -> None:
    """Take a group down; nothing happens if that was done already, with all groups for example."""
    with contextlib.suppress(ValueError, AssertionError, RuntimeError):
        dist.destroy_process_group(process_group)


def gather_from(x: Tensor, process_group: ProcessGroup) -> Tensor:
    """All ranks' ``x`` side by side on the last dimension in forward, this rank's slice of the gradient in backward."""
    return x if group_size(process_group) == 1 else _GatherFrom.apply(x, process_group)


def scatter_to(x: Tensor, process_group: ProcessGroup) -> Tensor:
    """This rank's slice of the last dimension in forward, all-gather of the gradient in backward."""
    return x if group_size(process_group) == 1 else _ScatterTo.apply(x, process_group)


def _all_gather_last_dim(x: Tensor, process_group: ProcessGroup) -> Tensor:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group_size(process_group))]
    dist.all_gather(parts, x, group=process_group)
    return torch.cat(parts, dim=-1)


def _own_slice_of_last_dim(x: Tensor, process_group: ProcessGroup) -> Tensor:
    return x.chunk(group_size(process_group), dim=-1)[group_rank(process_group)].contiguous()


class _GatherFrom(torch.autograd.Function):
    """y = [x_0 … x_(R−1)] on the last dimension; dx = this rank's slice of dy."""

    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        return _all_gather_last_dim(x, process_group)

    @staticmethod
    def backward(ctx, dy):
        return _own_slice_of_last_dim(dy, ctx.process_group), None


class _ScatterTo(torch.autograd.Function):
    """y = this rank's slice of x on the last dimension; dx = [dy_0 … dy_(R−1)]."""

    @staticmethod
    def forward(ctx, x, process_group):
        ctx.process_group = process_group
        return _own_slice_of_last_dim(x, process_group)

    @staticmethod
    def backward(ctx, dy):
        return _all_gather_last_dim(dy, ctx.process_group), None
