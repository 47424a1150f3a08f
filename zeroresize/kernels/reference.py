"""The three products of a linear layer on the columns that a plan keeps, in plain torch: CPU path and oracle.

``T`` tokens, ``N`` output features, ``K`` input features, ``P`` of them kept (all on this rank). Source: section III-A
of the paper. Every function multiplies through ``gemm`` so that probes see the multiplication apart from the gathers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroresize.kernels.probe import Probes
from zeroresize.plan.layer import LayerPlan


def forward(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: LayerPlan | None, gemm: Probes) -> Tensor:
    """Return y_TN = x[:, keep] · w[:, keep]ᵀ + bias; without a plan ``x`` may have any leading dimensions."""
    if plan is None:
        return gemm(F.linear, x_TK, w_NK, bias_N)
    return gemm(F.linear, plan.kept.of(x_TK), plan.kept.of(w_NK), bias_N)


def dgrad(dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None, last_dx_TK: Tensor | None, gemm: Probes) -> Tensor:
    """Return dx_TK with dx[:, keep] = dy · w[:, keep] and the other columns imputed.

    Imputation "same" takes them from ``last_dx_TK``.
    """
    if plan is None:
        return gemm(torch.matmul, dy_TN, w_NK)
    dx_TP, whole = _room(len(dy_TN), dy_TN, plan)
    gemm(partial(torch.mm, out=dx_TP), dy_TN, plan.kept.of(w_NK))
    return _impute(whole(), dx_TP, plan, last_dx_TK)


def dgrad_by_columns(dy_TN: Tensor, w_NK: Tensor, gemm: Probes) -> Tensor:
    """Return the whole dx_TK = dy · w, computed as its transpose: it lies in memory column by column."""
    return gemm(torch.matmul, w_NK.t(), dy_TN.t()).t()


def wgrad(dy_TN: Tensor, x_TK: Tensor, plan: LayerPlan | None, last_dw_NK: Tensor | None, gemm: Probes) -> Tensor:
    """Return dw_NK with dw[:, keep] = dyᵀ · x[:, keep] and the other columns imputed.

    Imputation "same" takes them from ``last_dw_NK``.
    """
    if plan is None:
        return gemm(torch.matmul, dy_TN.t(), x_TK)
    dw_NP, whole = _room(dy_TN.shape[1], dy_TN, plan)
    operands = dy_TN.t(), plan.kept.of(x_TK)
    if dy_TN.is_cpu:  # where few columns are kept, in down to three quarters of the time
        dw_NP.copy_(gemm(_transposed_product, *operands).t())
    else:
        gemm(partial(torch.mm, out=dw_NP), *operands)
    return _impute(whole(), dw_NP, plan, last_dw_NK)


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """(a · b)ᵀ."""
    return torch.mm(b.t(), a.t())


def _room(rows: int, like: Tensor, plan: LayerPlan) -> tuple[Tensor, Callable[[], Tensor]]:
    """Where to compute [rows, P], and what then returns it among zeros [rows, K], in as few copies as possible."""
    num_kept = plan.keep_P.numel()
    if plan.kept.neighbours is not None:
        full = like.new_zeros(rows, plan.num_columns)
        return full[:, plan.kept.neighbours], lambda: full
    if not like.is_cpu:
        computed = like.new_empty(rows, num_kept)
        return computed, lambda: like.new_zeros(rows, plan.num_columns).index_copy_(1, plan.keep_P, computed)
    block, places = plan.places
    padded = like.new_empty(rows, num_kept + block)
    padded[:, num_kept:] = 0.0
    return padded[:, :num_kept], lambda: padded.unflatten(1, (-1, block)).index_select(1, places).flatten(1)


def _impute(full: Tensor, computed: Tensor, plan: LayerPlan, last: Tensor | None) -> Tensor:
    """The [rows, K] gradient whose kept columns, [rows, P], are computed, with what else is not zero."""
    if plan.imputation == "average":
        full.index_copy_(1, plan.pruned, computed.mean(dim=1, keepdim=True).expand(-1, plan.pruned.numel()))
    elif plan.imputation == "same" and last is not None and last.shape == full.shape:
        full.index_copy_(1, plan.pruned, last.index_select(1, plan.pruned))
    return full
