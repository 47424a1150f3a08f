"""A linear layer whose pruned weights are computed no more, and take no memory, once sparsity pays.

``T`` tokens, ``K`` in, ``N`` out, ``P`` kept weights. While many weights are kept, a mask is laid over the dense
matrix. Below a density that the caller chooses, ``weight`` becomes the vector [P] of the kept ones, row by row, and
buffers hold where they are: CSR, and for dx the same transposed. Products are then torch's sparse ones (MKL, cuSPARSE).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroresize.resharding.parameter_state import replace_data

warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")


class SparseLinear(nn.Linear):
    """y_TN = x_TK W_NKᵀ + b_N, with a W that can be pruned.

    Attributes:
        weight: [N, K], or [P] once it is sparse.
        mask: [N, K], True where a weight is kept; None before pruning and once ``weight`` is sparse.
        row_starts, columns: [N + 1] and [P] of int32, the CSR form; None while ``weight`` is dense.
        column_starts, rows, order: [K + 1], [P] and [P] of int32: W transposed in the CSR form, whose values are
            ``weight[order]``.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        for name in ("mask", "row_starts", "columns", "column_starts", "rows", "order"):
            self.register_buffer(name, None)

    @property
    def is_sparse(self) -> bool:
        return self.weight.dim() == 1

    @property
    def num_products(self) -> int:
        """Multiplications for one token."""
        return self.weight.numel()

    @property
    def num_kept(self) -> int:
        return self.weight.numel() if self.mask is None else int(self.mask.sum())

    def candidates(self) -> Tensor:
        """The weights that are not pruned yet [P], row by row."""
        return self.weight.detach().flatten() if self.mask is None else self.weight.detach()[self.mask]

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_sparse:
            return F.linear(x, self.weight if self.mask is None else self.weight * self.mask, self.bias)
        pattern = self.row_starts, self.columns, self.column_starts, self.rows, self.order
        y_TN = _SparseProduct.apply(x.flatten(0, -2), self.weight, *pattern)
        return (y_TN + self.bias).unflatten(0, x.shape[:-1])

    @torch.no_grad()
    def prune(self, keep_P: Tensor, optimizer: torch.optim.Optimizer, sparse_below: float) -> None:
        """Keep those of :meth:`candidates` that are True, with their optimizer state; gradients are dropped.

        Args:
            optimizer: whose state has an element for each weight, such as Adam's and momentum.
            sparse_below: the share of kept weights below which they are stored and computed alone.
        """
        state = optimizer.state.get(self.weight, {})
        of_weight = {key: one for key, one in state.items() if isinstance(one, Tensor) and one.dim()}
        if self.is_sparse:
            places_P = self._places()[keep_P]
        else:
            mask_NK = torch.ones_like(self.weight, dtype=torch.bool) if self.mask is None else self.mask.clone()
            mask_NK[mask_NK.clone()] = keep_P
            if mask_NK.sum() >= sparse_below * mask_NK.numel():
                self.weight.mul_(mask_NK)
                self.weight.grad, self.mask = None, mask_NK
                for moment in of_weight.values():
                    moment.mul_(mask_NK)
                return
            places_P = mask_NK.flatten().nonzero().flatten()
            keep_P = mask_NK.flatten()
        replace_data(self.weight, self.weight.detach().flatten()[keep_P], None)
        state.update({key: one.flatten()[keep_P] for key, one in of_weight.items()})
        self._set_pattern(places_P)

    def _places(self) -> Tensor:
        """Of the kept weights in the flat matrix [P]."""
        rows = torch.repeat_interleave(
            torch.arange(self.out_features, device=self.weight.device), self.row_starts.diff().long()
        )
        return rows * self.in_features + self.columns

    def _set_pattern(self, places_P: Tensor) -> None:
        rows, columns = places_P // self.in_features, places_P % self.in_features
        order = columns.sort(stable=True).indices
        self.mask = None
        self.row_starts, self.columns = _starts(rows, self.out_features), columns.int()
        self.column_starts, self.rows = _starts(columns, self.in_features), rows[order].int()
        self.order = order.int()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        """Take over the shapes of what was saved, too."""
        for name in self._buffers:
            saved = state_dict.get(prefix + name)
            self._buffers[name] = None if saved is None else torch.empty_like(saved, device=self.weight.device)
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.shape != self.weight.shape:
            replace_data(self.weight, self.weight.detach().new_empty(weight.shape), None)
        super()._load_from_state_dict(state_dict, prefix, *args)


class _SparseProduct(torch.autograd.Function):
    """y_TN = x_TK Wᵀ; dx = dy W; dw_P = the elements of dyᵀ x where weights are kept, and no others."""

    @staticmethod
    def forward(ctx, x_TK, w_P, row_starts, columns, column_starts, rows, order):
        ctx.save_for_backward(x_TK, w_P, row_starts, columns, column_starts, rows, order)
        return _product(row_starts, columns, w_P, x_TK)

    @staticmethod
    def backward(ctx, dy_TN):
        x_TK, w_P, row_starts, columns, column_starts, rows, order = ctx.saved_tensors
        dx_TK = dw_P = None
        if ctx.needs_input_grad[0]:
            dx_TK = _product(column_starts, rows, w_P.index_select(0, order), dy_TN)
        if ctx.needs_input_grad[1] and len(w_P):
            shape = dy_TN.shape[1], x_TK.shape[1]
            nothing = _csr(row_starts, columns, torch.zeros_like(w_P), shape)
            dw_P = torch.sparse.sampled_addmm(nothing, dy_TN.t(), x_TK, beta=0.0).values()
        return dx_TK, dw_P, None, None, None, None, None


def _product(starts: Tensor, places: Tensor, values: Tensor, x_TK: Tensor) -> Tensor:
    """x_TK Mᵀ, where M_NK is in the CSR form."""
    if not len(values):
        return x_TK.new_zeros(x_TK.shape[0], len(starts) - 1)
    return (_csr(starts, places, values, (len(starts) - 1, x_TK.shape[1])) @ x_TK.t()).t()


def _csr(starts: Tensor, places: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.sparse_csr_tensor(starts, places, values, tuple(shape), check_invariants=False)


def _starts(rows_P: Tensor, size: int) -> Tensor:
    """Where each of ``size`` rows begins [size + 1], from the rows of all elements."""
    counts = rows_P.bincount(minlength=size)
    return F.pad(counts.cumsum(0), (1, 0)).int()
