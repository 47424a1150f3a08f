"""Column- and row-parallel linear products as autograd Functions: whole, or resized by a plan.

``T`` tokens, ``K`` input and ``N`` output features on this rank, ``P`` of the K columns kept. Between forward and
backward a Function holds ``x`` and ``w`` by reference and the plan's indices (its lineage), but no pruned copies. A
receiver of a row-parallel layer's columns also holds the columns of the owner's x that it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from zeroresize import kernels
from zeroresize.comm.collectives import NamedWork, all_reduce, group_size, start_all_reduce
from zeroresize.kernels.probe import Probes
from zeroresize.layers.shared_rows import SharedRows
from zeroresize.plan.layer import LayerPlan
from zeroresize.utils.torch_private import in_compiled_autograd, not_in_graphs, reshaped_output

#: Computes this rank's own part of a product when it is called.
OwnProduct = Callable[[], Tensor]


class SharedProducts(Protocol):
    """Computes one layer's products where other ranks compute some of its columns, or this rank some of theirs."""

    name: str  # of the layer
    has_loans: bool  # whether any rank of the group lends columns of the layer now; the same on all of them
    num_borrowed: int  # numbers of other ranks' weights that this rank multiplies by

    def weight_in_force(self, weight: Tensor) -> Tensor:
        """Return the layer's ``weight`` [N, K] as the tensor to multiply with; its gradient will hold all columns."""

    def forward_begins(self, weight: Tensor) -> None:
        """Send the weights that are lent, if none were sent yet, and check that ``weight`` is still as it was sent."""

    def whole_gradient(self, dw_NK: Tensor) -> Tensor:
        """Wait for the columns of a backward's dw that other ranks computed, and return it with them."""

    def column_forward(self, x_TK: Tensor, multiply: OwnProduct) -> Tensor:
        """Compute y [T, N] of a column-parallel layer: ``multiply()`` plus what other ranks computed of it."""

    def column_backward(
        self, dy_TN: Tensor, x_TK: Tensor, *, own_dgrad: OwnProduct | None, own_wgrad: OwnProduct | None, sums: bool
    ) -> tuple[Tensor | None, Tensor | None, NamedWork | None]:
        """Compute (dx [T, K], dw [N, K], its all-reduce if it ``sums``); None for what is not asked for."""

    def row_forward(self, x_TK: Tensor, multiply: OwnProduct) -> tuple[Tensor, list[Tensor]]:
        """Compute (y [T, N] of a row-parallel layer, not yet summed over the group; what backward needs)."""

    def row_backward(
        self,
        dy_TN: Tensor,
        kept: Sequence[Tensor],
        *,
        own_dgrad: OwnProduct | None,
        own_wgrad: OwnProduct | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute (dx [T, K], dw [N, K]) as :meth:`column_backward`; ``kept`` is from :meth:`row_forward`."""


@dataclass
class LastGradients:
    """Holds one layer's gradients of its previous backward, kept only for ``paper.imputation="same"``."""

    dx_TK: Tensor | None = None
    dw_NK: Tensor | None = None

    def to(self, device: torch.device) -> LastGradients:
        """Return the same gradients on ``device``."""
        return LastGradients(*(None if one is None else one.to(device) for one in (self.dx_TK, self.dw_NK)))


@dataclass(frozen=True)
class ProductContext:
    """Holds all that a layer's products need in one forward and its backward, besides their operands.

    Attributes:
        plan: which columns are computed here; None for all.
        process_group: over which dx, or y, is summed.
        probes: told of every product.
        last: gradients of the previous backward, for ``paper.imputation="same"``; they are replaced.
        loans: products that other ranks compute for the layer, and it for them; None where nothing migrates.
        needs_eager_autograd: whether compiled autograd is an error in backward.
        sums: whether dx, or y, is summed over the group here. Where a host sums and divides a sequence at once, each
            rank's part of the sum is returned.
        shared: rows that several ranks hold, of which this one may compute a part of the tokens only; None for none.
    """

    plan: LayerPlan | None
    process_group: ProcessGroup
    probes: Probes
    last: LastGradients | None = None
    loans: SharedProducts | None = None
    needs_eager_autograd: bool = False
    sums: bool = True
    shared: SharedRows | None = None


def column_parallel_products(x: Tensor, w_NK: Tensor, bias_N: Tensor | None, how: ProductContext) -> Tensor:
    """Compute y [..., N] of x [..., K], and all-reduce dx over the group in backward; y may be modified in place."""
    return _Products.apply(x, w_NK, bias_N, how, column_forward, column_backward)


def row_parallel_products(x: Tensor, w_NK: Tensor, bias_N: Tensor | None, how: ProductContext) -> Tensor:
    """Sum over the group the products y [..., N] of each rank's x [..., K]; the result may be modified in place."""
    return _Products.apply(x, w_NK, bias_N, how, row_forward, row_backward)


def column_forward(x, w_NK, bias_N, how):
    """Compute (y [..., N], nothing more that backward needs) of a column-parallel layer, outside of autograd."""
    if how.loans is None:
        return _as_output(_forward(x, w_NK, bias_N, how), x), []
    x_TK = _as_tokens(x)
    return _as_output(how.loans.column_forward(x_TK, lambda: _forward(x_TK, w_NK, bias_N, how)), x), []


def column_backward(dy, x, w_NK, kept, how, needed):
    """Compute (dx, dw, db) of a column-parallel layer; None for what is not ``needed``, a flag for each."""
    if how.needs_eager_autograd:
        require_eager_autograd()
    needs_dx, needs_dw, needs_db = needed
    dx = dw_NK = db_N = work = None
    dy_TN = _as_tokens(dy)
    # The same layout as Colossal-AI's: the layout decides the order in which a product or a sum adds up.
    packed_dy_TN, x_TK = dy_TN.contiguous(), _as_tokens(x).contiguous()
    parts = _parts(x.shape, how)
    own_dgrad = (lambda: _dgrad(dy_TN, w_NK, how, parts)) if needs_dx else None
    own_wgrad = (lambda: _wgrad(packed_dy_TN, x_TK, w_NK, how, parts)) if needs_dw else None
    if how.loans is not None:
        dx, dw_NK, work = how.loans.column_backward(
            dy_TN, x_TK, own_dgrad=own_dgrad, own_wgrad=own_wgrad, sums=how.sums
        )
    else:
        if own_dgrad is not None:
            dx = own_dgrad()
            work = start_all_reduce(dx, how.process_group) if how.sums else None
        if own_wgrad is not None:
            dw_NK = own_wgrad()
    if needs_db:  # of tokens that other ranks compute nothing is known
        db_N = packed_dy_TN.new_zeros(len(w_NK)) if parts is not None else packed_dy_TN.sum(dim=0)
        for part in parts or ():
            db_N[part.features] += packed_dy_TN[how.shared.place_of(part, "TN")].sum(dim=0)
    if work is not None:
        work.wait()
    return dx if dx is None else _as_output(dx, x), dw_NK, db_N


def row_forward(x, w_NK, bias_N, how):
    """Compute (the sum over the group of y [..., N], what backward needs besides x and w) of a row-parallel layer."""
    if bias_N is not None:
        bias_N = bias_N / group_size(how.process_group)
    x = _without_others(x, x.shape, how)
    if how.loans is None:
        y, kept = _forward(x, w_NK, bias_N, how), []
    else:
        x_TK = _as_tokens(x)
        y, kept = how.loans.row_forward(x_TK, lambda: _forward(x_TK, w_NK, bias_N, how))
    y = _as_output(y, x)
    if how.sums:
        all_reduce(y, how.process_group, how.loans.name if how.loans is not None else None)
    return y, kept


def row_backward(dy, x, w_NK, kept, how, needed):
    """Compute (dx, dw, db) of a row-parallel layer, as :func:`column_backward`; ``kept`` is from the forward."""
    if how.needs_eager_autograd:
        require_eager_autograd()
    dy_TN = _as_tokens(dy)
    x_TK = _as_tokens(_without_others(x, x.shape, how))
    needs_dx, needs_dw, needs_db = needed
    dgrad = _dgrad_by_columns if needs_dw and _lies_by_columns(x_TK) else _dgrad  # as autograd does
    parts = _parts(x.shape, how)
    own_dgrad = (lambda: dgrad(dy_TN, w_NK, how, parts)) if needs_dx else None
    own_wgrad = (lambda: _wgrad(dy_TN, x_TK, w_NK, how, parts)) if needs_dw else None
    if how.loans is not None:
        dx, dw_NK = how.loans.row_backward(dy_TN, kept, own_dgrad=own_dgrad, own_wgrad=own_wgrad)
    else:
        dx = own_dgrad() if own_dgrad is not None else None
        dw_NK = own_wgrad() if own_wgrad is not None else None
    db_N = dy_TN.sum(dim=0) if needs_db else None
    return dx if dx is None else _as_output(_without_others(dx, x.shape, how), x), dw_NK, db_N


class _Products(torch.autograd.Function):
    """Column-parallel: y = x[:, keep] w[:, keep]ᵀ + b; dx = Σ_r impute(dy w[:, keep]), which overlaps dw and db.

    Row-parallel: y = Σ_r x[:, keep] w[:, keep]ᵀ + b; dx = impute(dy w[:, keep]). In both dw = impute(dyᵀ x[:, keep]),
    and db = Σ_t dy. What other ranks compute of lent columns is added to y, dx and dw.
    """

    @staticmethod
    def forward(ctx, x, w_NK, bias_N, how, forward, backward):
        ctx.how, ctx.gradients = how, backward
        y, kept = forward(x, w_NK, bias_N, how)
        ctx.save_for_backward(x, w_NK, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w_NK, *kept = ctx.saved_tensors
        return *ctx.gradients(dy, x, w_NK, kept, ctx.how, ctx.needs_input_grad[:3]), None, None, None


def _forward(x, w_NK, bias_N, how):
    if (parts := _parts(x.shape, how)) is not None:
        operands, is_row = ((_as_tokens(x), "TK"), (w_NK, "NK")), how.shared.dim == 1
        of_parts = None if is_row or bias_N is None else (bias_N, "N")
        y_TN = _in_parts(kernels.forward, how, parts, "TN", *operands, of_parts, None)
        return y_TN.add_(bias_N) if is_row and bias_N is not None else y_TN
    x = x if how.plan is None else _as_tokens(x)
    return how.probes.product(kernels.forward, x, w_NK, bias_N, how.plan)


def _parts(shape, how):
    """Which parts of the products of x of this shape are computed; None where all are, as by a plan or loans."""
    is_whole = how.shared is None or how.plan is not None or how.last is not None or how.loans is not None
    return None if is_whole else how.shared.parts(shape)


def _without_others(x, shape, how):
    """``x`` [..., K], of x of this shape, without what other ranks compute, where products are of all tokens."""
    parts = None if how.shared is None else how.shared.parts(shape)
    if parts is None or _parts(shape, how) is not None:
        return x
    x_TK = _as_tokens(x)
    kept = torch.zeros_like(x_TK)
    for part in parts:
        where = how.shared.place_of(part, "TK")
        kept[where] = x_TK[where]
    return kept.view(x.shape)


def _in_parts(kernel, how, parts, axes, *operands):
    """A product of these axes in parts of its operands, each told with its axes."""
    sizes = {axis: size for matrix, names in operands[:2] for axis, size in zip(names, matrix.shape, strict=True)}
    shape, whole = tuple(map(sizes.__getitem__, axes)), None
    for part in parts:
        cut = [each and each[0][how.shared.place_of(part, each[1])] for each in operands]
        piece = how.probes.product(kernel, *cut)
        if whole is None and piece.shape == shape:
            whole = piece
            continue
        whole = piece.new_zeros(shape) if whole is None else whole
        whole[how.shared.place_of(part, axes)] += piece
    return operands[0][0].new_zeros(shape) if whole is None else whole


def _as_tokens(x):
    """[T, K] of [..., K], where K may be 0: a rank that owns nothing of a segment."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _as_output(y, x):
    """``y``, or dx, with the leading dimensions of ``x``, and not a view for autograd.

    Autograd forbids modifying in place a view that a Function made, and adds nothing in place to a gradient that is
    one. Nobody else holds the memory of ``y``.
    """
    return reshaped_output(y, (*x.shape[:-1], y.shape[-1]))


def _dgrad(dy_TN, w_NK, how, parts=None):
    if parts is not None:
        return _in_parts(kernels.dgrad, how, parts, "TK", (dy_TN, "TN"), (w_NK, "NK"), None, None)
    last = how.last
    if last is None:
        return how.probes.product(kernels.dgrad, dy_TN, w_NK, how.plan, None)
    dx_TK = how.probes.product(kernels.dgrad, dy_TN, w_NK, how.plan, last.dx_TK)
    last.dx_TK = _remembered(dx_TK, last.dx_TK, how.plan)  # before the all-reduce: what this rank computed
    return dx_TK


def _dgrad_by_columns(dy_TN, w_NK, how, parts=None):
    if parts is not None or how.plan is not None or how.last is not None:
        return _dgrad(dy_TN, w_NK, how, parts)
    return how.probes.product(kernels.dgrad_by_columns, dy_TN, w_NK)


def _lies_by_columns(matrix):
    return matrix.stride() == (1, len(matrix))


def _wgrad(dy_TN, x_TK, w_NK, how, parts=None):
    if parts is not None:
        return _in_parts(kernels.wgrad, how, parts, "NK", (dy_TN, "TN"), (x_TK, "TK"), None, None)
    last = how.last
    if how.plan is None and last is None and _lies_by_columns(w_NK):  # dw is to lie as w does
        return how.probes.product(kernels.wgrad, x_TK, dy_TN, None, None).t()
    if last is None:
        return how.probes.product(kernels.wgrad, dy_TN, x_TK, how.plan, None)
    dw_NK = how.probes.product(kernels.wgrad, dy_TN, x_TK, how.plan, last.dw_NK)
    last.dw_NK = _remembered(dw_NK, last.dw_NK, how.plan)
    return dw_NK


def _remembered(computed, last, plan):
    """A copy of ``computed`` (the optimizer or clipping may change it in place), or ``last`` if it is not finite.

    An overflow that is copied into pruned columns would overflow every later step. The check stays on the device. Lent
    columns keep their last values, since this rank has not computed them.
    """
    is_finite = torch.isfinite(computed).all()
    if last is None or last.shape != computed.shape:
        last = torch.zeros_like(computed)
    remembered = torch.where(is_finite, computed, last)
    if plan is not None and plan.lent.numel():
        remembered.index_copy_(1, plan.lent, last.index_select(1, plan.lent))
    return remembered


@not_in_graphs
def require_eager_autograd() -> None:
    """Raise if compiled autograd runs the current backward.

    It would capture the waits for other ranks' gradients once, and lose what several micro-batches share after the
    first.
    """
    if in_compiled_autograd():
        raise RuntimeError(
            "the modes that migrate ('mig', 'semi') do not work with compiled autograd: gradients of lent columns need "
            "the order in which torch's own engine runs backward. Turn torch._dynamo.config.compiled_autograd off, or "
            "choose a mode that only prunes"
        )
