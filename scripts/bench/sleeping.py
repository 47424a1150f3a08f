"""Layers that sleep: seconds that are those of a schedule, not of the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Sleep(torch.autograd.Function):
    """y = x and dx = dy, after ``sleep(seconds)`` in forward and ``sleep(2 * seconds)`` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: Callable[[float], None], seconds: float) -> Tensor:
        ctx.sleep, ctx.seconds = sleep, seconds
        sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.sleep(2 * ctx.seconds)
        return gradients[0].clone(), None, None


def sleep_beside(x: Tensor, sleep: Callable[[float], None], seconds: float) -> Tensor:
    """Return ``x``, delayed: forward calls ``sleep(seconds)`` and backward ``sleep(2 * seconds)``."""
    return _Sleep.apply(x, sleep, seconds)  # type: ignore[no-any-return, no-untyped-call]
