"""Jagged nested tensors: a batch of sequences of different lengths, packed one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_tokens(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function(x)`` for a function of each token alone; for a jagged ``x``, of its packed tokens, jagged as x is
    (from torch 2.5 on).

    Raises:
        ValueError: for a nested tensor of another layout, or an older torch.
    """
    if not x.is_nested:
        return function(x)
    if x.layout is not torch.jagged:
        raise ValueError(f"input is a nested tensor of layout {x.layout}: allowed are plain ones and torch.jagged")
    if not hasattr(x, "_maybe_min_seqlen"):
        raise ValueError(f"jagged inputs need torch 2.5 or newer, this is {torch.__version__}")
    return _nested_as(x, function(x.values()))


def _nested_as(x: Any, tokens: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(
        tokens,
        x.offsets(),
        x.lengths(),
        x._ragged_idx,
        x._maybe_min_seqlen,  # None where unknown: computing them would wait for the device
        x._maybe_max_seqlen,
    )
