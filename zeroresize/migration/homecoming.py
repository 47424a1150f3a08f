"""Gradients of lent columns come home: received while backward goes on, added to their weight when it ends."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroresize.migration.buffers import Buffers
from zeroresize.migration.carrier import Pending
from zeroresize.migration.columns import Columns


class Homecoming:
    """What this rank's lent columns still wait for, and what it has sent to others.

    Args:
        buffers: what is sent from.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._expected: list[tuple[Tensor, Columns, Pending]] = []
        self._is_queued = False

    def backward_begins(self) -> None:
        """Called in every layer's backward; when all of it is done, gradients accumulated, everything comes home."""
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.bring_home)

    def expect(self, weight: Tensor, columns: Columns, pending: Pending) -> None:
        """``pending`` will be the gradient of ``columns`` of ``weight``."""
        self._expected.append((weight, columns, pending))

    def num_expected(self, weight: Tensor) -> int:
        """How many gradients of ``weight`` are expected, more than one where a layer is used several times."""
        return sum(other is weight for other, _, _ in self._expected)

    @torch.no_grad()
    def bring_home(self) -> None:
        """Wait for what is on its way and add it to the gradients; returns at once if nothing is.

        Raises:
            RuntimeError: if a weight has no gradient to add to, as under ``torch.autograd.grad``.
        """
        expected, self._expected, self._is_queued = self._expected, [], False
        for weight, columns, pending in expected:
            dw_NL = pending.wait()
            assert dw_NL is not None
            if weight.grad is None:
                raise RuntimeError("a weight whose columns are lent has no .grad: use backward(), not autograd.grad()")
            columns.add(weight.grad, dw_NL.to(weight.grad.dtype))
        self._buffers.finish_sending()
