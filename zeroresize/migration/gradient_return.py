"""Gradients of lent columns arrive at their owner during backward, before anybody reads the gradient of their weight.

A lent weight enters its layer through an identity that is made before any layer computes. Autograd runs this node last
because it was created first. So its backward waits for the lent columns only when all layers have done their work. It
runs before the gradient is accumulated, so hooks, data parallelism, clipping and ``torch.autograd.grad`` see whole
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroresize.migration.transport import Pending, Transport
from zeroresize.plan.columns import Columns
from zeroresize.utils.torch_private import call_at_end_of_backward, current_backward


@dataclass(frozen=True, eq=False)
class _Expected:
    weight: Tensor
    columns: Columns
    pending: Pending
    backward: int


class GradientReturn:
    """Collects the gradients that this rank's lent columns still wait for."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = transports
        self._expected: list[_Expected] = []
        self._last_backward = -1

    def backward_begins(self) -> None:
        """Wait for all transfers at the end of the whole backward; every layer's backward calls this."""
        backward = current_backward()
        if self._last_backward != backward:
            self._last_backward = backward
            call_at_end_of_backward(lambda: self._backward_ends(backward))

    def awaiting_return(self, weight_in_graph: Callable[[], Tensor], weight: Tensor) -> Tensor:
        """Return a weight as a tensor whose gradient [N, K] waits for the columns that were lent."""
        with torch.enable_grad():
            return _AwaitReturn.apply(weight_in_graph(), weight, self)

    def expect(self, weight: Tensor, columns: Columns, pending: Pending) -> None:
        """Expect ``pending`` as the gradient of ``columns`` of ``weight`` in the backward that is under way."""
        self._expected.append(_Expected(weight, columns, pending, current_backward()))

    def whole(self, weight: Tensor, dw_NK: Tensor) -> Tensor:
        """Return ``dw_NK`` with the columns that other ranks computed in this backward."""
        backward = current_backward()
        arriving = [
            transfer for transfer in self._expected if transfer.weight is weight and transfer.backward == backward
        ]
        self._expected = [transfer for transfer in self._expected if transfer not in arriving]
        if not arriving:
            return dw_NK
        dw_NK = dw_NK.clone()
        for transfer in arriving:
            dw_NL = transfer.pending.wait()
            assert dw_NL is not None
            transfer.columns.add(dw_NK, dw_NL.to(dw_NK.dtype))
        return dw_NK

    def forget(self) -> None:
        """Wait for transfers that no backward will ask for, for example because it failed."""
        self._forget(self._expected)

    def _backward_ends(self, backward: int) -> None:
        """Wait for all that was sent, so this rank may end now, and for a dw that nobody asked for (dx alone was)."""
        self._forget([transfer for transfer in self._expected if transfer.backward == backward])
        self.finish_sending()

    def finish_sending(self) -> None:
        """Wait until all that was sent has left, by every transport even where an earlier one's wait fails."""
        with ExitStack() as ending:
            for transport in reversed(self._transports):  # the last one runs first
                ending.callback(transport.finish_sending)

    def _forget(self, arriving: Sequence[_Expected]) -> None:
        self._expected = [transfer for transfer in self._expected if transfer not in arriving]
        for transfer in arriving:
            transfer.pending.wait()


class _AwaitReturn(torch.autograd.Function):
    """w → w; dw → dw with the lent columns."""

    @staticmethod
    def forward(ctx, weight_in_graph, weight, gradient_return):
        ctx.weight, ctx.gradient_return = weight, gradient_return
        return weight_in_graph.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, dw_NK):
        return ctx.gradient_return.whole(ctx.weight, dw_NK), None, None
