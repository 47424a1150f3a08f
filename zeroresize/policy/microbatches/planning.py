"""Plans one iteration: micro-batches, replicas, schedule, messages; proven free of deadlock (DynaPipe).

``N`` samples, ``A`` lengths of each, ``D`` replicas, ``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping

import numpy as np

from zeroresize.policy.microbatches.baselines import of_equal_tokens, of_fixed_size, packed
from zeroresize.policy.microbatches.iteration_plan import IterationPlan, ReplicaPlan
from zeroresize.policy.microbatches.micro_batch import Floats, Indices, MicroBatch, MicroBatchCosts, Prices, shapes_of
from zeroresize.policy.microbatches.partition import Cuts, Segments, shortest_cuts
from zeroresize.policy.microbatches.planning_options import DoesNotFitError, PlanningOptions
from zeroresize.policy.microbatches.replica_plans import replica_plans
from zeroresize.policy.microbatches.sample_order import ordered
from zeroresize.runtime.check import check

#: Of fewer micro-batches for each replica, finer partitions are tried, whose longest takes these parts of the time.
_FEW_EACH, _FINER = 8, (0.75, 0.5, 0.25, 0.0)
#: Micro-batches under way at once for which partitions are made, in parts of the stages.
_UNDER_WAY = (0.25, 0.5, 0.75, 1.0)


def plan_iteration(
    iteration: int,
    lengths_NA: Indices,
    costs: Mapping[str, MicroBatchCosts],
    options: PlanningOptions,
    *,
    model: str = "",
) -> IterationPlan:
    """Return the plan of one iteration.

    Each way of recomputation is planned for; of those that fit, the one whose iteration is shortest is taken, so memory
    is spent where it saves time (DynaPipe, section 7, dynamic recomputation). Every plan is checked before it is
    returned.

    Args:
        lengths_NA: tokens of the samples, in their order in the mini-batch.
        costs: by the names of what is computed again.
        model: fingerprint of what the plan is for.

    Raises:
        ValueError: for no samples, lengths below 1, costs of nothing, and a sample that is longer than what was
            measured, naming it.
        DoesNotFitError: for a sample that does not fit, naming it and the limit, or micro-batches of a fixed size that
            do not.
    """
    lengths = np.asarray(lengths_NA, dtype=np.int64)
    _require_samples(iteration, lengths)
    if not costs:
        raise ValueError("costs of no way of recomputation are given: at least one is needed")
    best: IterationPlan | None = None
    failure: DoesNotFitError | None = None
    for recomputation, of_way in costs.items():
        try:
            replicas = _replicas(lengths, of_way, options)
        except DoesNotFitError as error:
            failure = failure or error
            continue
        except ValueError as error:
            raise ValueError(f"iteration {iteration}: {error}") from error
        plan = IterationPlan(iteration, model, batch_fingerprint(lengths), recomputation, tuple(replicas))
        if best is None or plan.expected_s < best.expected_s:
            best = plan
    if best is None:
        assert failure is not None
        raise DoesNotFitError(f"iteration {iteration}: {failure}") from failure
    for replica in best.replicas:
        if replica.microbatches:
            check(replica.stages, len(replica.microbatches))
    return best


def batch_fingerprint(lengths_NA: Indices) -> str:
    """Return a digest of the samples' lengths in their order."""
    lengths = np.ascontiguousarray(lengths_NA, dtype="<i8")
    return hashlib.blake2b(repr(lengths.shape).encode() + lengths.tobytes(), digest_size=16).hexdigest()


def microbatches_of(lengths_NA: Indices, costs: MicroBatchCosts, options: PlanningOptions) -> list[MicroBatch]:
    """Return the micro-batches of all replicas together.

    Raises:
        DoesNotFitError: for a sample that alone does not fit, naming it.
        ValueError: as the costs.
    """
    if options.method == "packing":
        return packed(lengths_NA, options.row_lengths, options.size)
    order = ordered(lengths_NA, options.order)
    if options.method == "fixed":
        return of_fixed_size(lengths_NA, order, options.size)
    if options.method == "tokens":
        return of_equal_tokens(lengths_NA, order, options.size)
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
    best: tuple[float, list[MicroBatch]] | None = None
    fill = fill_of(costs, lengths_NA, slowness_S)
    for place in range(len(under_way)):
        of_limit = segments.within(options.memory_limit, place)
        for cuts in _cuts(of_limit, fill, options.num_replicas):
            bounds = itertools.pairwise((0, *cuts.ends))
            microbatches = [MicroBatch.of(order[begin:end], lengths_NA) for begin, end in bounds]
            replicas = replica_plans(microbatches, costs, options)
            if replicas is None:
                continue
            expected_s = max(replica.expected_s for replica in replicas)
            if best is None or expected_s < best[0]:
                best = expected_s, microbatches
    if best is None:
        raise DoesNotFitError(f"no micro-batches fit under schedule={options.schedule!r}")
    return best[1]


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
    kept_S = np.minimum(under_way, num_stages - np.arange(num_stages))
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


def _replicas(lengths_NA: Indices, costs: MicroBatchCosts, options: PlanningOptions) -> list[ReplicaPlan]:
    microbatches = microbatches_of(lengths_NA, costs, options)
    replicas = replica_plans(microbatches, costs, options)
    if replicas is None:
        sizes, lengths_MA = shapes_of(microbatches)
        kept = costs.prices(sizes, lengths_MA).activation_bytes.max(axis=1)
        largest = int(kept.argmax())
        raise DoesNotFitError(
            f"micro-batches by method={options.method!r} do not fit into memory_limit={options.memory_limit:.0f} "
            f"bytes: the largest, {sizes[largest]} rows of {lengths_MA[largest].tolist()} tokens, keeps "
            f"{kept[largest]:.0f} on a stage, and several are under way under schedule={options.schedule!r}"
        )
    return replicas


def _require_samples(iteration: int, lengths_NA: Indices) -> None:
    if lengths_NA.ndim != 2 or not len(lengths_NA) or not lengths_NA.shape[1]:
        raise ValueError(
            f"iteration {iteration}: lengths of shape {lengths_NA.shape} are no samples: [samples, 1 or 2] are needed, "
            "with at least one sample"
        )
    short = np.flatnonzero((lengths_NA < 1).any(axis=1))
    if len(short):
        raise ValueError(
            f"iteration {iteration}: sample {short[0]} has lengths {lengths_NA[short[0]].tolist()}: at least 1 token "
            "each is needed"
        )
