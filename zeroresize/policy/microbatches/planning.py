"""Plans one iteration: micro-batches, replicas, schedule, messages; proven free of deadlock (DynaPipe).

``N`` samples, ``A`` lengths of each, ``D`` replicas, ``S`` stages, ``M`` micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zeroresize.policy import ROUNDING
from zeroresize.policy.microbatches.costs import LongerThanMeasuredError, Prices, StageCosts
from zeroresize.policy.microbatches.cuts import micro_batches
from zeroresize.policy.microbatches.plan import (
    NUM_CLUSTERS,
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
    whole_lengths,
)
from zeroresize.runtime.instructions import check, planned_instructions
from zeroresize.runtime.schedules import Operation, adaptive_orders, orders_of, peak_bytes
from zeroresize.runtime.simulated_steps import step_seconds


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
    try:
        lengths = whole_lengths(lengths_NA)
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
    """The best of all ways of recomputation, with their order as it is; then with clusters permuted, if that helps."""
    best: _Choice | None = None
    failure: DoesNotFitError | None = None
    for recomputation, of_way in costs.items():
        try:
            for microbatches in micro_batches(lengths_NA, of_way, options):
                replicas = replica_plans(microbatches, of_way, options, num_clusters=1)
                if replicas is not None:
                    best = _shorter(best, _Choice(recomputation, microbatches, replicas))
            if best is None:
                raise DoesNotFitError(_why_not(microbatches, of_way, options))
        except DoesNotFitError as error:
            failure = failure or error
    if best is None:
        assert failure is not None
        raise failure
    permuted = replica_plans(best.microbatches, costs[best.recomputation], options)
    return best if permuted is None else _shorter(best, replace(best, replicas=permuted))


def _shorter(best: _Choice | None, other: _Choice) -> _Choice:
    return other if best is None or other.expected_s < best.expected_s else best


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
    if not np.isfinite(np.stack(prices[:-1])).all():
        return None
    slowness_DS = options.slowness_DS(costs.num_stages)
    plans = []
    for members, slowness_S in zip(shared_by_stages(prices.seconds, slowness_DS), slowness_DS, strict=True):
        if not members:
            nothing: tuple[tuple[()], ...] = ((),) * costs.num_stages
            plans.append(ReplicaPlan((), nothing, 0.0, (0.0,) * costs.num_stages))
            continue
        of_members = Prices(*(values[members] for values in prices))
        forward_s, backward_s = of_members.forward_s * slowness_S, of_members.backward_s * slowness_S
        chosen = shortest_schedule(
            of_members._replace(forward_s=forward_s, backward_s=backward_s),
            options.memory_limit,
            schedule=options.schedule,
            num_clusters=options.num_clusters if num_clusters is None else num_clusters,
        )
        if chosen is None:
            return None
        stages = planned_instructions(chosen.orders, forward_s, backward_s)
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
    return shared(seconds_M, paces_D)


def shared(seconds_M: Sequence[float] | Floats, slowness_D: Sequence[float]) -> list[list[int]]:
    """Return [D] the numbers of the micro-batches of each replica, ascending, by their seconds [M] and each one's χ.

    Each micro-batch, the longest first, goes to the replica that is done with it first.
    """
    seconds, slowness = np.asarray(seconds_M, dtype=np.float64), np.asarray(slowness_D, dtype=np.float64)
    parts: list[list[int]] = [[] for _ in slowness]
    loads = np.zeros(len(parts))
    for member in np.argsort(-seconds, kind="stable").tolist():
        replica = int(((loads + seconds[member]) * slowness).argmin())
        parts[replica].append(member)
        loads[replica] += seconds[member]
    return list(map(sorted, parts))


class ChosenSchedule(NamedTuple):
    """Holds a schedule of a step: [S] forwards and backwards, seconds without messages, and [S] bytes at most."""

    orders: Sequence[Sequence[Operation]]
    step_s: float
    peak_bytes: Floats


def shortest_schedule(
    prices: Prices, memory_limit: float, *, schedule: ScheduleName = "adaptive", num_clusters: int = NUM_CLUSTERS
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
            if (peaks > memory_limit * (1.0 + ROUNDING)).any():
                continue
            step_s = step_seconds(option, forward_s, backward_s)
            if best is None or step_s < best.step_s * (1.0 - ROUNDING):
                named = [[Operation(is_forward, int(order[number])) for is_forward, number in each] for each in option]
                best = ChosenSchedule(named, step_s, peaks)
    return best


def _orders_of_clusters(seconds_M: Floats, num_clusters: int) -> Iterator[Indices]:
    """The micro-batches as they are, or, by rising seconds, in so many clusters of about as many, in every order."""
    if num_clusters == 1:
        yield np.arange(len(seconds_M))
        return
    clusters = np.array_split(np.argsort(seconds_M, kind="stable"), min(num_clusters, len(seconds_M)))
    yield from map(np.concatenate, itertools.permutations(map(np.sort, clusters)))
