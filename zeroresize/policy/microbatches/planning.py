"""Plans one iteration: micro-batches, replicas, schedule, messages; proven free of deadlock (DynaPipe).

``N`` samples, ``A`` lengths of each, ``D`` replicas, ``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zeroresize.policy.microbatches.costs import LongerThanMeasuredError, Prices, StageCosts
from zeroresize.policy.microbatches.cuts import micro_batches
from zeroresize.policy.microbatches.plan import (
    DoesNotFitError,
    Floats,
    Indices,
    IterationPlan,
    MicroBatch,
    PlanningOptions,
    ReplicaPlan,
    ScheduleName,
    batch_fingerprint,
    shapes_of,
)
from zeroresize.runtime.instructions import check, planned_instructions
from zeroresize.runtime.schedules import Operation, adaptive_orders, orders_of, peak_bytes
from zeroresize.runtime.simulated_steps import step_seconds

#: Of so many choices of micro-batches, the best with their order as it is, clusters are permuted.
_PERMUTED = 3
#: Gains below this share are rounding.
_LEAST_GAIN = 1e-9


def plan_iteration(
    iteration: int,
    lengths_NA: Indices,
    costs: Mapping[str, StageCosts],
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
    try:
        _require_plannable(lengths, costs)
        chosen = _shortest(lengths, costs, options)
    except DoesNotFitError as error:
        raise DoesNotFitError(f"iteration {iteration}: {error}") from error
    except ValueError as error:
        raise ValueError(f"iteration {iteration}: {error}") from error
    for replica in chosen.replicas:
        if replica.microbatches:
            check(replica.stages, len(replica.microbatches))
    return IterationPlan(iteration, model, batch_fingerprint(lengths), chosen.recomputation, tuple(chosen.replicas))


@dataclass(frozen=True)
class _Choice:
    recomputation: str
    microbatches: Sequence[MicroBatch]
    replicas: Sequence[ReplicaPlan]

    @property
    def expected_s(self) -> float:
        return max(replica.expected_s for replica in self.replicas)


def _shortest(lengths_NA: Indices, costs: Mapping[str, StageCosts], options: PlanningOptions) -> _Choice:
    """The best of all ways of recomputation, with their order as it is; then of a few with clusters permuted."""
    best: list[_Choice] = []
    failure: DoesNotFitError | None = None
    for recomputation, of_way in costs.items():
        try:
            for microbatches in micro_batches(lengths_NA, of_way, options):
                if len(best) == _PERMUTED and _least_s(microbatches, of_way, options) >= best[0].expected_s:
                    continue
                replicas = replica_plans(microbatches, of_way, options, num_clusters=1)
                if replicas is not None:
                    best.append(_Choice(recomputation, microbatches, replicas))
                    best = sorted(best, key=lambda choice: choice.expected_s)[:_PERMUTED]
            if not best:
                raise DoesNotFitError(_why_not(microbatches, of_way, options))
        except DoesNotFitError as error:
            failure = failure or error
    if failure is not None and not best:
        raise failure
    for choice in list(best) if options.num_clusters > 1 else ():
        replicas = replica_plans(choice.microbatches, costs[choice.recomputation], options)
        if replicas is not None:
            best.append(_Choice(choice.recomputation, choice.microbatches, replicas))
    return min(best, key=lambda choice: choice.expected_s)


def _least_s(microbatches: Sequence[MicroBatch], costs: StageCosts, options: PlanningOptions) -> float:
    """No schedule is shorter: every stage has to do its work, which replicas share by their speeds."""
    work_S = costs.prices(*shapes_of(microbatches)).seconds.sum(axis=0)
    return float((work_S / (1.0 / options.slowness_DS(costs.num_stages)).sum(axis=0)).max())


def _why_not(microbatches: Sequence[MicroBatch], costs: StageCosts, options: PlanningOptions) -> str:
    sizes, lengths_MA = shapes_of(microbatches)
    kept = costs.prices(sizes, lengths_MA).activation_bytes.max(axis=1)
    largest = int(kept.argmax())
    return (
        f"micro-batches by method={options.method!r} do not fit into memory_limit={options.memory_limit:.0f} bytes, or "
        f"were never measured: the largest, {sizes[largest]} rows of {lengths_MA[largest].tolist()} tokens, keeps "
        f"{kept[largest]:.0f} on a stage, and several are under way under schedule={options.schedule!r}"
    )


def _require_plannable(lengths_NA: Indices, costs: Mapping[str, StageCosts]) -> None:
    if not costs:
        raise ValueError("costs of no way of recomputation are given: at least one is needed")
    if lengths_NA.ndim != 2 or not len(lengths_NA) or not lengths_NA.shape[1]:
        raise ValueError(
            f"lengths of shape {lengths_NA.shape} are no samples: [samples, 1 or 2] are needed, with a sample"
        )
    short = np.flatnonzero((lengths_NA < 1).any(axis=1))
    if len(short):
        raise ValueError(
            f"sample {short[0]} has lengths {lengths_NA[short[0]].tolist()}: at least 1 token each is needed"
        )
    for of_way in costs.values():
        try:
            of_way.prices(np.ones(len(lengths_NA), dtype=np.int64), lengths_NA)
        except LongerThanMeasuredError as error:
            raise ValueError(
                f"sample {error.row} of {lengths_NA[error.row].tolist()} tokens is longer than what was measured, at "
                f"most {error.most}: measure costs up to the longest sample (longest= of ProfiledShapes), or cut or "
                "drop such samples"
            ) from error


def replica_plans(
    microbatches: Sequence[MicroBatch],
    costs: StageCosts,
    options: PlanningOptions,
    *,
    num_clusters: int | None = None,
) -> list[ReplicaPlan] | None:
    """Return [D] plans of these micro-batches; None where those of a replica do not fit, or were never measured."""
    prices = costs.prices(*shapes_of(microbatches))
    if not np.isfinite(np.stack(prices[:3])).all():
        return None
    slowness_DS = options.slowness_DS(costs.num_stages)
    plans = []
    for members, slowness_S in zip(shared_by_stages(prices.seconds, slowness_DS), slowness_DS, strict=True):
        if not members:
            nothing: tuple[tuple[()], ...] = ((),) * costs.num_stages
            plans.append(ReplicaPlan((), nothing, 0.0, (0.0,) * costs.num_stages))
            continue
        of_members = Prices(*(values[members] for values in prices))
        of_members = of_members._replace(
            forward_s=of_members.forward_s * slowness_S, backward_s=of_members.backward_s * slowness_S
        )
        chosen = shortest_schedule(
            of_members,
            options.memory_limit,
            schedule=options.schedule,
            num_clusters=options.num_clusters if num_clusters is None else num_clusters,
        )
        if chosen is None:
            return None
        stages = planned_instructions(chosen.orders, of_members.forward_s, of_members.backward_s)
        of_replica = tuple(microbatches[member] for member in members)
        plans.append(
            ReplicaPlan(of_replica, tuple(map(tuple, stages)), chosen.step_s, tuple(chosen.peak_bytes.tolist()))
        )
    return plans


def shared_by_stages(stage_s: Floats, slowness_DS: Floats) -> list[list[int]]:
    """Return [D] the micro-batches of each replica, by [M, S] seconds and [D, S] χ, as :func:`shared` does.

    A micro-batch takes what it does on its replica's slowest stage.
    """
    seconds_M = stage_s.max(axis=1)
    total_s = float(seconds_M.sum()) or 1.0
    paces_D = [float((stage_s * slowness_S).max(axis=1).sum()) / total_s or 1.0 for slowness_S in slowness_DS]
    return shared(seconds_M, paces_D, float(stage_s.shape[1] - 1))


def shared(seconds_M: Sequence[float] | Floats, slowness_D: Sequence[float], fill: float = 0.0) -> list[list[int]]:
    """Return [D] the numbers of the micro-batches of each replica, ascending, by their seconds [M] and each one's χ.

    Each micro-batch, the longest first, goes to the replica that is done with it first. Then micro-batches of the
    slowest replica are moved and exchanged, the best first, while that makes it faster. A replica's longest micro-batch
    counts ``fill`` times besides, as its pipeline fills and drains.
    """
    seconds = np.asarray(seconds_M, dtype=np.float64)
    parts: list[list[int]] = [[] for _ in slowness_D]
    loads = np.zeros(len(parts))
    slowness = np.asarray(slowness_D, dtype=np.float64)
    for member in np.argsort(-seconds, kind="stable").tolist():
        replica = int(((loads + seconds[member]) * slowness).argmin())
        parts[replica].append(member)
        loads[replica] += seconds[member]
    for _ in range(2 * len(seconds)):
        if not _improve(parts, seconds, slowness, fill):
            break
    return [sorted(part) for part in parts]


def _improve(parts: list[list[int]], seconds_M: Floats, slowness_D: Floats, fill: float) -> bool:
    """Move a micro-batch of the slowest replica, or exchange it for another; whether that made it faster."""
    sums, most, without = zip(*(_with_and_without(seconds_M[part]) for part in parts), strict=True)
    times = slowness_D * (np.array(sums) + fill * np.array(most))
    slowest = int(times.argmax())
    given_G = seconds_M[parts[slowest]]
    best_s, chosen = float(times[slowest]) * (1.0 - _LEAST_GAIN), None
    for other, part in enumerate(parts):
        if other == slowest or not len(given_G):
            continue
        taken_T = np.append(0.0, seconds_M[part])  # nothing is taken, or one micro-batch
        rest_T = np.append(most[other], without[other])
        left_GT = sums[slowest] - given_G[:, None] + taken_T
        left_GT = left_GT + fill * np.maximum(without[slowest][:, None], taken_T)
        grown_GT = sums[other] - taken_T + given_G[:, None] + fill * np.maximum(rest_T, given_G[:, None])
        slower_GT = np.maximum(slowness_D[slowest] * left_GT, slowness_D[other] * grown_GT)
        given, taken = divmod(int(slower_GT.argmin()), len(taken_T))
        if slower_GT[given, taken] < best_s:
            best_s, chosen = float(slower_GT[given, taken]), (other, given, taken)
    if chosen is None:
        return False
    other, given, taken = chosen
    parts[other].append(parts[slowest].pop(given))
    if taken:
        parts[slowest].append(parts[other].pop(taken - 1))
    return True


def _with_and_without(seconds_M: Floats) -> tuple[float, float, Floats]:
    """The seconds of all, of the longest, and [M] of the longest without each."""
    second_s, most_s = np.sort(np.append(seconds_M, [0.0, 0.0]))[-2:].tolist()
    return float(seconds_M.sum()), most_s, np.where(seconds_M >= most_s, second_s, most_s)


class ChosenSchedule(NamedTuple):
    """Holds a schedule of a step: [S] forwards and backwards, seconds without messages, and [S] bytes at most."""

    orders: Sequence[Sequence[Operation]]
    step_s: float
    peak_bytes: Floats


def shortest_schedule(
    prices: Prices, memory_limit: float, *, schedule: ScheduleName = "adaptive", num_clusters: int = 3
) -> ChosenSchedule | None:
    """Return the shortest schedule that keeps within memory; None if there is none (DynaPipe, section 5).

    Micro-batches are put into clusters by the seconds that they take, and the clusters are run in every order; within
    one micro-batches keep theirs. Under "adaptive" as many micro-batches are under way as memory allows, or as there
    are stages, whichever is shorter.
    """
    num_microbatches, num_stages = prices.forward_s.shape
    if (prices.activation_bytes + prices.workspace_bytes > memory_limit).any():
        return None
    limits = [memory_limit] * num_stages
    best: ChosenSchedule | None = None
    for order in _orders_of_clusters(prices.seconds.max(axis=1), num_clusters):
        forward_s, backward_s, kept, workspace = (values[order] for values in prices)
        options = [orders_of("1f1b", num_stages, num_microbatches)]
        if schedule == "adaptive" and num_stages > 1:
            options += [adaptive_orders(kept, limits, most, workspace) for most in (None, num_stages)]
        for option in options:
            peaks = peak_bytes(option, kept, workspace)
            if (peaks > memory_limit * (1.0 + _LEAST_GAIN)).any():
                continue
            step_s = step_seconds(option, forward_s, backward_s)
            if best is None or step_s < best.step_s * (1.0 - _LEAST_GAIN):
                named = [[Operation(is_forward, int(order[number])) for is_forward, number in each] for each in option]
                best = ChosenSchedule(named, step_s, peaks)
    return best


def _orders_of_clusters(seconds_M: Floats, num_clusters: int) -> Iterator[Indices]:
    if num_clusters == 1:
        yield np.arange(len(seconds_M))
        return
    cluster_of = clusters_of(seconds_M, num_clusters)
    members = [np.flatnonzero(cluster_of == number) for number in range(int(cluster_of.max()) + 1)]
    yield from map(np.concatenate, itertools.permutations(members))


def clusters_of(values: Floats, num_clusters: int) -> Indices:
    """Return [M] the cluster of each value, by rising values: those whose values differ least from their means.

    The sum of squared differences is the least possible, by dynamic programming over the sorted values.
    """
    order, sorted_values = np.argsort(values, kind="stable"), np.sort(values)
    sums, squares = (np.concatenate([[0.0], np.cumsum(sorted_values**power)]) for power in (1, 2))
    begins, ends = np.meshgrid(*[np.arange(len(values) + 1)] * 2, indexing="ij")
    spread = squares[ends] - squares[begins] - (sums[ends] - sums[begins]) ** 2 / np.maximum(ends - begins, 1)
    spread[ends <= begins] = np.inf
    least, cuts = np.where(np.arange(len(values) + 1) == 0, 0.0, np.inf), []
    for _ in range(min(num_clusters, len(np.unique(values)))):
        cuts.append((least[:, None] + spread).argmin(axis=0))
        least = (least[:, None] + spread).min(axis=0)
    cluster_of = np.zeros(len(values), dtype=np.int64)
    end = len(values)
    for number in reversed(range(len(cuts))):
        begin = int(cuts[number][end])
        cluster_of[order[begin:end]] = number
        end = begin
    return cluster_of
