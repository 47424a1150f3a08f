"""Calibration of pruning: what it costs on this rank, on the shapes that training uses."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zeroresize.config import BalanceConfig
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.measure.timed_products import ProductShape, random_operands, watch_products
from zeroresize.plan.layer import LayerPlan
from zeroresize.policy.tensor.columns.order import decided_columns, order_without_priority
from zeroresize.policy.tensor.costs import NUM_POINTS, ResizingCost, spread_ratios

_REPEATS = 3
#: Tokens of the first trial, from which the rest of the budget is planned.
_FIRST_TOKENS = 256
#: What a product costs on average over the measured ratios, roughly, relative to the whole one.
_MEAN_COST = 0.7


class _Seconds(NamedTuple):
    """Holds the seconds that products take, of the fused ones among them also apart."""

    gemm: float = 0.0
    gather_fill: float = 0.0
    whole_gemm: float = 0.0
    whole_gather_fill: float = 0.0

    def plus(self, count: int, other: _Seconds) -> _Seconds:
        """``count`` times the other on top."""
        return _Seconds(*(own + count * more for own, more in zip(self, other, strict=True)))


@dataclass(frozen=True)
class ProductSplit:
    """Holds what a step's fused products take by the calibration, which training cannot see apart.

    Attributes:
        ratios: pruning ratios γ, ascending, the first 0.
        gemm_s: seconds a step that they multiply at each of them; all zero where no kernel is fused.
        gather_fill_s: seconds a step that they gather and fill.
    """

    ratios: tuple[float, ...]
    gemm_s: tuple[float, ...]
    gather_fill_s: tuple[float, ...]

    def gemm_part(self, spared_share: float, borrowed_share: float) -> float:
        """Return which part of their time is multiplying, where a rank is spared one share and borrows another."""
        own_s = float(np.interp(spared_share, self.ratios, self.gemm_s))
        gather_fill_s = float(np.interp(spared_share, self.ratios, self.gather_fill_s))
        gemm_s = own_s + borrowed_share * self.gemm_s[0]  # others' columns come packed
        return gemm_s / (gemm_s + gather_fill_s) if gemm_s > 0.0 else 1.0


def measure_resizing_cost(
    layers: Mapping[str, BalancedLinear], config: BalanceConfig, budget_s: float = 1.0
) -> tuple[ResizingCost, ProductSplit]:
    """Measure what pruning costs this rank at ``NUM_POINTS`` ratios from 0 to γ_max, over all layers together.

    Where a fused kernel gathers inside its multiplication, multiplying takes as long as of the same columns packed, and
    gathering the rest.

    Every distinct shape is measured once for all layers that have it. The products run through the
    layers' probes, so injected slowness counts as it does in training. Fewer tokens are used where all do not fit the
    budget.

    Args:
        layers: balanced layers by name; measured are those that ran training forwards in the last iteration.
        config: up to which ratio, and in which blocks, layers prune.
        budget_s: seconds it may take, roughly.
    """
    layers = {name: layer for name, layer in layers.items() if layer.num_tokens > 0}
    if not layers:
        return proportional_to_flops(config)
    examples: dict[ProductShape, BalancedLinear] = {}
    counts: Counter[ProductShape] = Counter()
    for layer in layers.values():
        weight = layer.local_weight
        num_outputs, num_columns = layer.even_shape  # costs are of even shares, though units may be away
        shape = ProductShape(layer.num_tokens, num_columns, num_outputs, layer.compute_dtype, weight.device)
        examples.setdefault(shape, layer)
        counts[shape] += 1

    pruned, seconds = [0.0] * NUM_POINTS, [_Seconds() for _ in range(NUM_POINTS)]
    for shape, count in counts.items():
        plans = [_spread_plan(ratio, shape, config) for ratio in spread_ratios(config.max_ratio)]
        measured = _measure_shape(examples[shape], shape, plans, budget_s / len(counts))
        for point, (plan, of_shape) in enumerate(zip(plans, measured, strict=True)):
            pruned[point] += count * shape.work * (plan.pruned_share if plan else 0.0)
            seconds[point] = seconds[point].plus(count, of_shape)
    gemm_s, gather_fill_s, whole_gemm_s, whole_gather_fill_s = zip(*seconds, strict=True)
    if not gemm_s[0] > 0.0:  # the clock did not advance
        return proportional_to_flops(config)
    work = sum(count * shape.work for shape, count in counts.items())
    ratios = tuple(columns / work for columns in pruned)
    if any(low >= high for low, high in itertools.pairwise(ratios)):  # layers of a few columns: several plans are equal
        ratios = spread_ratios(config.max_ratio)
    cost = ResizingCost(
        ratios=ratios,
        gemm_share=tuple(max(seconds / gemm_s[0], 1e-6) for seconds in gemm_s),
        gather_fill_s=(0.0, *gather_fill_s[1:]),
    )
    return cost, ProductSplit(ratios, whole_gemm_s, whole_gather_fill_s)


def proportional_to_flops(config: BalanceConfig) -> tuple[ResizingCost, ProductSplit]:
    """Return what pruning is taken to cost where it cannot be measured."""
    cost = ResizingCost.linear(config.max_ratio)
    return cost, ProductSplit(cost.ratios, cost.gather_fill_s, cost.gather_fill_s)


def _measure_shape(
    layer: BalancedLinear, shape: ProductShape, plans: Sequence[LayerPlan | None], budget_s: float
) -> list[_Seconds]:
    """Measure the seconds of the three products under every plan for all the layer's tokens.

    Each is the best of three rounds, with the plans interleaved so that drift hits all alike.
    """
    num_tokens = min(shape.num_tokens, _FIRST_TOKENS)
    operands = random_operands(shape, num_tokens)
    _time_products(layer, *operands, None)  # first calls set up threads and libraries
    first = _time_products(layer, *operands, None)
    seconds_a_token = (first.gemm + first.gather_fill + first.whole_gemm) / num_tokens  # fused ones are timed twice
    affordable = budget_s / (seconds_a_token * len(plans) * _REPEATS * _MEAN_COST)
    num_tokens = min(shape.num_tokens, max(num_tokens // 2, int(affordable)))
    x_TK, dy_TN, w_NK = random_operands(shape, num_tokens)
    rounds = [[_time_products(layer, x_TK, dy_TN, w_NK, plan) for plan in plans] for _ in range(_REPEATS)]
    scale = shape.num_tokens / num_tokens
    return [_Seconds(*(scale * min(own) for own in zip(*point, strict=True))) for point in zip(*rounds, strict=True)]


def _spread_plan(ratio: float, shape: ProductShape, config: BalanceConfig) -> LayerPlan | None:
    """Prunes as many columns as training would at this ratio, in a selector's order without priorities."""
    order = order_without_priority(config, shape.num_columns)
    pruned = decided_columns(order, ratio, config.block, config.max_ratio)
    if len(pruned) == 0:
        return None
    return LayerPlan.from_pruned(torch.tensor(pruned.tolist(), device="cpu"), shape.num_columns, shape.device)


def _time_products(
    layer: BalancedLinear, x_TK: Tensor, dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None
) -> _Seconds:
    """Measure the seconds of the three products under ``plan``."""
    watched = watch_products(layer, x_TK, dy_TN, w_NK, plan)
    gather_fill_s = max(watched.products_s - watched.gemm_s - watched.whole_s, 0.0)
    whole_gemm_s = watched.whole_s
    if whole_gemm_s > 0.0 and plan is not None:
        packed_x_TP, packed_w_NP = (plan.kept.of(matrix).contiguous() for matrix in (x_TK, w_NK))
        packed_s = watch_products(layer, packed_x_TP, dy_TN, packed_w_NP, None).whole_s
        whole_gemm_s = min(watched.whole_s, packed_s)
    whole_gather_fill_s = watched.whole_s - whole_gemm_s
    return _Seconds(
        watched.gemm_s + whole_gemm_s, gather_fill_s + whole_gather_fill_s, whole_gemm_s, whole_gather_fill_s
    )
