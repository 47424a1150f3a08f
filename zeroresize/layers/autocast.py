"""Operands as ``torch.autocast`` casts those of ``F.linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroresize.utils.torch_state import autocast_dtype


def cast_for_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands as ``torch.autocast`` casts those of ``F.linear``; autograd casts gradients back."""
    dtype = autocast_dtype(x.device.type)
    if dtype is None:
        return x, weight, bias
    return _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Autocast leaves float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def is_cast_by_autocast(x: Tensor) -> bool:
    """Tell whether a layer computes with another dtype than that of its input, since autocast is on."""
    dtype = autocast_dtype(x.device.type)
    return dtype is not None and x.dtype not in (dtype, torch.float64) and not x.is_nested
