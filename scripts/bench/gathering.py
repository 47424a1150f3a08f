"""Products of kept columns that gather, multiply and scatter column by column, which faster ones are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroresize import kernels
from zeroresize.kernels import reference
from zeroresize.kernels.probe import Probes
from zeroresize.plan.columns import Columns
from zeroresize.plan.layer import LayerPlan


def forward(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: LayerPlan | None, gemm: Probes) -> Tensor:
    if plan is None:
        return reference.forward(x_TK, w_NK, bias_N, plan, gemm)
    return gemm(F.linear, _gathered(x_TK, plan.kept), _gathered(w_NK, plan.kept), bias_N)


def dgrad(dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None, last_dx_TK: Tensor | None, gemm: Probes) -> Tensor:
    if plan is None:
        return reference.dgrad(dy_TN, w_NK, plan, last_dx_TK, gemm)
    return _scattered(gemm(torch.matmul, dy_TN, _gathered(w_NK, plan.kept)), plan)


def wgrad(dy_TN: Tensor, x_TK: Tensor, plan: LayerPlan | None, last_dw_NK: Tensor | None, gemm: Probes) -> Tensor:
    if plan is None:
        return reference.wgrad(dy_TN, x_TK, plan, last_dw_NK, gemm)
    return _scattered(gemm(torch.matmul, dy_TN.t(), _gathered(x_TK, plan.kept)), plan)


GATHERING = kernels.Implementation("gathering", forward, dgrad, reference.dgrad_by_columns, wgrad)


@contextmanager
def gathering() -> Iterator[None]:
    """Compute products in float32 on the CPU so; imputation is zero."""
    kernels.register(GATHERING, device_type="cpu", dtype=torch.float32)
    try:
        yield
    finally:
        kernels.register(kernels.REFERENCE, device_type="cpu", dtype=torch.float32)


def _gathered(matrix: Tensor, columns: Columns) -> Tensor:
    if columns.neighbours is not None:
        return matrix[:, columns.neighbours]
    return matrix.index_select(1, columns.indices)


def _scattered(computed: Tensor, plan: LayerPlan) -> Tensor:
    whole = computed.new_zeros(len(computed), plan.num_columns)
    plan.kept.put(whole, computed)
    return whole
