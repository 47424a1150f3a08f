"""Rotary positions (RoFormer, Eq. 34)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_waves(positions_T: Tensor, head_size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, C / 2] of the positions' angles."""
    wide = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, head_size, 2, device=positions_T.device, dtype=wide) / head_size
    angles = positions_T[:, None] * base**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Each head's feature i and the one half a head further turn together; waves are broadcast to [..., C / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)
