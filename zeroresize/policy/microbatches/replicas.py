"""Which replica trains which micro-batches, so that all are done at one time, and how (DynaPipe, section 4).

``M`` micro-batches, ``D`` replicas, ``S`` stages. A replica that is χ times as slow takes χ times as long.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from zeroresize.policy.microbatches.iteration_plan import ReplicaPlan
from zeroresize.policy.microbatches.micro_batch import Floats, MicroBatch, MicroBatchCosts, shapes_of
from zeroresize.policy.microbatches.planning_options import PlanningOptions
from zeroresize.policy.microbatches.schedule_choice import shortest_schedule
from zeroresize.runtime.communication import planned_instructions

#: Gains below this share of the slowest replica's time are rounding.
_LEAST_GAIN = 1e-9


def replica_plans(
    microbatches: Sequence[MicroBatch], costs: MicroBatchCosts, options: PlanningOptions
) -> list[ReplicaPlan] | None:
    """Return [D] plans of these micro-batches; None where those of a replica do not fit, or were never measured."""
    sizes, lengths_MA = shapes_of(microbatches)
    forward_s, backward_s, activation_bytes, workspace_bytes = costs.prices(sizes, lengths_MA)
    if not (np.isfinite(forward_s) & np.isfinite(backward_s) & np.isfinite(activation_bytes)).all():
        return None
    slowness_DS = options.slowness_DS(costs.num_stages)
    plans = []
    for members, slowness_S in zip(shared_by_stages(forward_s + backward_s, slowness_DS), slowness_DS, strict=True):
        if not members:
            nothing: tuple[tuple[()], ...] = ((),) * costs.num_stages
            plans.append(ReplicaPlan((), nothing, 0.0, (0.0,) * costs.num_stages))
            continue
        chosen = shortest_schedule(
            forward_s[members] * slowness_S,
            backward_s[members] * slowness_S,
            activation_bytes[members],
            [options.memory_limit] * costs.num_stages,
            workspace_bytes[members],
            schedule=options.schedule,
            num_clusters=options.num_clusters,
        )
        if chosen is None:
            return None
        stages = planned_instructions(chosen.orders, forward_s[members] * slowness_S, backward_s[members] * slowness_S)
        plans.append(
            ReplicaPlan(
                tuple(microbatches[member] for member in members),
                tuple(map(tuple, stages)),
                chosen.step_s,
                tuple(chosen.peak_bytes.tolist()),
            )
        )
    return plans


def shared(seconds_M: Sequence[float] | Floats, slowness_D: Sequence[float], fill: float = 0.0) -> list[list[int]]:
    """Return [D] the numbers of the micro-batches of each replica, ascending; a replica may have none.

    The largest differencing method of Karmarkar and Karp brings replicas of one speed close together. Of replicas whose
    speeds differ, each micro-batch, the longest first, goes to the one that is done with it first. The better of the
    two is improved by moving and exchanging micro-batches of the slowest replica while that makes it faster.

    Args:
        seconds_M: of each micro-batch on a replica that is not slow.
        slowness_D: χ of each replica.
        fill: times that a replica's longest micro-batch counts besides, as its pipeline fills and drains.

    Raises:
        ValueError: for no replicas, or a slowness that is not above 0.
    """
    if not len(slowness_D) or min(slowness_D) <= 0.0:
        raise ValueError(f"slowness_D={list(slowness_D)} is not allowed: one number above 0 is needed for each replica")
    seconds = np.asarray(seconds_M, dtype=np.float64).tolist()
    slowness = [float(factor) for factor in slowness_D]
    parts = karmarkar_karp(seconds, len(slowness))
    by_load = sorted(parts, key=lambda part: sum(seconds[number] for number in part))
    fastest_last = sorted(range(len(slowness)), key=lambda replica: -slowness[replica])
    differenced: list[list[int]] = [[] for _ in slowness]
    for replica, part in zip(fastest_last, by_load, strict=True):
        differenced[replica] = part
    options = [
        _improved(option, seconds, slowness, fill) for option in (differenced, _longest_first(seconds, slowness))
    ]
    best = min(options, key=lambda option: _slowest_s(option, seconds, slowness, fill))
    return [sorted(part) for part in best]


def shared_by_stages(stage_s: Floats, slowness_DS: Floats) -> list[list[int]]:
    """Return [D] the numbers of the micro-batches of each replica, as :func:`shared` does.

    A micro-batch takes what it does on its replica's slowest stage.

    Args:
        stage_s: [M, S] of each micro-batch on each stage that is not slow.
        slowness_DS: [D, S] χ of each stage of each replica.
    """
    seconds_M = stage_s.max(axis=1)
    if not seconds_M.any():
        return shared(seconds_M, [1.0] * len(slowness_DS))
    paces_D = [float((stage_s * slowness_S).max(axis=1).sum() / seconds_M.sum()) for slowness_S in slowness_DS]
    return shared(seconds_M, paces_D, float(stage_s.shape[1] - 1))


def karmarkar_karp(values: Sequence[float], num_parts: int) -> list[list[int]]:
    """Return the numbers of the values in each part, whose sums are close, by the largest differencing method.

    Each value begins as a tuple of parts, of which all but one are empty. The two tuples whose sums differ most are put
    together, the largest part of one with the smallest of the other, until one tuple is left (Karmarkar and Karp,
    1982).
    """
    tuples = []
    for number, value in enumerate(values):
        sums = [0.0] * (num_parts - 1) + [float(value)]
        parts: list[list[int]] = [[] for _ in range(num_parts - 1)] + [[number]]
        tuples.append((-(sums[-1] - sums[0]), number, sums, parts))
    if not tuples:
        return [[] for _ in range(num_parts)]
    heapq.heapify(tuples)
    for count in itertools.count(len(tuples)):
        _, _, sums, parts = heapq.heappop(tuples)
        if not tuples:
            return parts
        _, _, other_sums, other_parts = heapq.heappop(tuples)
        joined = sorted(
            (
                (total + other, [*part, *other_part])
                for total, part, other, other_part in zip(
                    sums, parts, reversed(other_sums), reversed(other_parts), strict=True
                )
            ),
            key=lambda entry: entry[0],
        )
        totals = [total for total, _ in joined]
        heapq.heappush(tuples, (-(totals[-1] - totals[0]), count, totals, [part for _, part in joined]))
    raise AssertionError("unreachable: counting never ends")


def _longest_first(seconds: Sequence[float], slowness: Sequence[float]) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in slowness]
    loads = [0.0] * len(slowness)
    for number in sorted(range(len(seconds)), key=lambda number: -seconds[number]):
        replica = min(range(len(slowness)), key=lambda replica: (loads[replica] + seconds[number]) * slowness[replica])
        parts[replica].append(number)
        loads[replica] += seconds[number]
    return parts


def _replica_s(part: Sequence[int], seconds: Sequence[float], slowness: float, fill: float) -> float:
    of_part = [seconds[number] for number in part]
    return slowness * (sum(of_part) + fill * max(of_part, default=0.0))


def _slowest_s(
    parts: Sequence[Sequence[int]], seconds: Sequence[float], slowness: Sequence[float], fill: float
) -> float:
    return max(_replica_s(part, seconds, factor, fill) for part, factor in zip(parts, slowness, strict=True))


def _improved(
    parts: Sequence[Sequence[int]], seconds: Sequence[float], slowness: Sequence[float], fill: float
) -> list[list[int]]:
    """By moves and exchanges of the slowest replica's micro-batches, the best first, while one helps."""
    now = [list(part) for part in parts]
    for _ in range(2 * len(seconds)):
        times = [_replica_s(part, seconds, factor, fill) for part, factor in zip(now, slowness, strict=True)]
        slowest = max(range(len(now)), key=times.__getitem__)
        total_s, given_G, longest_G, _ = _without_each(now[slowest], seconds)
        best_s, chosen = times[slowest] * (1.0 - _LEAST_GAIN), (-1, 0, 0)
        for other in range(len(now)):
            if other == slowest or not len(given_G):
                continue
            other_s, taken_T, longest_T, most_s = _without_each(now[other], seconds)
            taken_T, longest_T = np.append(0.0, taken_T), np.append(most_s, longest_T)  # nothing is taken, or one is
            left_GT = total_s - given_G[:, None] + taken_T + fill * np.maximum(longest_G[:, None], taken_T)
            grown_GT = other_s - taken_T + given_G[:, None] + fill * np.maximum(longest_T, given_G[:, None])
            larger_GT = np.maximum(slowness[slowest] * left_GT, slowness[other] * grown_GT)
            larger_GT[:, 1:][taken_T[1:] >= given_G[:, None]] = np.inf
            given, taken = divmod(int(larger_GT.argmin()), len(taken_T))
            if larger_GT[given, taken] < best_s:
                best_s, chosen = float(larger_GT[given, taken]), (other, given, taken)
        other, given, taken = chosen
        if other < 0:
            break
        now[other].append(now[slowest].pop(given))
        if taken:
            now[slowest].append(now[other].pop(taken - 1))
    return now


def _without_each(part: Sequence[int], seconds: Sequence[float]) -> tuple[float, Floats, Floats, float]:
    """The seconds of all micro-batches, of each, of the longest without each, and of the longest of all."""
    seconds_M = np.array([seconds[number] for number in part], dtype=np.float64)
    second_s, most_s = np.sort(np.append([0.0, 0.0], seconds_M))[-2:].tolist()
    longest_M: Floats = np.where(seconds_M >= most_s, second_s, most_s)
    return sum(seconds_M.tolist()), seconds_M, longest_M, most_s
