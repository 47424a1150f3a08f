"""What the method says (ZERO-resizing, paper section III-A), written with masks and so with nothing of the library's.

``T`` tokens, ``N`` output and ``K`` input features; ``kept_K`` is True at the columns that are computed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mask(keep: list[int], num_columns: int) -> Tensor:
    """``kept_K`` of the list of kept columns."""
    return torch.tensor([column in keep for column in range(num_columns)])


def forward(x: Tensor, w_NK: Tensor, kept_K: Tensor) -> Tensor:
    """y = x[:, keep] w[:, keep]ᵀ: the terms of the other columns are missing from every sum."""
    return (x * kept_K) @ (w_NK * kept_K).T


def dgrad(dy: Tensor, w_NK: Tensor, kept_K: Tensor, imputation: str = "zero", last: Tensor | None = None) -> Tensor:
    """dx[:, keep] = dy w[:, keep], the rest imputed."""
    return impute(dy @ w_NK, kept_K, imputation, last)


def wgrad(dy: Tensor, x: Tensor, kept_K: Tensor, imputation: str = "zero", last: Tensor | None = None) -> Tensor:
    """dw[:, keep] = dyᵀ x[:, keep], the rest imputed."""
    return impute(torch.einsum("...n,...k->nk", dy, x), kept_K, imputation, last)


def impute(gradient: Tensor, kept_K: Tensor, imputation: str, last: Tensor | None) -> Tensor:
    """The whole ``gradient`` with its columns that are not kept replaced."""
    rest = torch.zeros_like(gradient)
    if imputation == "average":
        rest += (gradient * kept_K).sum(dim=-1, keepdim=True) / kept_K.sum()
    if imputation == "same" and last is not None and last.shape == gradient.shape:
        rest = last
    return torch.where(kept_K, gradient, rest)
