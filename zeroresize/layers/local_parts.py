"""What this rank holds of a tensor: all of a plain one, and of a DTensor its local part.

While units are away from home only the local parts of a parameter, its gradient and its optimizer state have another
size; shape and placements of the DTensors stay those of even shares.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroresize.utils.torch_private import dtensor_like, is_dtensor, local_tensor_of


def local_of(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor``: the very same plain tensor each time, outside of autograd's graph."""
    return local_tensor_of(tensor) if is_dtensor(tensor) else tensor


def with_local(like: Tensor, local: Tensor) -> Tensor:
    """Return ``local`` as a tensor of the kind of ``like``: a DTensor of its placements, or itself."""
    return dtensor_like(like, local) if is_dtensor(like) else local


def local_in_graph(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor`` such that its gradient reaches ``tensor``, as a DTensor if it is one.

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
