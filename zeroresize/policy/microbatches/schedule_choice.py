"""In which order stages run the micro-batches of a replica: the shortest of several schedules (DynaPipe, section 5).

``M`` micro-batches, ``S`` stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zeroresize.policy.microbatches.micro_batch import Floats, Indices
from zeroresize.runtime.schedules import Operation, adaptive_orders, orders_of, peak_bytes
from zeroresize.runtime.simulated_steps import step_seconds

#: "1f1b"; "adaptive": memory-aware cyclic scheduling, or 1F1B where that is shorter and fits.
ScheduleName = Literal["1f1b", "adaptive"]


@dataclass(frozen=True, eq=False)
class ChosenSchedule:
    """Describe a schedule of a step.

    Attributes:
        orders: [S] of forwards and backwards.
        step_s: expected seconds, without messages.
        peak_bytes: [S] of activations and workspace.
    """

    orders: Sequence[Sequence[Operation]]
    step_s: float
    peak_bytes: Floats


def shortest_schedule(
    forward_s: Floats,
    backward_s: Floats,
    activation_bytes: Floats,
    limits: Sequence[float],
    workspace_bytes: Floats | None = None,
    *,
    schedule: ScheduleName = "adaptive",
    num_clusters: int = 3,
) -> ChosenSchedule | None:
    """Return the shortest schedule that keeps within memory; None if there is none.

    Micro-batches are put into clusters by the seconds that they take, and the clusters are run in every order; within
    one micro-batches keep theirs. Under "adaptive" as many micro-batches are under way as memory allows, or as there
    are stages, whichever is shorter.

    Args:
        forward_s, backward_s, activation_bytes: [M, S].
        limits: [S] bytes of activations and workspace at most.
        workspace_bytes: [M, S] needed beside what is kept while a micro-batch runs; None for none.
        num_clusters: 1 for the order of the micro-batches as it is.
    """
    num_microbatches, num_stages = forward_s.shape
    workspace = np.zeros_like(activation_bytes) if workspace_bytes is None else workspace_bytes
    if (activation_bytes + workspace > np.asarray(limits)).any():
        return None
    best: ChosenSchedule | None = None
    for order in _orders_of_clusters((forward_s + backward_s).max(axis=1), num_clusters):
        of_order = [values[order] for values in (forward_s, backward_s, activation_bytes, workspace)]
        options = [orders_of("1f1b", num_stages, num_microbatches)]
        if schedule == "adaptive" and num_stages > 1:
            options.append(adaptive_orders(of_order[2], limits, None, of_order[3]))
            options.append(adaptive_orders(of_order[2], limits, num_stages, of_order[3]))
        for option in options:
            peaks = peak_bytes(option, of_order[2], of_order[3])
            if (peaks > np.asarray(limits) * (1.0 + 1e-9)).any():
                continue
            step_s = step_seconds(option, of_order[0], of_order[1])
            if best is None or step_s < best.step_s * (1.0 - 1e-9):
                named = [[Operation(is_forward, int(order[number])) for is_forward, number in each] for each in option]
                best = ChosenSchedule(named, step_s, peaks)
    return best


def clusters_of(values: Floats, num_clusters: int) -> Indices:
    """Return [M] the cluster of each value, by rising values: those whose values differ least from their means.

    The sum of squared differences is the least possible, by dynamic programming over the sorted values.
    """
    order = np.argsort(values, kind="stable")
    sorted_values = values[order]
    num_values = len(values)
    num_clusters = max(min(num_clusters, len(np.unique(values))), 1)
    sums, squares = (np.concatenate([[0.0], np.cumsum(sorted_values**power)]) for power in (1, 2))
    counts = np.arange(num_values + 1)
    begins, ends = np.meshgrid(counts, counts, indexing="ij")
    sizes = np.maximum(ends - begins, 1)
    spread = squares[None, :] - squares[:, None] - (sums[None, :] - sums[:, None]) ** 2 / sizes
    spread[ends <= begins] = np.inf
    least = np.full(num_values + 1, np.inf)
    least[0] = 0.0
    cuts: list[Indices] = []
    for _ in range(num_clusters):
        of_begin = least[:, None] + spread
        cuts.append(of_begin.argmin(axis=0))
        least = of_begin.min(axis=0)
    cluster_of = np.zeros(num_values, dtype=np.int64)
    end = num_values
    for number in range(num_clusters - 1, -1, -1):
        begin = int(cuts[number][end])
        cluster_of[order[begin:end]] = number
        end = begin
    return cluster_of


def _orders_of_clusters(seconds: Floats, num_clusters: int) -> Iterator[Indices]:
    if num_clusters <= 1 or len(seconds) < 2:
        yield np.arange(len(seconds))
        return
    cluster_of = clusters_of(seconds, num_clusters)
    members = [np.flatnonzero(cluster_of == number) for number in range(int(cluster_of.max()) + 1)]
    for permutation in itertools.permutations(members):
        yield np.concatenate(permutation)
