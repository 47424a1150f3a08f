"""The calibration: what pruning costs on this rank, on the shapes that training really uses."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeroresize import kernels
from zeroresize.config import BalanceConfig
from zeroresize.kernels.probe import Probe
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.plan.layer import LayerPlan
from zeroresize.policy.columns.order import decided_columns, order_without_priority
from zeroresize.policy.cost_model import NUM_POINTS, ResizingCost, spread_ratios

_REPEATS = 3
#: Tokens of the first trial, from which the rest of the budget is planned.
_FIRST_TOKENS = 256
#: What a product costs on average over the measured ratios, roughly, relative to the whole one.
_MEAN_COST = 0.7


@dataclass(frozen=True)
class _Shape:
    num_tokens: int
    num_columns: int
    num_outputs: int
    dtype: torch.dtype
    device: torch.device

    @property
    def work(self) -> int:
        """In proportion to the products' FLOPs."""
        return self.num_tokens * self.num_columns * self.num_outputs


def measure_resizing_cost(
    layers: Mapping[str, BalancedLinear], config: BalanceConfig, budget_s: float = 1.0
) -> ResizingCost:
    """What pruning costs this rank at ``NUM_POINTS`` ratios from 0 to γ_max, over all layers together.

    Every distinct shape is measured once for all layers that have it. The products run through the
    layers' probes, so injected slowness counts as it does in training. Fewer tokens are used where all do not fit the
    budget.

    Args:
        layers: balanced layers by name; those are measured that have seen the training forwards of one iteration.
        config: up to which ratio, and in which blocks, layers prune.
        budget_s: seconds it may take, roughly.
    """
    layers = {name: layer for name, layer in layers.items() if layer.num_tokens > 0}
    if not layers:
        return ResizingCost.linear(config.max_ratio)
    examples: dict[_Shape, BalancedLinear] = {}
    counts: Counter[_Shape] = Counter()
    for layer in layers.values():
        weight = layer.weight
        shape = _Shape(layer.num_tokens, weight.shape[1], weight.shape[0], layer.compute_dtype, weight.device)
        examples.setdefault(shape, layer)
        counts[shape] += 1

    pruned, gemm_s, gather_fill_s = [0.0] * NUM_POINTS, [0.0] * NUM_POINTS, [0.0] * NUM_POINTS
    for shape, count in counts.items():
        plans = [_spread_plan(ratio, shape, config) for ratio in spread_ratios(config.max_ratio)]
        measured = _measure_shape(examples[shape], shape, plans, budget_s / len(counts))
        for point, (plan, (gemm, overhead)) in enumerate(zip(plans, measured, strict=True)):
            pruned[point] += count * shape.work * (plan.pruned_share if plan else 0.0)
            gemm_s[point] += count * gemm
            gather_fill_s[point] += count * overhead
    if not gemm_s[0] > 0.0:  # of a clock that stands still
        return ResizingCost.linear(config.max_ratio)
    work = sum(count * shape.work for shape, count in counts.items())
    ratios = tuple(columns / work for columns in pruned)
    if any(low >= high for low, high in itertools.pairwise(ratios)):  # layers of a few columns: several plans are equal
        ratios = spread_ratios(config.max_ratio)
    return ResizingCost(
        ratios=ratios,
        gemm_share=tuple(max(seconds / gemm_s[0], 1e-6) for seconds in gemm_s),
        gather_fill_s=(0.0, *gather_fill_s[1:]),
    )


def _measure_shape(
    layer: BalancedLinear, shape: _Shape, plans: Sequence[LayerPlan | None], budget_s: float
) -> list[tuple[float, float]]:
    """(gemm, overhead) seconds of the three products under every plan for all the layer's tokens.

    The best of three rounds, with the plans interleaved so that drift hits all alike.
    """
    num_tokens = min(shape.num_tokens, _FIRST_TOKENS)
    operands = _operands(shape, num_tokens)
    _time_products(layer, *operands, None)  # first calls set up threads and libraries
    seconds_a_token = sum(_time_products(layer, *operands, None)) / num_tokens
    affordable = budget_s / (seconds_a_token * len(plans) * _REPEATS * _MEAN_COST)
    num_tokens = min(shape.num_tokens, max(num_tokens // 2, int(affordable)))
    x_TK, dy_TN, w_NK = _operands(shape, num_tokens)
    rounds = [[_time_products(layer, x_TK, dy_TN, w_NK, plan) for plan in plans] for _ in range(_REPEATS)]
    scale = shape.num_tokens / num_tokens
    return [
        (scale * min(gemm for gemm, _ in point), scale * min(overhead for _, overhead in point))
        for point in zip(*rounds, strict=True)
    ]


def _operands(shape: _Shape, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(shape.device).manual_seed(0)  # its own: training's random numbers stay as they are

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=shape.device).to(shape.dtype)

    return (
        random(num_tokens, shape.num_columns),
        random(num_tokens, shape.num_outputs),
        random(shape.num_outputs, shape.num_columns),
    )


def _spread_plan(ratio: float, shape: _Shape, config: BalanceConfig) -> LayerPlan | None:
    """Spares as many columns as training would for this ratio, in the order that a selector has without a priority."""
    order = order_without_priority(config, shape.num_columns)
    pruned = decided_columns(order, ratio, config.block, config.max_ratio)
    if len(pruned) == 0:
        return None
    return LayerPlan.from_pruned(torch.tensor(pruned.tolist(), device="cpu"), shape.num_columns, shape.device)


def _time_products(
    layer: BalancedLinear, x_TK: Tensor, dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None
) -> tuple[float, float]:
    """(gemm, overhead) seconds of the three products under ``plan``."""
    stopwatch = _Stopwatch(x_TK.device)
    layer.probes.add_outermost(stopwatch)
    try:
        layer.probes.product(kernels.forward, x_TK, w_NK, None, plan)
        layer.probes.product(kernels.dgrad, dy_TN, w_NK, plan, None)
        layer.probes.product(kernels.wgrad, dy_TN, x_TK, plan, None)
    finally:
        layer.probes.remove(stopwatch)
    return stopwatch.gemm_s, max(stopwatch.products_s - stopwatch.gemm_s, 0.0)


class _Stopwatch(Probe):
    """Times products and multiplications with the device at rest: only here, never inside an iteration."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: list[float] = []
        self.products_s = self.gemm_s = 0.0

    def product_begins(self) -> None:
        self._begun.append(self._now())

    def product_ends(self) -> None:
        self.products_s += self._now() - self._begun.pop()

    def gemm_begins(self, operands: tuple[Any, ...]) -> None:
        self._begun.append(self._now())

    def gemm_ends(self, operands: tuple[Any, ...]) -> None:
        self.gemm_s += self._now() - self._begun.pop()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
