"""Jagged nested tensors: a batch of sequences of different lengths, packed one after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeroresize.utils.torch_private import jagged_like


def on_tokens(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` for a function of each token alone; for a jagged ``x``, of its packed tokens, jagged as x is.

    Raises:
        ValueError: for a nested tensor of another layout.
    """
    if not x.is_nested:
        return function(x)
    if x.layout is not torch.jagged:
        raise ValueError(f"input is a nested tensor of layout {x.layout}: allowed are plain ones and torch.jagged")
    return jagged_like(x, function(x.values()))
