"""The three products of a linear layer on the columns that a plan keeps, in plain torch: CPU path and oracle.

``T`` tokens, ``N`` output features, ``K`` input features, ``P`` of them kept (all on this rank). Source: section III-A
of the paper. Every function multiplies through ``gemm`` so that probes see the multiplication apart from the gathers.
"""

from __future__ import annotations

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
    dx_TP = gemm(torch.matmul, dy_TN, plan.kept.of(w_NK))
    return _impute(dx_TP, plan, last_dx_TK)


def dgrad_by_columns(dy_TN: Tensor, w_NK: Tensor, gemm: Probes) -> Tensor:
    """Return the whole dx_TK = dy · w, computed as its transpose: it lies in memory column by column."""
    return gemm(torch.matmul, w_NK.t(), dy_TN.t()).t()


def wgrad(dy_TN: Tensor, x_TK: Tensor, plan: LayerPlan | None, last_dw_NK: Tensor | None, gemm: Probes) -> Tensor:
    """Return dw_NK with dw[:, keep] = dyᵀ · x[:, keep] and the other columns imputed.

    Imputation "same" takes them from ``last_dw_NK``.
    """
    if plan is None:
        return gemm(torch.matmul, dy_TN.t(), x_TK)
    dw_NP = gemm(torch.matmul, dy_TN.t(), plan.kept.of(x_TK))
    return _impute(dw_NP, plan, last_dw_NK)


def _impute(computed: Tensor, plan: LayerPlan, last: Tensor | None) -> Tensor:
    """The full [rows, K] gradient from its computed [rows, P] columns."""
    full = computed.new_zeros(computed.shape[0], plan.num_columns)
    plan.kept.put(full, computed)
    if plan.imputation == "average":
        full.index_copy_(1, plan.pruned, computed.mean(dim=1, keepdim=True).expand(-1, plan.pruned.numel()))
    elif plan.imputation == "same" and last is not None and last.shape == full.shape:
        full.index_copy_(1, plan.pruned, last.index_select(1, plan.pruned))
    return full
