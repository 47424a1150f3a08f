"""Slowing the products of balanced layers: attached to them as a probe."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from zeroresize.injection.delay import CpuDelay, Delay, Slowdown
from zeroresize.kernels.probe import ProductProbe
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.plan.layer import LayerPlan


class SlowLayers(Slowdown):
    """While active, delays the products of ``layers``; innermost, so that whatever measures them sees the slowness.

    The scope ``"gemm"`` delays by the matrix multiplication alone, ``"all"`` by the whole product with its gathers and
    fills. Of fused kernels, which show no multiplication, both delay by the whole product.
    """

    def __init__(self, layers: Sequence[BalancedLinear], scope: str, cpu: CpuDelay | None = None) -> None:
        super().__init__(cpu)
        self._probes = [(layer, _SlowProduct(layer, self, scope == "all")) for layer in layers]

    def __enter__(self) -> None:
        for layer, probe in self._probes:
            layer.probes.add_innermost(probe)

    def __exit__(self, *_: Any) -> None:
        for layer, probe in self._probes:
            layer.probes.remove(probe)


class _SlowProduct(ProductProbe):
    """One layer's delays. The device is looked up at each product: a model may be moved.

    A whole product has three parts, each delayed at its end: what is gathered before the multiplication, the
    multiplication, and what is filled after it. So whoever measures the multiplication apart sees only its slowness.
    """

    def __init__(self, layer: BalancedLinear, slowdown: Slowdown, is_whole_product: bool) -> None:
        self._layer, self._slowdown = layer, slowdown
        self._is_whole_product = is_whole_product
        self._key: Hashable = None

    def product_begins(self) -> None:
        if self._is_whole_product:
            self._delay.begins()

    def gemm_begins(self, operands: tuple[Any, ...]) -> None:
        plans = [x for x in operands if isinstance(x, LayerPlan)]  # a fused kernel's
        shapes = [(x.shape, x.dtype) for x in operands if isinstance(x, torch.Tensor)]
        self._key = (*shapes, *(plan.keep_P.numel() for plan in plans))
        if self._is_whole_product:
            self._delay.ends(("gather", self._key))
        self._delay.begins()

    def gemm_ends(self, operands: tuple[Any, ...]) -> None:
        self._delay.ends(self._key)
        if self._is_whole_product:
            self._delay.begins()

    def product_ends(self) -> None:
        if self._is_whole_product:
            self._delay.ends(("fill", self._key))

    @property
    def _delay(self) -> Delay:
        return self._slowdown.delay_on(self._layer.local_weight.device)
