"""Every collective of training, in the field's terms; ranks are counted within the group.

The all-reduces of the column-parallel dx and the row-parallel y stand inside the products' backward and forward, which
start them here, because one is overlapped and the other works in place on the product's own output.
"""

from __future__ import annotations

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


def world_size() -> int:
    """All ranks of the job, whatever group they are in."""
    return dist.get_world_size()


def group_rank(process_group: ProcessGroup) -> int:
    return dist.get_rank(process_group)


def group_ranks(process_group: ProcessGroup) -> list[int]:
    """The group's ranks, counted over the whole world."""
    return dist.get_process_group_ranks(process_group)


def same_ranks(one: ProcessGroup, other: ProcessGroup) -> bool:
    """Whether two groups hold the same ranks in the same order."""
    return one is other or group_ranks(one) == group_ranks(other)


def all_reduce(tensor: Tensor, process_group: ProcessGroup) -> None:
    """Sum ``tensor`` over the group in place."""
    if group_size(process_group) > 1:
        dist.all_reduce(tensor, group=process_group)


def start_all_reduce(tensor: Tensor, process_group: ProcessGroup) -> dist.Work | None:
    """Start summing ``tensor`` over the group in place; None where there is nothing to wait for."""
    if group_size(process_group) == 1:
        return None
    return dist.all_reduce(tensor, group=process_group, async_op=True)


def broadcast(tensor: Tensor, root: int, process_group: ProcessGroup) -> None:
    """``tensor`` of rank ``root`` within the group, on every rank, in place."""
    start_broadcast(tensor, root, process_group).wait()


def start_broadcast(tensor: Tensor, root: int, process_group: ProcessGroup) -> dist.Work:
    """Start :func:`broadcast`."""
    root = dist.get_global_rank(process_group, root)
    return dist.broadcast(tensor, root, group=process_group, async_op=True)


def start_reduce(tensor: Tensor, root: int, process_group: ProcessGroup) -> dist.Work:
    """Start summing ``tensor`` over the group, in place, on rank ``root`` within it."""
    return dist.reduce(tensor, dist.get_global_rank(process_group, root), group=process_group, async_op=True)


def start_send(tensor: Tensor, receiver: int, process_group: ProcessGroup) -> list[dist.Work]:
    """Start sending ``tensor`` to rank ``receiver`` within the group, unless it is empty: what is to be waited for."""
    if tensor.numel() == 0:
        return []
    work = dist.isend(tensor, dist.get_global_rank(process_group, receiver), group=process_group)
    return [work] if work is not None else []


def start_receive(tensor: Tensor, sender: int, process_group: ProcessGroup) -> list[dist.Work]:
    """Start filling ``tensor`` with what rank ``sender`` within the group sends, as :func:`start_send` does."""
    if tensor.numel() == 0:
        return []
    work = dist.irecv(tensor, dist.get_global_rank(process_group, sender), group=process_group)
    return [work] if work is not None else []


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
