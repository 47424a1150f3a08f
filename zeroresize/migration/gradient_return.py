"""Gradients of lent columns come home while backward goes on, before anybody sees the gradient of their weight.

A lent weight enters its layer through an identity that is made before any layer computes. Autograd carries out what was
made first last, so the identity's backward, which waits for the lent columns, runs when all layers have done their
work; and it runs before the gradient is accumulated, so that hooks, data parallelism, clipping and
``torch.autograd.grad`` see whole gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroresize.migration.buffers import Buffers
from zeroresize.migration.transport import Pending
from zeroresize.plan.columns import Columns


@dataclass(frozen=True, eq=False)
class _Expected:
    weight: Tensor
    columns: Columns
    pending: Pending
    backward: int


class GradientReturn:
    """What this rank's lent columns still wait for, and what it sends to others.

    Args:
        buffers: what is sent from.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._expected: list[_Expected] = []
        self._last_backward = -1

    def backward_begins(self) -> None:
        """Called in every layer's backward: when all of it is done, nothing of it is under way any more."""
        backward = torch._C._current_graph_task_id()
        if self._last_backward != backward:
            self._last_backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._backward_ends(backward))

    def awaiting_return(self, weight: Tensor) -> Tensor:
        """``weight`` itself, as a tensor whose gradient [N, K] waits for the columns that were lent."""
        with torch.enable_grad():
            return _AwaitReturn.apply(weight, self)

    def expect(self, weight: Tensor, columns: Columns, pending: Pending) -> None:
        """``pending`` will be the gradient of ``columns`` of ``weight`` in the backward that is under way."""
        self._expected.append(_Expected(weight, columns, pending, torch._C._current_graph_task_id()))

    def num_expected(self, weight: Tensor) -> int:
        """How many gradients of ``weight`` are expected, more than one where a layer is used several times."""
        return sum(one.weight is weight for one in self._expected)

    def whole(self, weight: Tensor, dw_NK: Tensor) -> Tensor:
        """``dw_NK`` with what others have computed of it in this backward."""
        backward = torch._C._current_graph_task_id()
        arriving = [one for one in self._expected if one.weight is weight and one.backward == backward]
        self._expected = [one for one in self._expected if one not in arriving]
        if not arriving:
            return dw_NK
        dw_NK = dw_NK.clone()
        for one in arriving:
            dw_NL = one.pending.wait()
            assert dw_NL is not None
            one.columns.add(dw_NK, dw_NL.to(dw_NK.dtype))
        return dw_NK

    def forget(self) -> None:
        """Wait for what no backward will ask for any more, as one that failed."""
        self._forget(self._expected)

    def _backward_ends(self, backward: int) -> None:
        """What it sent has left, even if this rank ends; what it was not asked for (dw, for dx alone) has arrived."""
        self._forget([one for one in self._expected if one.backward == backward])
        self._buffers.finish_sending()

    def _forget(self, arriving: Sequence[_Expected]) -> None:
        self._expected = [one for one in self._expected if one not in arriving]
        for one in arriving:
            one.pending.wait()


class _AwaitReturn(torch.autograd.Function):
    """w → w; dw → dw with the lent columns."""

    @staticmethod
    def forward(ctx, weight, gradient_return):
        ctx.weight, ctx.gradient_return = weight, gradient_return
        return weight.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dw_NK):
        return ctx.gradient_return.whole(ctx.weight, dw_NK), None
