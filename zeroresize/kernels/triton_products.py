"""The three products of a linear layer on the columns that a plan keeps, by Triton.

``T`` tokens, ``N`` output features, ``K`` input features, ``P`` of them kept. Columns are read where they lie, neither
x nor w is copied, and what a gradient has besides its computed columns is written by the same launch. Sums are
accumulated in float32. Two matrix products do it all: of gathered inner dimensions (forward, [T, N]), and of gathered
columns (dgrad and wgrad, [rows, K]). Where kept columns come in aligned blocks, the compiler is told so and loads whole
blocks; tiles of columns that are not kept are never visited.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from zeroresize.kernels import reference
from zeroresize.kernels.probe import Probes
from zeroresize.kernels.registry import Implementation
from zeroresize.kernels.triton_tuning import Config, fastest, uses_tf32
from zeroresize.plan.layer import LayerPlan

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Rows of tiles that are computed together, so that they find in the cache what they share.
_GROUP = 8
#: Rows, and columns, that a program takes the mean of at once.
_MEAN_TILE = 64
_IMPUTATIONS = {"zero": 0, "average": 1, "same": 2}


# ---- device ----------------------------------------------------------------------------------------------------------


@triton.jit
def _kept_columns(keep, first, P, BLOCK: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr):
    """Columns ``first`` and following of those that are kept, and which of them there are."""
    place = first + tl.arange(0, SIZE)
    columns = tl.load(keep + place, mask=place < P, other=0)
    columns = tl.max_contiguous(tl.multiple_of(columns if WIDE else columns.to(tl.int32), BLOCK), BLOCK)
    return columns, place < P


@triton.jit
def _range_of(first, WIDE: tl.constexpr, SIZE: tl.constexpr):
    """``first`` and following, as offsets are computed."""
    indices = first + tl.arange(0, SIZE)
    return indices.to(tl.int64) if WIDE else indices


@triton.jit
def inner_kernel(
    x,
    w,
    bias,
    y,
    keep,
    T,
    N,
    P,
    x_T,
    x_K,
    w_N,
    w_K,
    bias_N,
    y_T,
    y_N,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """A tile of y[t, n] = Σ_p x[t, keep[p]] w[n, keep[p]] + bias[n]; ``x_T`` and the like are strides."""
    tiles_n = tl.cdiv(N, TILE_N)
    tile = tl.program_id(0)
    tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tl.cdiv(T, TILE_M), tiles_n, GROUP)
    rows, outputs = _range_of(tile_m * TILE_M, WIDE, TILE_M), _range_of(tile_n * TILE_N, WIDE, TILE_N)
    in_rows, in_outputs = rows[:, None] < T, outputs[None, :] < N
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for first in range(0, P, TILE_R):
        columns, is_kept = _kept_columns(keep, first, P, BLOCK, WIDE, TILE_R)
        of_x = tl.load(x + rows[:, None] * x_T + columns[None, :] * x_K, mask=in_rows & is_kept[None, :], other=0.0)
        of_w = tl.load(
            w + outputs[None, :] * w_N + columns[:, None] * w_K, mask=in_outputs & is_kept[:, None], other=0.0
        )
        total = tl.dot(of_x, of_w, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + outputs * bias_N, mask=outputs < N, other=0.0).to(tl.float32)[None, :]
    tl.store(y + rows[:, None] * y_T + outputs[None, :] * y_N, total.to(y.dtype.element_ty), mask=in_rows & in_outputs)


@triton.jit
def columns_kernel(
    a,
    b,
    mean,
    last,
    out,
    keep,
    pruned,
    lent,
    M,
    R,
    P,
    num_pruned,
    num_lent,
    a_M,
    a_R,
    b_R,
    b_K,
    last_M,
    last_K,
    out_M,
    out_K,
    IMPUTATION: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """A tile of out[m, keep[p]] = Σ_r a[m, r] b[r, keep[p]], or of the other columns, which follow the kept ones.

    Pruned ones are 0, Σ_r a[m, r] mean[r], or ``last``'s, lent ones 0; ``a_M`` and the like are strides.
    """
    tiles_kept = tl.cdiv(P, TILE_N)
    tiles_n = tiles_kept + tl.cdiv(num_pruned + num_lent, TILE_N)
    tile = tl.program_id(0)
    tile_m, tile_n = tl.swizzle2d(tile // tiles_n, tile % tiles_n, tl.cdiv(M, TILE_M), tiles_n, GROUP)
    rows = _range_of(tile_m * TILE_M, WIDE, TILE_M)
    in_rows = rows[:, None] < M
    if tile_n < tiles_kept:
        columns, is_kept = _kept_columns(keep, tile_n * TILE_N, P, BLOCK, WIDE, TILE_N)
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for first in range(0, R, TILE_R):
            inner = _range_of(first, WIDE, TILE_R)
            of_a = tl.load(
                a + rows[:, None] * a_M + inner[None, :] * a_R, mask=in_rows & (inner[None, :] < R), other=0.0
            )
            of_b = tl.load(
                b + inner[:, None] * b_R + columns[None, :] * b_K,
                mask=(inner[:, None] < R) & is_kept[None, :],
                other=0.0,
            )
            total = tl.dot(of_a, of_b, total, input_precision=PRECISION)
        where = out + rows[:, None] * out_M + columns[None, :] * out_K
        tl.store(where, total.to(out.dtype.element_ty), mask=in_rows & is_kept[None, :])
    else:
        place = (tile_n - tiles_kept) * TILE_N + tl.arange(0, TILE_N)
        is_pruned, is_there = place < num_pruned, place < num_pruned + num_lent
        others = tl.load(pruned + place, mask=is_pruned, other=0)
        others += tl.load(lent + place - num_pruned, mask=is_there & (place >= num_pruned), other=0)
        others = others if WIDE else others.to(tl.int32)
        values = tl.zeros((TILE_M, TILE_N), tl.float32)
        if IMPUTATION == 1:
            average = tl.zeros((TILE_M,), tl.float32)
            for first in range(0, R, TILE_R):
                inner = _range_of(first, WIDE, TILE_R)
                of_a = tl.load(
                    a + rows[:, None] * a_M + inner[None, :] * a_R, mask=in_rows & (inner[None, :] < R), other=0.0
                )
                weights = tl.load(mean + inner, mask=inner < R, other=0.0)
                average += tl.sum(of_a.to(tl.float32) * weights[None, :], 1)
            values = tl.where(is_pruned[None, :], average[:, None], 0.0)
        if IMPUTATION == 2:
            of_last = last + rows[:, None] * last_M + others[None, :] * last_K
            values = tl.load(of_last, mask=in_rows & is_pruned[None, :], other=0.0).to(tl.float32)
        where = out + rows[:, None] * out_M + others[None, :] * out_K
        tl.store(where, values.to(out.dtype.element_ty), mask=in_rows & is_there[None, :])


@triton.jit
def mean_kernel(b, mean, keep, R, P, b_R, b_K, BLOCK: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr):
    """mean[r] = Σ_p b[r, keep[p]] / P of some rows."""
    rows = _range_of(tl.program_id(0) * TILE, WIDE, TILE)
    total = tl.zeros((TILE,), tl.float32)
    for first in range(0, P, TILE):
        columns, is_kept = _kept_columns(keep, first, P, BLOCK, WIDE, TILE)
        where = b + rows[:, None] * b_R + columns[None, :] * b_K
        total += tl.sum(tl.load(where, mask=(rows[:, None] < R) & is_kept[None, :], other=0.0).to(tl.float32), 1)
    tl.store(mean + rows, total / P, mask=rows < R)


# ---- operators of torch: what a profile, a graph and a count of FLOPs see -------------------------------------------


def _inner(
    x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, keep_P: Tensor, block: int, config: Sequence[int]
) -> Tensor:
    y_TN = _like_inner(x_TK, w_NK)
    (T, N), (tile_m, tile_n, tile_r, warps, stages) = y_TN.shape, config
    inner_kernel[(triton.cdiv(T, tile_m) * triton.cdiv(N, tile_n),)](
        x_TK,
        w_NK,
        x_TK if bias_N is None else bias_N,
        y_TN,
        keep_P,
        T,
        N,
        len(keep_P),
        *x_TK.stride(),
        *w_NK.stride(),
        0 if bias_N is None else bias_N.stride(0),
        *y_TN.stride(),
        HAS_BIAS=bias_N is not None,
        **_options(block, tile_m, tile_n, tile_r, x_TK, w_NK, y_TN),
        num_warps=warps,
        num_stages=stages,
    )
    return y_TN


def _columns(
    a_MR: Tensor,
    b_RK: Tensor,
    keep_P: Tensor,
    pruned: Tensor,
    lent: Tensor,
    imputation: str,
    last_MK: Tensor | None,
    block: int,
    config: Sequence[int],
) -> Tensor:
    out_MK = _like_columns(a_MR, b_RK)
    (M, R), (tile_m, tile_n, tile_r, warps, stages) = a_MR.shape, config
    options = _options(block, tile_m, tile_n, tile_r, a_MR, b_RK, out_MK, *(() if last_MK is None else (last_MK,)))
    mean_R = last = out_MK  # where they are not read
    if imputation == "average" and len(pruned):
        mean_R = torch.empty(R, dtype=torch.float32, device=a_MR.device)
        mean_kernel[(triton.cdiv(R, _MEAN_TILE),)](
            b_RK, mean_R, keep_P, R, len(keep_P), *b_RK.stride(), BLOCK=block, WIDE=options["WIDE"], TILE=_MEAN_TILE
        )
    elif imputation == "same" and last_MK is not None:
        last = last_MK
    else:
        imputation = "zero"
    tiles_n = triton.cdiv(len(keep_P), tile_n) + triton.cdiv(len(pruned) + len(lent), tile_n)
    columns_kernel[(triton.cdiv(M, tile_m) * tiles_n,)](
        a_MR,
        b_RK,
        mean_R,
        last,
        out_MK,
        keep_P,
        pruned,
        lent,
        M,
        R,
        len(keep_P),
        len(pruned),
        len(lent),
        *a_MR.stride(),
        *b_RK.stride(),
        *last.stride(),
        *out_MK.stride(),
        IMPUTATION=_IMPUTATIONS[imputation],
        **options,
        num_warps=warps,
        num_stages=stages,
    )
    return out_MK


def _options(block: int, tile_m: int, tile_n: int, tile_r: int, *matrices: Tensor) -> dict[str, Any]:
    """What both kernels are compiled for."""
    ends = (sum((size - 1) * stride for size, stride in zip(m.shape, m.stride(), strict=True)) for m in matrices)
    return {
        "BLOCK": min(block, tile_n, tile_r),  # a tile may begin within a block
        "WIDE": max(ends) >= 2**31,
        "PRECISION": "tf32" if uses_tf32() else "ieee",
        "GROUP": _GROUP,
        "TILE_M": tile_m,
        "TILE_N": tile_n,
        "TILE_R": tile_r,
    }


def _like_inner(x_TK: Tensor, w_NK: Tensor, *others: Any) -> Tensor:
    """Memory for y."""
    return torch.empty((x_TK.shape[0], w_NK.shape[0]), dtype=x_TK.dtype, device=x_TK.device)


def _like_columns(a_MR: Tensor, b_RK: Tensor, *others: Any) -> Tensor:
    """Memory for a gradient."""
    return torch.empty((a_MR.shape[0], b_RK.shape[1]), dtype=a_MR.dtype, device=a_MR.device)


_library = torch.library.Library("zeroresize", "FRAGMENT")
_library.define(
    "kept_inner(Tensor x_TK, Tensor w_NK, Tensor? bias_N, Tensor keep_P, int block, int[] config) -> Tensor"
)
_library.define(
    "kept_columns(Tensor a_MR, Tensor b_RK, Tensor keep_P, Tensor pruned, Tensor lent, str imputation, "
    "Tensor? last_MK, int block, int[] config) -> Tensor"
)
for _name, _launch, _like in (("kept_inner", _inner, _like_inner), ("kept_columns", _columns, _like_columns)):
    _library.impl(_name, _launch, "CUDA")
    _library.impl(_name, _launch, "CPU")  # of the interpreter
    torch.library.register_fake(f"zeroresize::{_name}", _like, lib=_library)
kept_inner, kept_columns = torch.ops.zeroresize.kept_inner, torch.ops.zeroresize.kept_columns


@register_flop_formula(kept_inner)
def _flops_of_inner(x_TK: Any, w_NK: Any, bias_N: Any, keep_P: Any, *others: Any, **named: Any) -> int:
    return 2 * x_TK[0] * w_NK[0] * keep_P[0]


@register_flop_formula(kept_columns)
def _flops_of_columns(a_MR: Any, b_RK: Any, keep_P: Any, *others: Any, **named: Any) -> int:
    return 2 * a_MR[0] * a_MR[1] * keep_P[0]


# ---- the implementation ----------------------------------------------------------------------------------------------


def forward(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: LayerPlan | None, gemm: Probes) -> Tensor:
    """Return y_TN as :func:`zeroresize.kernels.reference.forward` does."""

    def by_reference(gemm: Probes) -> Tensor:
        return reference.forward(x_TK, w_NK, bias_N, plan, gemm)

    def by_triton(plan: LayerPlan, config: Config) -> Tensor:
        return kept_inner(x_TK, w_NK, bias_N, plan.keep_P, plan.kept.block, config)

    return _computed("forward", (x_TK, w_NK), plan, by_reference, by_triton, gemm)


def dgrad(dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None, last_dx_TK: Tensor | None, gemm: Probes) -> Tensor:
    """Return dx_TK as :func:`zeroresize.kernels.reference.dgrad` does, up to the rounding of an average.

    An average is dy · mean(w[:, keep]), rounded once: it may differ from the mean of the rounded columns by their own
    rounding, as any sum in another order.
    """

    def by_reference(gemm: Probes) -> Tensor:
        return reference.dgrad(dy_TN, w_NK, plan, last_dx_TK, gemm)

    return _computed("dgrad", (dy_TN, w_NK), plan, by_reference, _gradient(dy_TN, w_NK, last_dx_TK), gemm)


def wgrad(dy_TN: Tensor, x_TK: Tensor, plan: LayerPlan | None, last_dw_NK: Tensor | None, gemm: Probes) -> Tensor:
    """Return dw_NK as :func:`zeroresize.kernels.reference.wgrad` does, up to the rounding of an average."""

    def by_reference(gemm: Probes) -> Tensor:
        return reference.wgrad(dy_TN, x_TK, plan, last_dw_NK, gemm)

    return _computed("wgrad", (dy_TN, x_TK), plan, by_reference, _gradient(dy_TN.t(), x_TK, last_dw_NK), gemm)


def _gradient(a_MR: Tensor, b_RK: Tensor, last_MK: Tensor | None) -> Callable[[LayerPlan, Config], Tensor]:
    last_MK = last_MK if last_MK is not None and last_MK.shape == (len(a_MR), b_RK.shape[1]) else None

    def by_triton(plan: LayerPlan, config: Config) -> Tensor:
        columns = plan.keep_P, plan.pruned, plan.lent.contiguous()
        return kept_columns(a_MR, b_RK, *columns, plan.imputation, last_MK, plan.kept.block, config)

    return by_triton


def _computed(
    product: str,
    operands: tuple[Tensor, Tensor],
    plan: LayerPlan | None,
    by_reference: Callable[[Probes], Tensor],
    by_triton: Callable[[LayerPlan, Config], Tensor],
    gemm: Probes,
) -> Tensor:
    """A product by the fastest that there is."""
    first, second = operands
    is_taken = first.dtype == second.dtype and first.dtype in _DTYPES and first.numel() > 0 and second.numel() > 0
    if plan is None or not is_taken or torch.are_deterministic_algorithms_enabled():
        return by_reference(gemm)
    with torch.cuda.device_of(first):
        config = fastest(
            product, operands, plan, lambda: by_reference(Probes()), lambda config: by_triton(plan, config)
        )
        return by_reference(gemm) if config is None else gemm(lambda *_: by_triton(plan, config), *operands)


def require_computable(device_type: str, dtypes: Sequence[torch.dtype]) -> None:
    """Check that Triton computes here what it is asked for."""
    if device_type != ("cpu" if triton.knobs.runtime.interpret else "cuda"):
        raise ValueError(f"Triton computes on 'cuda', or under TRITON_INTERPRET=1 on 'cpu', not on {device_type!r}")
    # The interpreter multiplies the bits of bfloat16.
    known = [dtype for dtype in _DTYPES if device_type == "cuda" or dtype != torch.bfloat16]
    if others := [str(dtype) for dtype in dtypes if dtype not in known]:
        raise ValueError(f"Triton's products are of {', '.join(map(str, known))} there, not of {', '.join(others)}")


#: Whole products, and gradients that lie column by column, are plain torch's.
TRITON = Implementation("triton", forward, dgrad, reference.dgrad_by_columns, wgrad)
