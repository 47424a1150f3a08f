"""Which micro-batches of a mini-batch are worth a look: partitions by dynamic programming, for several uses of memory.

``N`` samples, ``A`` lengths of each, ``K`` micro-batches, ``S`` stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from zeroresize.policy.microbatches.micro_batch import Floats, Indices, MicroBatch, MicroBatchCosts, Prices
from zeroresize.policy.microbatches.partition import Cuts, Segments, shortest_cuts
from zeroresize.policy.microbatches.planning_options import DoesNotFitError, PlanningOptions
from zeroresize.policy.microbatches.sample_order import ordered

#: Of fewer micro-batches for each replica, finer partitions are tried, whose longest takes these parts of the time.
_FEW_EACH, _FINER = 8, (0.75, 0.5, 0.25, 0.0)
#: Micro-batches like each that are under way at once in the memory there is, in parts of the stages. Beside a long
#: sample, which needs most of the memory, only short ones fit: so more than stages are looked at, too.
_UNDER_WAY = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)


def planned_micro_batches(
    lengths_NA: Indices, costs: MicroBatchCosts, options: PlanningOptions
) -> Iterator[list[MicroBatch]]:
    """Yield micro-batches of all replicas together; which are best, the schedule's length tells.

    Raises:
        DoesNotFitError: for a sample that alone does not fit, naming it.
        ValueError: as the costs.
    """
    order = ordered(lengths_NA, options.order)
    sorted_NA = lengths_NA[order]
    under_way = _under_way(costs.num_stages, options)
    slowness_S = options.slowness_DS(costs.num_stages).mean(axis=0)

    def prices_of(begins: Indices, ends: Indices) -> tuple[Floats, Floats]:
        prices = costs.prices(ends - begins, _longest(sorted_NA, begins, ends))
        needed = [_needed_bytes(prices, number) for number in under_way]
        return ((prices.forward_s + prices.backward_s) * slowness_S).max(axis=1), np.stack(needed)

    segments = Segments.of(len(order), prices_of, options.memory_limit)
    if not segments.has_partition:
        sample = int(order[int(np.flatnonzero(~np.isfinite(segments.seconds_KN[0, 1:]))[0])])
        raise DoesNotFitError(
            f"sample {sample} of {lengths_NA[sample].tolist()} tokens keeps more than memory_limit="
            f"{options.memory_limit:.0f} bytes of activations on a stage, or than what was measured"
        )
    fill = fill_of(costs, lengths_NA, slowness_S)
    seen: set[tuple[int, ...]] = set()
    for place in range(len(under_way)):
        of_limit = segments.within(options.memory_limit, place)
        for cuts in _cuts(of_limit, fill, options.num_replicas):
            if cuts.ends not in seen:
                seen.add(cuts.ends)
                bounds = itertools.pairwise((0, *cuts.ends))
                yield [MicroBatch.of(order[begin:end], lengths_NA) for begin, end in bounds]


def fill_of(costs: MicroBatchCosts, lengths_NA: Indices, slowness_S: Floats | float = 1.0) -> float:
    """Return what a pipeline's filling and draining takes, in times of the longest micro-batch on its slowest stage.

    With equal stages it is S − 1 (Eq. 1). Where stages differ, a micro-batch passes the others in less time than the
    slowest, so it is the sum of all stages' seconds over the slowest one's, less 1.

    Args:
        slowness_S: χ of each stage.
    """
    longest = lengths_NA[[int(lengths_NA.sum(axis=1).argmax())]]
    prices = costs.prices(np.ones(1, dtype=np.int64), longest)
    seconds = (prices.forward_s + prices.backward_s)[0] * slowness_S
    slowest = float(seconds.max())
    return float(seconds.sum()) / slowest - 1.0 if slowest > 0.0 else 0.0


def _cuts(segments: Segments, fill: float, num_replicas: int) -> Iterator[Cuts]:
    """Partitions to choose from: the best by the share that each replica has of all seconds, and finer ones.

    No replica has less than its share, and few long micro-batches leave some with more: then shorter ones are better.
    """
    cuts = shortest_cuts(segments, fill, num_replicas)
    yield cuts
    for part in _FINER if num_replicas > 1 and len(cuts.ends) < _FEW_EACH * num_replicas else ():
        shortest_s = float(segments.seconds_KN[0, 1:].max())  # of the longest sample alone
        finer = segments.no_longer_than(max(part * cuts.longest_s, shortest_s))
        if finer.has_partition:
            yield shortest_cuts(finer, fill, num_replicas)


def _under_way(num_stages: int, options: PlanningOptions) -> tuple[int, ...]:
    """Numbers of micro-batches under way at once for which partitions are made that fit, rising.

    The more there are, the less each may keep, and the less stages wait. Which is best, the schedule's length tells.
    """
    if math.isinf(options.memory_limit):
        return (1,)
    return tuple(sorted({math.ceil(num_stages * share) for share in _UNDER_WAY} | {1}))


def _needed_bytes(prices: Prices, under_way: int) -> Floats:
    """[K] of the stage that needs most while so many like each are under way: a later stage has its share of them."""
    num_stages = prices.activation_bytes.shape[1]
    behind_S = num_stages - np.arange(num_stages)  # a stage keeps as many as there are from it on, where all are used
    kept_S = np.minimum(under_way, behind_S * max(under_way / num_stages, 1.0))
    needed: Floats = (kept_S * prices.activation_bytes + prices.workspace_bytes).max(axis=1)
    return needed


def _longest(lengths_NA: Indices, begins: Indices, ends: Indices) -> Indices:
    """[K, A] the longest of the samples from each begin up to each end."""
    longest = np.empty((len(begins), lengths_NA.shape[1]), dtype=np.int64)
    for column in range(lengths_NA.shape[1]):
        levels = [lengths_NA[:, column]]
        while len(levels[-1]) > 1 << len(levels) - 1:
            half = 1 << len(levels) - 1
            levels.append(np.maximum(levels[-1][:-half], levels[-1][half:]))
        widths = np.log2(np.maximum(ends - begins, 1)).astype(np.int64)
        for level, values in enumerate(levels):
            chosen = np.flatnonzero(widths == level)
            last = ends[chosen] - (1 << level)
            longest[chosen, column] = np.maximum(values[begins[chosen]], values[last])
    return longest
