"""Calibrations: what pruning costs on this rank, and what lending adds to a step, on the shapes that training uses.

Every distinct shape is measured once and counted as often as layers have it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import all_reduce, group_rank, group_size
from zeroresize.comm.exchange import Meet
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MIGRATING_MODES
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segment import OwnedSegment
from zeroresize.measure.timed_products import FIRST_TOKENS, ROUNDS, ProductShape, time_in_turn
from zeroresize.migration.lender import make_transport
from zeroresize.migration.transport import LoanRoute, Transport, bounds_of_parts
from zeroresize.plan.layer import LayerPlan
from zeroresize.policy.tensor.columns.order import decided_columns, num_lent, order_without_priority
from zeroresize.policy.tensor.costs import NUM_POINTS, MigrationCost, ResizingCost, spread_ratios
from zeroresize.policy.tensor.estimation.times import LEAST_SECONDS
from zeroresize.utils.progress import Progress
from zeroresize.utils.texts import duration_text, percent_text
from zeroresize.utils.torch_state import synchronize

#: Shares of its columns that one rank lends in the calibration. The cost is taken to be a straight line through them.
_LENT = (0.25, 0.75)

#: Seconds, roughly: for what pruning costs, and for each layer of a segment when copies are measured.
_BUDGET_S, _COPIES_BUDGET_S = 1.0, 0.1

logger = logging.getLogger(__name__)


def calibrate_group(
    layers: Mapping[str, BalancedLinear],
    process_group: ProcessGroup,
    config: BalanceConfig,
    is_calibrated: bool,
    calibrate: Callable[[], ResizingCost],
    migration: MigrationCost | None,
    meet: Meet,
) -> MigrationCost | None:
    """Measure the costs that are not known yet, on the shapes of the step that has ended; a resumed run may know them.

    Collective: all ranks measure what one of them does not know.

    Args:
        is_calibrated: whether this rank knows the cost of pruning, which ``calibrate`` measures and keeps.
        migration: the cost of migration, None if unknown.
        meet: exchanges numbers with all ranks, so a missing rank is found before anything else is sent.

    Returns:
        The cost of migration, None in a mode that does not need it, and where not all layers can lend.
    """
    may_migrate = config.mode in ("off", *MIGRATING_MODES) and all(layer.may_lend for layer in layers.values())
    unknown = [not is_calibrated, may_migrate and migration is None]
    measures_pruning, measures_migrating = (any(on_ranks) for on_ranks in zip(*meet(*unknown), strict=True))
    began = time.perf_counter()
    results = []
    is_first = group_rank(process_group) == 0
    with Progress("measuring what it costs to relieve a slow rank", tell=logger.info, is_shown=is_first):
        if measures_pruning:
            cost = calibrate()
            results.append(
                f"without {percent_text(cost.max_ratio)} of its columns its products take "
                f"{percent_text(cost.gemm_share[-1])} of their time"
            )
        if may_migrate and (measures_pruning or measures_migrating):
            migration = measure_migration_cost(layers, process_group, config.migration_transport)
            results.append(
                f"lending takes {duration_text(migration.fixed_s)} a step, and up to "
                f"{duration_text(migration.per_share_s)} more"
            )
    if results and is_first:
        logger.info(
            "measured once, in %s, what relieving a slow rank would cost: %s",
            duration_text(time.perf_counter() - began),
            "; ".join(results),
        )
    return migration if may_migrate else None


# ---- pruning --------------------------------------------------------------------------------------------------------


def measure_resizing_cost(layers: Mapping[str, BalancedLinear], config: BalanceConfig) -> ResizingCost:
    """Measure what pruning costs this rank at ``NUM_POINTS`` ratios from 0 to γ_max, over all layers together.

    The products run through the layers' probes, so injected slowness counts as it does in training. A fused kernel
    counts as one multiplication. Fewer tokens are used where all do not fit the budget. Where nothing can be measured,
    or layers compute by their hosts' own forwards, the cost is in proportion to FLOPs.

    Args:
        layers: of which those are measured that ran training forwards in the last iteration.
    """
    if any(layer.moves_only for layer in layers.values()):
        return ResizingCost.linear(config.max_ratio)
    examples: dict[ProductShape, BalancedLinear] = {}
    counts: Counter[ProductShape] = Counter()
    for layer in layers.values():
        if layer.num_tokens > 0:
            shape = ProductShape.of(layer, layer.even_shape, layer.num_tokens)  # though units may be away
            examples.setdefault(shape, layer)
            counts[shape] += 1
    pruned, gemm_s, gather_fill_s = [0.0] * NUM_POINTS, [0.0] * NUM_POINTS, [0.0] * NUM_POINTS
    for shape, count in counts.items():
        plans = [_spread_plan(ratio, shape, config) for ratio in spread_ratios(config.max_ratio)]
        cases = [(shape, plan) for plan in plans]
        measured = time_in_turn(examples[shape], cases, _BUDGET_S / len(counts), fewest_tokens=FIRST_TOKENS // 2)
        for point, (plan, rounds) in enumerate(zip(plans, measured, strict=True)):
            pruned[point] += count * shape.work * (plan.pruned_share if plan else 0.0)
            # The fastest round counts, as noise only adds time.
            gemm_s[point] += count * min(multiplying_s for _, multiplying_s in rounds)
            gather_fill_s[point] += count * max(min(all_s - part_s for all_s, part_s in rounds), 0.0)
    if not gemm_s[0] > 0.0:  # there was no training, or the clock did not advance
        return ResizingCost.linear(config.max_ratio)
    work = sum(count * shape.work for shape, count in counts.items())
    ratios = tuple(columns / work for columns in pruned)
    if any(low >= high for low, high in itertools.pairwise(ratios)):  # layers of a few columns: several plans are equal
        ratios = spread_ratios(config.max_ratio)
    gemm_share = tuple(max(seconds, LEAST_SECONDS) / gemm_s[0] for seconds in gemm_s)
    return ResizingCost(ratios, gemm_share, (0.0, *gather_fill_s[1:]))


def _spread_plan(ratio: float, shape: ProductShape, config: BalanceConfig) -> LayerPlan | None:
    """Prunes as many columns as training would at this ratio, in a selector's order without priorities."""
    order = order_without_priority(config, shape.num_columns)
    pruned = decided_columns(order, ratio, config.block, config.max_ratio)
    if len(pruned) == 0:
        return None
    return LayerPlan.from_pruned(torch.tensor(pruned.tolist(), device="cpu"), shape.num_columns, shape.device)


#: Of so many blocks gradients are summed to see what each takes beside the message.
_MANY = 8


def measure_copies(segment: OwnedSegment, process_group: ProcessGroup) -> list[float]:
    """Measure what rows that several ranks hold cost in a step, of what products take at even shares here; collective.

    Returns:
        The messages in which gradients are summed, if blocks of units that share rows are on several ranks; what each
        block adds; the same two of heads of which ranks own slices; and what products take of a head's half of the
        tokens beyond half of the head's products.
    """
    sums_s: list[float] = []
    for are_blocks in (True, False):
        sizes: Counter[BalancedLinear] = Counter()
        for where in segment.tensors:
            if where.block > 1 and where.parameter.requires_grad and are_blocks == (where.block > segment.owned.slices):
                sizes[where.owner] += where.elements_of_unit
        row = segment.modules[-1]  # which is called as often as the others; LoRA's matrices are not counted anew
        times = row.num_forwards - row.num_recomputations
        few_s, many_s = (
            sum(times * _sum_s(number * size, layer, process_group) for layer, size in sizes.items())
            for number in (1, _MANY)
        )
        # Once more as the step begins, in one message of all segments.
        sums_s += [few_s, 2.0 * max(many_s - few_s, 0.0) / (_MANY - 1)]
    products_s = {layer: _products_s(layer, layer.even_shape) for layer in segment.modules if layer.num_tokens > 0}
    halves_s = 0.0
    for where in segment.tensors if segment.owned.slices > 1 else ():
        if where.block == segment.owned.slices and where.owner in products_s and where.parameter.dim() == 2:
            layer, size = where.owner, list(where.owner.even_shape)
            share, size[where.dim] = sum(where.rows) / size[where.dim], sum(where.rows)
            halves_s += max(_products_s(layer, size, parts=2) - share * products_s[layer] / 2, 0.0)
    all_s = sum(layer.even_part * seconds for layer, seconds in products_s.items())
    return [seconds / max(all_s, LEAST_SECONDS) for seconds in (*sums_s, halves_s)]


def _products_s(layer: BalancedLinear, size: Sequence[int], parts: int = 1) -> float:
    """Seconds of a step's products by a weight of this size, of one of so many parts of the tokens of each forward."""
    num_tokens = max(layer.num_tokens // layer.num_forwards // parts, 1)
    case = ProductShape.of(layer, size, num_tokens), None
    (timed,) = time_in_turn(layer, [case], _COPIES_BUDGET_S, fewest_tokens=FIRST_TOKENS // 2)
    return layer.num_forwards * min(all_s for all_s, _ in timed)


def _sum_s(size: int, like: BalancedLinear, process_group: ProcessGroup) -> float:
    """Seconds that it takes to sum so many elements over the ranks."""
    rounds, message = [], like.local_weight.detach().new_zeros(size)
    for _ in range(1 + ROUNDS):
        synchronize(message.device)
        began = time.perf_counter()
        all_reduce(message, process_group)
        synchronize(message.device)
        rounds.append(time.perf_counter() - began)
    return min(rounds[1:])


# ---- migration (Φ1 of section IV-B) ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Shape:
    num_tokens: int  # of one forward
    num_micro_batches: int
    num_recomputations: int  # forwards of activation checkpointing, beyond one a micro-batch
    num_columns: int
    num_outputs: int
    is_column_parallel: bool
    weight_dtype: torch.dtype
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, layer: BalancedLinear) -> _Shape:
        num_outputs, num_columns = layer.even_shape  # units may be away, and all ranks must measure alike
        return cls(
            num_tokens=layer.num_tokens // layer.num_forwards,
            num_micro_batches=layer.num_forwards - layer.num_recomputations,
            num_recomputations=layer.num_recomputations,
            num_columns=num_columns,
            num_outputs=num_outputs,
            is_column_parallel=layer.is_column_parallel,
            weight_dtype=layer.local_weight.dtype,
            dtype=layer.compute_dtype,
            device=layer.local_weight.device,
        )


def measure_migration_cost(
    layers: Mapping[str, BalancedLinear], process_group: ProcessGroup, migration_transport: str
) -> MigrationCost:
    """Measure the seconds of all transfers of a step when one rank lends and nothing overlaps; collective.

    In training some transfers overlap, and ranks wait for each other's results; what training shows corrects the scale
    later. Measured are the layers that ran training forwards in the last iteration; ValueError if there are none.
    """
    shapes = Counter(_Shape.of(layer) for layer in layers.values() if layer.num_tokens > 0)
    if not shapes:
        raise ValueError("no layer has seen a training forward yet: there is nothing to measure")
    seconds = torch.zeros(ROUNDS, len(_LENT), group_size(process_group), dtype=torch.float64)
    for of_round in seconds:
        transport = make_transport(migration_transport, process_group)
        for lent, of_ranks in zip(_LENT, of_round, strict=True):
            of_ranks[transport.rank] = sum(
                count * _Transfers(shape, lent, transport).seconds_of_step() for shape, count in shapes.items()
            )
    seconds = seconds.to(next(iter(shapes)).device)
    all_reduce(seconds, process_group)
    small_s, large_s = seconds.amax(dim=-1).amin(dim=0).tolist()  # of the slowest rank, in the fastest round
    per_share_s = max(large_s - small_s, 0.0) / (_LENT[1] - _LENT[0])
    return MigrationCost(max(small_s - _LENT[0] * per_share_s, 0.0), per_share_s)


class _Transfers:
    """The transfers of one layer in a step in which rank 0 lends to all others, with zeros as content."""

    def __init__(self, shape: _Shape, lent: float, transport: Transport) -> None:
        self._shape, self._transport = shape, transport
        num_receivers = group_size(transport.process_group) - 1
        num_columns = num_lent(shape.num_columns, lent)
        bounds = bounds_of_parts(num_columns, [1.0 / num_receivers] * num_receivers)
        self._route = LoanRoute(0, tuple(range(1, num_receivers + 1)), bounds)
        self._is_owner = transport.rank == 0
        columns = torch.arange(num_columns, device=shape.device)
        self._columns = columns if self._is_owner else columns[self._route.part_of(transport.rank)]
        self._x_TK, self._y_TN, self._dw_NK = (
            torch.zeros(*size, dtype=shape.dtype, device=shape.device)
            for size in (
                (shape.num_tokens, shape.num_columns),
                (shape.num_tokens, shape.num_outputs),
                (shape.num_outputs, shape.num_columns),
            )
        )
        self._w_NK = self._dw_NK.to(shape.weight_dtype)

    def seconds_of_step(self) -> float:
        """Measure the weights once, and forward and backward for each micro-batch."""
        self._send_weights()  # first calls set up buffers and connections
        self._forward_and_backward()
        seconds = self._time(self._send_weights)
        seconds += self._shape.num_micro_batches * self._time(self._forward_and_backward)
        if self._shape.num_recomputations:
            seconds += self._shape.num_recomputations * self._time(self._forward)
        return seconds

    def _time(self, transfer: Callable[[], None]) -> float:
        """Seconds until it is done on every rank."""
        self._meet()
        began = time.perf_counter()
        transfer()
        self._transport.finish_sending()
        self._meet()
        return time.perf_counter() - began

    def _meet(self) -> None:
        all_reduce(torch.zeros(1, device=self._shape.device), self._transport.process_group)
        synchronize(self._shape.device)

    def _send_weights(self) -> None:
        self._send_out(self._w_NK, "w")

    def _forward(self) -> None:
        if not self._shape.is_column_parallel:
            self._send_out(self._x_TK, "x")
        if self._shape.is_column_parallel or not self._transport.merges:
            if self._is_owner:
                expected = self._transport.expect_addends(self._route, tuple(self._y_TN.shape), self._y_TN)
                self._transport.add_up(self._route, self._y_TN, expected).wait()
            else:
                self._transport.give(self._route, self._y_TN, "y")

    def _forward_and_backward(self) -> None:
        self._forward()
        if self._shape.is_column_parallel:
            self._transport.send_whole(self._route, self._y_TN, self._shape.num_outputs).wait()
        if not self._shape.is_column_parallel or not self._transport.merges:
            self._return_slice(self._x_TK, "dx")
        self._return_slice(self._dw_NK, "dw")

    def _send_out(self, matrix: Tensor, name: str) -> None:
        packed = matrix.index_select(1, self._columns) if self._is_owner else None
        self._transport.send_slice(self._route, packed, len(matrix), matrix, name).wait()

    def _return_slice(self, matrix: Tensor, name: str) -> None:
        part = None if self._is_owner else matrix.index_select(1, self._columns)
        self._transport.return_slice(self._route, part, len(matrix), matrix, name).wait()
