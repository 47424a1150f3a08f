"""What ``torch.autocast`` does to a linear layer, for layers that autocast does not know."""

from __future__ import annotations

import torch
from torch import Tensor


def cast_for_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What ``torch.autocast`` does to the operands of ``F.linear``; gradients are cast back by autograd."""
    dtype = _autocast_dtype(x.device.type)
    if dtype is None:
        return x, weight, bias
    return _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast leaves float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast computes in on ``device_type``, or None where it is off (any torch from 2.2 on)."""
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
