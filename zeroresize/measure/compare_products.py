"""A rank's products at even shares and at those in force, timed in turn: what owning so much costs at whatever speed.

A step under a new division tells speed and cost of that division together, and the speed may have changed just then.
Products that are timed in turn within some milliseconds have one speed, so their ratio tells the cost alone.

``T`` tokens, ``K`` in, ``N`` out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.measure.timed_products import ProductShape, random_operands, time_products

#: Seconds that a comparison may take, roughly.
BUDGET_S = 0.2
#: So often both are timed; the median counts.
_PAIRS = 5
#: A sample is at least so long, since what delays a product may be carried to the next, and a shorter one can lie
#: wholly within a time slice of another process.
_LEAST_SAMPLE_S = 2e-3
#: So often a product is repeated for that, at most.
_MOST_REPEATS = 64
#: Tokens of the first trial, from which the others are planned.
_FIRST_TOKENS = 256


@dataclass(frozen=True)
class Reference:
    """Describes a product that is always the same, whatever a rank owns.

    Attributes:
        layer: name of the layer of whose even shape it is.
        num_tokens: T.
        repeats: how often it is carried out.
        scale: how many times as many FLOPs all products of a step have at even shares.
    """

    layer: str
    num_tokens: int
    repeats: int
    scale: float


def compare_products(
    layers: Mapping[str, BalancedLinear], num_tokens: Mapping[str, int], budget_s: float = BUDGET_S
) -> float | None:
    """Measure how many times as long the products of all layers take as they would at even shares.

    Every pair of an even and a present shape is measured once for all layers that have it, with random numbers; fewer
    tokens are used where all do not fit the budget.

    Args:
        layers: balanced layers by name.
        num_tokens: T of a forward by layer; layers without any do not count.
        budget_s: seconds it may take, roughly.

    Returns:
        The ratio; None where there is nothing to compare, or the clock did not advance.
    """
    counts: Counter[tuple[ProductShape, ProductShape]] = Counter()
    examples: dict[tuple[ProductShape, ProductShape], BalancedLinear] = {}
    for name, layer in layers.items():
        if tokens := num_tokens.get(name, 0):
            pair = (
                _shape(layer, tuple(layer.even_shape), tokens),
                _shape(layer, tuple(layer.local_weight.shape), tokens),
            )
            counts[pair] += 1
            examples.setdefault(pair, layer)
    even_s = present_s = 0.0
    for pair, count in counts.items():
        in_turn = _time_in_turn(examples[pair], *pair, budget_s / len(counts))
        even_s += count * in_turn[0]
        present_s += count * in_turn[1]
    return present_s / even_s if even_s > 0.0 and present_s > 0.0 else None


def choose_reference(layers: Mapping[str, BalancedLinear], num_tokens: Mapping[str, int]) -> Reference | None:
    """Choose the smallest product of a step that is long enough for a sample; None where no layer has seen tokens."""
    sizes = {
        name: tokens * layer.even_shape.numel() for name, layer in layers.items() if (tokens := num_tokens.get(name, 0))
    }
    if not sizes:
        return None
    name = min(sizes, key=lambda name: sizes[name])
    tokens = min(num_tokens[name], _FIRST_TOKENS)
    once = Reference(name, tokens, 1, 1.0)
    time_reference(layers[name], once)  # first calls set up threads and libraries
    repeats = _repeats_of(time_reference(layers[name], once))
    flops = tokens * layers[name].even_shape.numel() * repeats
    return replace(once, repeats=repeats, scale=sum(sizes.values()) / flops)


def time_reference(layer: BalancedLinear, reference: Reference) -> float:
    """Measure the seconds of a step's products at even shares if all were as fast as ``reference`` is now."""
    operands = random_operands(_shape(layer, tuple(layer.even_shape), reference.num_tokens), reference.num_tokens)
    time_products(layer, *operands, 1)  # touches the memory first
    return reference.scale * time_products(layer, *operands, reference.repeats)


def _time_in_turn(
    layer: BalancedLinear, even: ProductShape, present: ProductShape, budget_s: float
) -> tuple[float, float]:
    """Seconds of the products at two shapes for all tokens: medians of ``_PAIRS`` in turn."""
    tokens = min(even.num_tokens, _FIRST_TOKENS)
    first = random_operands(even, tokens)
    time_products(layer, *first, 1)
    first_s = time_products(layer, *first, 1)
    affordable = int(budget_s / (2 * _PAIRS) / max(first_s, 1e-9) * tokens)
    tokens = max(min(even.num_tokens, affordable), min(tokens, 64))
    shapes = [shape for shape in (even, present) if shape.work > 0]
    operands = [random_operands(shape, tokens) for shape in shapes]
    for pair in operands:
        time_products(layer, *pair, 1)
    repeats = _repeats_of(first_s * tokens / min(even.num_tokens, _FIRST_TOKENS))
    samples: list[list[float]] = [[] for _ in shapes]
    for _ in range(_PAIRS):
        for pair, seconds in zip(operands, samples, strict=True):
            seconds.append(time_products(layer, *pair, repeats))
    scale = even.num_tokens / tokens / repeats
    even_s, *others = (scale * statistics.median(seconds) for seconds in samples)
    return even_s, others[0] if others else 0.0


def _repeats_of(seconds: float) -> int:
    return max(min(round(_LEAST_SAMPLE_S / max(seconds, 1e-9)), _MOST_REPEATS), 1)


def _shape(layer: BalancedLinear, size: tuple[int, ...], num_tokens: int) -> ProductShape:
    num_outputs, num_columns = size
    return ProductShape(num_tokens, num_columns, num_outputs, layer.compute_dtype, layer.local_weight.device)
