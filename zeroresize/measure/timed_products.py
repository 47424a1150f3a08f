"""Products that are timed apart from training, through their layer's probes, so that injected slowness counts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroresize import kernels
from zeroresize.kernels.probe import ProductProbe
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.plan.layer import LayerPlan


@dataclass(frozen=True)
class ProductShape:
    """Describes [T, K] times [N, K]: ``num_tokens`` T, ``num_columns`` K, ``num_outputs`` N."""

    num_tokens: int
    num_columns: int
    num_outputs: int
    dtype: torch.dtype
    device: torch.device

    @property
    def work(self) -> int:
        """Relative FLOPs of the products."""
        return self.num_tokens * self.num_columns * self.num_outputs


def random_operands(shape: ProductShape, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x [T, K], dy [T, N] and w [N, K] of normal random numbers, T being ``num_tokens``; equal in every call."""
    generator = torch.Generator(shape.device).manual_seed(0)  # its own, so training's random numbers do not change

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=shape.device).to(shape.dtype)

    return (
        random(num_tokens, shape.num_columns),
        random(num_tokens, shape.num_outputs),
        random(shape.num_outputs, shape.num_columns),
    )


def watch_products(
    layer: BalancedLinear, x_TK: Tensor, dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None
) -> Stopwatch:
    """Carry out the three products under ``plan``."""
    stopwatch = Stopwatch(x_TK.device)
    layer.probes.add_outermost(stopwatch)
    try:
        _multiply(layer, x_TK, dy_TN, w_NK, plan)
    finally:
        layer.probes.remove(stopwatch)
    return stopwatch


def time_products(layer: BalancedLinear, x_TK: Tensor, dy_TN: Tensor, w_NK: Tensor, repeats: int) -> float:
    """Measure the seconds of so many times the three products of all columns, one after another.

    On a GPU events tell them, and the device is waited for once: it computes while the host launches what follows, as
    in training.
    """
    device = x_TK.device
    if device.type != "cuda":
        return sum(watch_products(layer, x_TK, dy_TN, w_NK, None).products_s for _ in range(repeats))
    with torch.cuda.device(device):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            _multiply(layer, x_TK, dy_TN, w_NK, None)
        end.record()
        end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))


def _multiply(layer: BalancedLinear, x_TK: Tensor, dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None) -> None:
    layer.probes.product(kernels.forward, x_TK, w_NK, None, plan)
    layer.probes.product(kernels.dgrad, dy_TN, w_NK, plan, None)
    layer.probes.product(kernels.wgrad, dy_TN, x_TK, plan, None)


class Stopwatch(ProductProbe):
    """Times products and multiplications with the device at rest: only here, never inside an iteration.

    Attributes:
        products_s: of whole products.
        gemm_s: of multiplications inside of them.
        whole_s: of fused products that showed no multiplication.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: list[float] = []
        self._is_whole = False
        self.products_s = self.gemm_s = self.whole_s = 0.0

    def product_begins(self) -> None:
        self._is_whole = False
        self._begun.append(self._now())

    def product_ends(self) -> None:
        elapsed_s = self._now() - self._begun.pop()
        self.products_s += elapsed_s
        self.whole_s += elapsed_s if self._is_whole else 0.0

    def whole_begins(self, operands: tuple[Any, ...]) -> None:
        self._is_whole = True

    def whole_ends(self, operands: tuple[Any, ...]) -> None:
        pass

    def gemm_begins(self, operands: tuple[Any, ...]) -> None:
        self._is_whole = False
        self._begun.append(self._now())

    def gemm_ends(self, operands: tuple[Any, ...]) -> None:
        self.gemm_s += self._now() - self._begun.pop()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
