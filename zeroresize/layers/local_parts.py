"""What this rank holds of a tensor: all of a plain one, of a DTensor its local part, of a jagged one its packed tokens.

While units are away from home only the local parts of a parameter, its gradient and its optimizer state have another
size; shape and placements of the DTensors stay those of even shares, and torch looks at these alone: some ranks would
wait for what others do not send, or a file would hold what belongs elsewhere. Of a packed layer they tell no order that
checkpoints know, or, where its parts are of different sizes, none at all. So methods that look at placements are errors
then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroresize.utils.torch_private import dtensor_like, is_dtensor, is_tensor_of_tensors, jagged_like, local_tensor_of

#: What torch.distributed.checkpoint asks before it looks for DTensors.
OF_CHECKPOINTS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
#: These, and methods of a DTensor.
METHODS = ("full_tensor", "redistribute", *OF_CHECKPOINTS)


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor``: the very same plain tensor each time, outside of autograd's graph."""
    return local_tensor_of(tensor) if is_dtensor(tensor) else tensor


def why_not_plain(tensor: Tensor) -> str | None:
    """Tell what this rank's part of a tensor is if it is made of others, of which nothing would move; None if not."""
    why = "which holds its numbers in other tensors, as quantised weights do, that would not move"
    return f"a {type(local_of(tensor)).__name__}, {why}" if is_tensor_of_tensors(local_of(tensor)) else None


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as a tensor of the kind of ``like``: a DTensor of its placements, or itself."""
    return dtensor_like(like, local) if is_dtensor(like) else local


def local_in_graph(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor`` such that its gradient reaches it, as a DTensor if it is one.

    Unlike ``DTensor.to_local`` it works for uneven parts.
    """
    if not is_dtensor(tensor):
        return tensor
    if torch.compiler.is_compiling():
        dtensor: Any = tensor
        return _LocalPartCompiled.apply(dtensor, dtensor.device_mesh, dtensor.placements)
    if not (tensor.requires_grad and torch.is_grad_enabled()):  # inference_mode would not let a Function detach
        return local_tensor_of(tensor)
    local: Tensor = _LocalPart.apply(tensor)
    return local


def on_tokens(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` for a function of each token alone; for a jagged ``x``, of its packed tokens, jagged as x is."""
    if not x.is_nested:
        return function(x)
    if x.layout is not torch.jagged:
        raise ValueError(f"input is a nested tensor of layout {x.layout}: allowed are plain ones and torch.jagged")
    return jagged_like(x, function(x.values()))


def guard_dtensors(tensors: Iterable[Tensor], *, are_away: bool, refused: Collection[str] = ()) -> None:
    """Let DTensors be gathered, redistributed and saved, or not while their units are away."""
    for tensor in tensors:
        if is_dtensor(tensor):
            for name in METHODS:
                if are_away or name in refused:
                    vars(tensor)[name] = _Refusal(name, are_away)
                else:
                    vars(tensor).pop(name, None)


class _Refusal:
    """In place of a method while units are away, or of a packed layer."""

    def __init__(self, name: str, are_away: bool) -> None:
        self._name, self._are_away = name, are_away

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        what = "a checkpoint" if self._name.startswith("__") else f"{self._name}()"
        if not self._are_away:
            raise RuntimeError(
                f"{what} of a DTensor of a packed layer (parts=), or of whole units (unit_size=): its placements do "
                "not say how it is divided. Let torch.distributed.checkpoint save "
                "`zeroresize.sharded_state_dict(model, optimizer)`, which holds the layout of the undivided model"
            )
        raise RuntimeError(
            f"{what} of a DTensor whose units are divided unevenly among the ranks: its placements say what ranks hold "
            "at home. Have all units at home, `with balancer.at_home(): ...` on every rank of the group, or let "
            "torch.distributed.checkpoint save `zeroresize.sharded_state_dict(model, optimizer)`, which holds any "
            "division"
        )


class _LocalPart(torch.autograd.Function):
    """The local part; its gradient is that of the DTensor, with the same placements."""

    @staticmethod
    def forward(ctx, dtensor):
        ctx.dtensor, ctx.like = dtensor, dtensor.detach()
        local = local_tensor_of(dtensor)
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        now = local_tensor_of(ctx.dtensor)
        if now.shape != gradient.shape:  # torch looks at the DTensor's shape, which a move leaves as it is
            raise RuntimeError(
                f"units have moved since this forward: its gradient is {tuple(gradient.shape)} on this rank, and the "
                f"parameter {tuple(now.shape)} now. Move between an optimizer's step and the next forward"
            )
        return dtensor_like(ctx.like, gradient)


class _LocalPartCompiled(torch.autograd.Function):
    """The same by public calls of DTensor's, which dynamo can put into a graph; also for uneven parts."""

    @staticmethod
    def forward(ctx, dtensor, mesh, placements):
        ctx.mesh, ctx.placements = mesh, placements
        ctx.shape, ctx.strides = dtensor.shape, dtensor.stride()
        return dtensor.to_local()

    @staticmethod
    def backward(ctx, gradient):
        dtensor = sys.modules["torch.distributed.tensor"].DTensor
        whole = dtensor.from_local(
            gradient, ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.strides
        )
        return whole, None, None
