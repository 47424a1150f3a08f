"""Which implementation computes the three products, by device type and dtype: plain torch unless another is registered.

``T`` tokens, ``N`` output features, ``K`` input features. The functions of this module are what layers, loans and
calibrations call; a product's first operand says where it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroresize.kernels import reference
from zeroresize.kernels.probe import Probes
from zeroresize.plan.layer import LayerPlan
from zeroresize.utils.extras import need


@dataclass(frozen=True)
class Implementation:
    """The three products of a linear layer on one kind of device.

    Each function has the signature and the result of its namesake in :mod:`zeroresize.kernels.reference`. For what one
    does not support it may call that namesake, handing ``gemm`` on.

    Attributes:
        name: for log lines; a calibration holds for the implementation that it was made with.
        is_fused: whether products gather and fill inside the multiplication, without calling ``gemm``. All of
            a product then counts as multiplying.
    """

    name: str
    forward: Callable[..., Tensor]
    dgrad: Callable[..., Tensor]
    dgrad_by_columns: Callable[..., Tensor]
    wgrad: Callable[..., Tensor]
    is_fused: bool = False


#: Plain torch, for every device and dtype.
REFERENCE = Implementation("reference", reference.forward, reference.dgrad, reference.dgrad_by_columns, reference.wgrad)

_registered: dict[tuple[str, torch.dtype], Implementation] = {}


def register(implementation: Implementation, *, device_type: str, dtype: torch.dtype) -> None:
    """Compute products of ``dtype`` on ``device_type`` ("cuda", "cpu", …) by ``implementation`` from now on.

    It replaces what was registered before; ``REFERENCE`` takes it back. Register alike on every rank, before training:
    ranks whose products round differently still train one model, but steps that were calibrated with another
    implementation are predicted wrongly.

    Raises:
        RuntimeError: if torch does not know the device type.
    """
    _registered[torch.device(device_type).type, dtype] = implementation


def use_triton(
    device_type: str = "cuda", dtypes: Iterable[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
) -> None:
    """Compute resized products by Triton wherever that was measured to be faster; needs the extra ``triton``.

    The first product of each GPU model, dtype, sizes up to the next powers of two, and eighth of the columns kept is
    measured, by plain torch as well, and the fastest is taken from then on. A step in which something is measured takes
    longer, and counts so. What is taken decides how sums round. Whole products, those under
    ``torch.use_deterministic_algorithms`` and whatever the kernels do not take are computed as before. Call it alike on
    every rank, before training.

    Results are kept in ``~/.cache/zeroresize/triton-….json`` (``$XDG_CACHE_HOME``), also for other hosts that share it:
    one that cannot run them measures anew. Delete it after a change of driver.

    Args:
        device_type: "cuda", or what Triton's interpreter computes for (``TRITON_INTERPRET=1``): "cpu", never measured.
        dtypes: for which, of float32, bfloat16 and float16; the interpreter knows no bfloat16.

    Raises:
        MissingExtra: if Triton is not installed.
        ValueError: for another device or dtype.
    """
    triton_products = need("zeroresize.kernels.triton_products", "triton")
    dtypes = tuple(dtypes)
    triton_products.require_computable(device_type, dtypes)
    for dtype in dtypes:
        register(triton_products.TRITON, device_type=device_type, dtype=dtype)


def implementation_on(device_type: str, dtype: torch.dtype) -> Implementation:
    """Return the implementation that computes products of ``dtype`` on ``device_type``."""
    return _registered.get((device_type, dtype), REFERENCE)


def implementation_for(operand: Tensor) -> Implementation:
    """Return the implementation that computes products of tensors like ``operand``."""
    return implementation_on(operand.device.type, operand.dtype) if _registered else REFERENCE


def forward(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: LayerPlan | None, gemm: Probes) -> Tensor:
    """Return y_TN, as :func:`zeroresize.kernels.reference.forward` does, by the implementation for ``x_TK``."""
    return _computed("forward", gemm, x_TK, w_NK, bias_N, plan)


def dgrad(dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None, last_dx_TK: Tensor | None, gemm: Probes) -> Tensor:
    """Return dx_TK, as :func:`zeroresize.kernels.reference.dgrad` does, by the implementation for ``dy_TN``."""
    return _computed("dgrad", gemm, dy_TN, w_NK, plan, last_dx_TK)


def dgrad_by_columns(dy_TN: Tensor, w_NK: Tensor, gemm: Probes) -> Tensor:
    """Return dx_TK, as :func:`zeroresize.kernels.reference.dgrad_by_columns`, by the implementation for ``dy_TN``."""
    return _computed("dgrad_by_columns", gemm, dy_TN, w_NK)


def wgrad(dy_TN: Tensor, x_TK: Tensor, plan: LayerPlan | None, last_dw_NK: Tensor | None, gemm: Probes) -> Tensor:
    """Return dw_NK, as :func:`zeroresize.kernels.reference.wgrad` does, by the implementation for ``dy_TN``."""
    return _computed("wgrad", gemm, dy_TN, x_TK, plan, last_dw_NK)


def _computed(product: str, gemm: Probes, first: Tensor, *operands: Any) -> Tensor:
    how = implementation_for(first)
    kernel: Callable[..., Tensor] = getattr(how, product)
    return gemm.whole(kernel, first, *operands) if how.is_fused else kernel(first, *operands, gemm)
