"""Products that are timed apart from training: how fast ranks are, and what owning so much costs at whatever speed.

A step under a new division tells speed and cost of that division together, and the speed may have changed just then.
Products that are timed in turn within some milliseconds have one speed, so their ratio tells the cost alone. They run
through their layer's probes, so that injected slowness counts.

``T`` tokens, ``K`` in, ``N`` out.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize import kernels
from zeroresize.comm.collectives import group_rank, group_size, world_size
from zeroresize.comm.exchange import Meet
from zeroresize.kernels.probe import ProductProbe
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segments import shard_shape, work_of_layers
from zeroresize.measure.clocks import clock_for
from zeroresize.plan.layer import LayerPlan
from zeroresize.plan.ownership import normalised
from zeroresize.policy.tensor.estimation.times import LEAST_SECONDS
from zeroresize.utils.torch_state import synchronize

#: Seconds that a comparison may take, roughly.
BUDGET_S = 0.2
#: Tokens of a first trial, from which the others are planned.
FIRST_TOKENS = 256
#: So often everything is timed; the median counts of what is compared, and the fastest of what is not.
ROUNDS = 5
#: A sample is at least so long, since what delays a product may be carried to the next, and a shorter one can lie
#: wholly within a time slice of another process; a product is repeated for that so often at most.
_LEAST_SAMPLE_S, _MOST_REPEATS = 2e-3, 64
#: A measurement that tells how fast ranks are is at least so long, and ranks that differ by a smaller share are taken
#: to be equally fast.
_LEAST_S = _ALIKE = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProductShape:
    """Describes [T, K] times [N, K]: ``num_tokens`` T, ``num_columns`` K, ``num_outputs`` N."""

    num_tokens: int
    num_columns: int
    num_outputs: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, layer: BalancedLinear, size: Sequence[int], num_tokens: int) -> ProductShape:
        """Return the shape of a layer's products by a weight of ``size`` [N, K]."""
        return cls(num_tokens, size[1], size[0], layer.compute_dtype, layer.local_weight.device)

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


class Stopwatch(ProductProbe):
    """Times products, and multiplications inside of them, on their device's clock; never inside an iteration."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_for(device)
        self._begun: dict[str, Any] = {}
        self._pairs: dict[str, list[tuple[Any, Any]]] = {"product": [], "gemm": []}

    def product_begins(self) -> None:
        self._begun["product"] = self._clock.mark()

    def product_ends(self) -> None:
        self._end("product")

    def gemm_begins(self, operands: tuple[Any, ...]) -> None:
        self._begun["gemm"] = self._clock.mark()

    def gemm_ends(self, operands: tuple[Any, ...]) -> None:
        self._end("gemm")

    def seconds(self, kind: str) -> float:
        """Return the seconds of all products, or of all multiplications, once their device has done them."""
        return sum(self._clock.seconds(*pair) for pair in self._pairs[kind])

    def _end(self, kind: str) -> None:
        if kind in self._begun:  # or a fused kernel that ends has left the product to another one
            self._pairs[kind].append((self._begun.pop(kind), self._clock.mark()))


def time_products(
    layer: BalancedLinear, x_TK: Tensor, dy_TN: Tensor, w_NK: Tensor, plan: LayerPlan | None = None, repeats: int = 1
) -> tuple[float, float]:
    """Measure so many times the three products under ``plan``, one after another.

    On a GPU events tell them, and the device is waited for once: it computes while the CPU launches what follows, as
    in training.

    Returns:
        The seconds of all, and of the multiplications alone.
    """
    stopwatch = Stopwatch(x_TK.device)
    layer.probes.add_outermost(stopwatch)
    try:
        for _ in range(repeats):
            layer.probes.product(kernels.forward, x_TK, w_NK, None, plan)
            layer.probes.product(kernels.dgrad, dy_TN, w_NK, plan, None)
            layer.probes.product(kernels.wgrad, dy_TN, x_TK, plan, None)
    finally:
        layer.probes.remove(stopwatch)
    synchronize(x_TK.device)
    return stopwatch.seconds("product"), stopwatch.seconds("gemm")


def time_in_turn(
    layer: BalancedLinear,
    cases: Sequence[tuple[ProductShape, LayerPlan | None]],
    budget_s: float,
    *,
    fewest_tokens: int = 1,
    least_s: float = 0.0,
) -> list[list[tuple[float, float]]]:
    """Measure products in turn, so that drift hits all alike: of each case, as :func:`time_products`, every round.

    Fewer tokens are used where all do not fit the budget, and seconds are told of all.

    Args:
        cases: shapes with the plans under which they are multiplied.
        budget_s: seconds that it may take, roughly.
        fewest_tokens: that are multiplied whatever they take.
        least_s: of a sample, which is repeated for that.
    """
    shape, plan = cases[0]
    tokens = min(shape.num_tokens, FIRST_TOKENS)
    of_token_s = _time_again(layer, shape, tokens, plan=plan) / tokens
    affordable = int(budget_s / (len(cases) * ROUNDS * max(of_token_s, LEAST_SECONDS)))
    tokens = min(shape.num_tokens, max(fewest_tokens, affordable))
    repeats = _repeats_of(of_token_s * tokens, least_s)
    operands = [(random_operands(shape, tokens), plan) for shape, plan in cases]
    for of_case, plan in operands:  # first calls set up threads and libraries
        time_products(layer, *of_case, plan)
    rounds = [[time_products(layer, *of_case, plan, repeats) for of_case, plan in operands] for _ in range(ROUNDS)]
    scale = shape.num_tokens / tokens / repeats
    return [[(scale * all_s, scale * gemm_s) for all_s, gemm_s in of_case] for of_case in zip(*rounds, strict=True)]


def compare_products(layers: Mapping[str, BalancedLinear], num_tokens: Mapping[str, int]) -> float | None:
    """Measure how many times as long the products of all layers take as they would at even shares.

    Every pair of an even and a present shape is measured once for all layers that have it, with random numbers; fewer
    tokens are used where all do not fit the budget.

    Args:
        layers: balanced layers by name.
        num_tokens: T of a forward by layer; layers without any do not count.

    Returns:
        The ratio; None where there is nothing to compare, or the clock did not advance; or where layers compute by
        their hosts' own forwards, of which no product apart from training tells anything.
    """
    if any(layer.moves_only for layer in layers.values()):
        return None
    counts: Counter[tuple[ProductShape, ...]] = Counter()
    computed: dict[tuple[ProductShape, ...], float] = {}  # as many, but for what other ranks compute of their rows
    examples: dict[tuple[ProductShape, ...], BalancedLinear] = {}
    for name, layer in layers.items():
        if tokens := num_tokens.get(name, 0):
            is_shard = layer.segment is not None and layer.is_sharded_further(layer.weight)
            size = shard_shape(layer, group_rank(layer.process_group)) if is_shard else layer.local_weight.shape
            sizes, shared = (layer.even_shape, size), layer.shared_rows
            pair = tuple(ProductShape.of(layer, size, tokens) for size in sizes)
            counts[pair] += 1
            of_layer = 1.0 if shared is None else shared.computed_of(layer.num_sequences)
            computed[pair] = computed.get(pair, 0.0) + of_layer
            examples.setdefault(pair, layer)
    even_s = present_s = 0.0
    for pair, count in counts.items():
        cases = [(shape, None) for shape in pair if shape.work > 0]
        in_turn = time_in_turn(examples[pair], cases, BUDGET_S / len(counts), least_s=_LEAST_SAMPLE_S)
        even, *present = (statistics.median(seconds for seconds, _ in of_case) for of_case in in_turn)
        even_s += count * even * examples[pair].even_part
        present_s += computed[pair] * sum(present)
    return present_s / even_s if even_s > 0.0 and present_s > 0.0 else None


def time_reference(layers: Mapping[str, BalancedLinear], num_tokens: Mapping[str, int]) -> float | None:
    """Measure the seconds of a step's products at even shares if all were as fast as the smallest of them is now.

    So the speed of a rank is known that owns nothing. ``num_tokens`` are of a step; None where there are none.
    """
    work = {name: num_tokens.get(name, 0) * of_token for name, of_token in work_of_layers(layers).items()}
    name = min((name for name in work if work[name] > 0), key=lambda name: work[name], default=None)
    if name is None:
        return None
    layer, tokens = layers[name], min(num_tokens[name], FIRST_TOKENS)
    shape = ProductShape.of(layer, layer.even_shape, tokens)
    repeats = _repeats_of(_time_again(layer, shape, tokens), _LEAST_SAMPLE_S)
    return sum(work.values()) / (shape.work * repeats) * _time_again(layer, shape, tokens, repeats)


def _time_again(
    layer: BalancedLinear, shape: ProductShape, num_tokens: int, repeats: int = 1, plan: LayerPlan | None = None
) -> float:
    """Seconds of products that were made once before, which sets up threads and libraries, and touches the memory."""
    operands = random_operands(shape, num_tokens)
    time_products(layer, *operands, plan)
    return time_products(layer, *operands, plan, repeats)[0]


def _repeats_of(seconds: float, least_s: float) -> int:
    return max(min(round(least_s / max(seconds, LEAST_SECONDS)), _MOST_REPEATS), 1)


def measure_wanted_shares(
    shares: Sequence[float] | str,
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    meet: Meet,
) -> tuple[float, ...]:
    """Return ``shares``, or for ``"auto"`` those at which all ranks take equally long, with a mean of 1.

    Collective for ``"auto"``, and takes about a second: every rank multiplies at the same time, forward and backward,
    by a weight like that of the largest layer.

    Args:
        layers: balanced layers by name.
        meet: gives every rank's numbers for this rank's.

    Raises:
        ValueError: for ``"auto"`` beside ranks outside of ``process_group``.
    """
    if not isinstance(shares, str):
        return tuple(shares)
    if world_size() > group_size(process_group):
        raise ValueError(
            "shares='auto' is not allowed beside data parallelism, where all replicas must be divided alike and "
            "may measure differently: give the shares as numbers"
        )
    meet(0.0)  # so that all of them multiply at the same time
    layer = max(layers.values(), key=lambda layer: layer.even_shape.numel())
    weight = layer.local_weight.detach().new_ones(layer.even_shape)  # as large on all ranks, whatever each has
    seconds = [seconds for seconds, *_ in meet(product_seconds(weight))]
    are_alike = max(seconds) - min(seconds) <= _ALIKE * statistics.fmean(seconds)
    measured = (1.0,) * len(seconds) if are_alike else normalised([1.0 / of_rank for of_rank in seconds])
    logger.info(
        "shares='auto': by how fast the ranks multiply they are to own the shares %s",
        [round(share, 2) for share in measured],
    )
    return measured


@torch.no_grad()
def product_seconds(weight: Tensor, *, least_s: float = _LEAST_S, repetitions: int = ROUNDS) -> float:
    """Measure the seconds of the three products of one layer, as :func:`fastest_seconds` does.

    Args:
        weight: [N, K] of the layer.
    """
    x = torch.ones(FIRST_TOKENS, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def multiply() -> None:
        y = x @ weight.t()
        y @ weight
        y.t() @ x

    return fastest_seconds(multiply, weight.device, least_s=least_s, repetitions=repetitions)


def fastest_seconds(
    work: Callable[[], object], device: torch.device, *, least_s: float = _LEAST_S, repetitions: int = ROUNDS
) -> float:
    """Measure the seconds of some work on a device.

    Args:
        least_s: that one measurement takes.
        repetitions: of it, of which the fastest counts: whatever disturbs only adds time.
    """

    def seconds_of(times: int) -> float:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            work()
        synchronize(device)
        return time.perf_counter() - began

    seconds_of(1)  # what is set up once
    fastest_s, times = float("inf"), 1
    for _ in range(repetitions):
        while (elapsed_s := seconds_of(times)) < least_s:
            times *= 2
        fastest_s = min(fastest_s, elapsed_s / times)
    return fastest_s
