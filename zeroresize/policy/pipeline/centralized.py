"""Centralised balancing: the partition whose slowest stage is fastest, exactly.

By time or by parameters, whichever the costs of the load are (DynMo, section 3.3; it builds on DeepSpeed's partitioning
by binary search and linear probing). ``L`` layers, ``S`` stages.

With equal devices a stage that takes as many layers as it can never harms those after it. That fails where every stage
must have a layer and stages differ: the layer that then comes next may be too large for a slow or small stage, which
could have taken the one before. Probing therefore keeps all layers at which a stage may begin, as few ranges of
consecutive ones; with equal devices there is one range, and its end is the greedy choice.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.pipeline_load import NothingFitsError, PipelineLoad


def balanced_partition(load: PipelineLoad) -> Partition:
    """Return the partition with the fastest slowest stage, within the memory limits; exact but for rounding.

    Bisection on the slowest stage's time, each time probed by filling one stage after the other. Where a time can be
    kept the bisection goes on below the time that the found partition takes, else above the next time at which any
    stage could take one layer more; so it ends at the optimum itself, after about as many probes as a plain bisection
    (Pınar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", 2004, exact bisection). A probe
    takes S log L operations with equal devices.

    Raises:
        NothingFitsError: if no partition fits into the memory limits.
    """
    filler = StageFiller(load)
    best, _ = filler.partition_within(math.inf)
    if best is None:
        raise NothingFitsError(_what_is_missing(load))
    low = max(load.even_time, float((load.costs.max() / load.speeds + load.waits).min()))
    high = load.slowest(best)
    while low < high:
        level = (low + high) / 2
        if level >= high:
            level = low
        partition, next_level = filler.partition_within(level)
        if partition is None:
            low = max(next_level, math.nextafter(level, math.inf))
        else:
            best, high = partition, min(level, load.slowest(partition))
    return best


def _what_is_missing(load: PipelineLoad) -> str:
    """Where the layers come nearest to fitting, and what they need there."""
    limits = np.minimum(load.memory_limits, load.byte_sums[-1])
    nearest = balanced_partition(PipelineLoad.of(load.layer_bytes, load.num_stages, speeds=limits))
    sizes = load.stage_bytes(nearest)
    stage = int((sizes / limits).argmax())
    return (
        f"no partition of {load.num_layers} layers over {load.num_stages} stages fits into the memory limits: the "
        f"layers need {load.byte_sums[-1]:.0f} bytes in all, the largest {load.layer_bytes.max():.0f}, and the limits "
        f"are {load.memory_limits.sum():.0f} in all, the largest {load.memory_limits.max():.0f}; where they come "
        f"nearest stage {stage} needs {sizes[stage]:.0f} bytes and may hold {load.memory_limits[stage]:.0f}"
    )


class Run(NamedTuple):
    """Describe where a stage may begin and end.

    It may begin with the layers ``first`` to ``last``, and then end before those from first + 1 to ``end``.
    """

    first: int
    last: int
    end: int

    def begin_for(self, end: int) -> int | None:
        """Return with which layer the stage begins if it ends before layer ``end``, the last one possible."""
        return min(self.last, end - 1) if self.first < end <= self.end else None


class StageFiller:
    """Fill stages with layers within a time and the memory limits."""

    def __init__(self, load: PipelineLoad) -> None:
        self._load = load
        self._costs, self._sizes = load.cost_sums.tolist(), load.byte_sums.tolist()
        self._speeds, self._limits, self._waits = (
            values.tolist() for values in (load.speeds, load.memory_limits, load.waits)
        )
        self._largest_cost, self._largest_size = float(load.costs.max()), float(load.layer_bytes.max())

    def partition_within(self, level: float) -> tuple[Partition | None, float]:
        """Return a partition whose slowest stage takes ``level`` at most.

        Returns:
            The partition, or None where there is none; then also the least time above ``level`` at which any stage
            could take more layers, below which there is none either.
        """
        num_layers, num_stages = self._load.num_layers, self._load.num_stages
        starts = [(0, 0)]
        runs_of_stages = []
        next_level = math.inf
        for stage in range(num_stages):
            runs, next_of_stage = self.runs(stage, starts, level, num_layers - (num_stages - 1 - stage))
            next_level = min(next_level, next_of_stage)
            if not runs:
                return None, next_level
            runs_of_stages.append(runs)
            starts = joined([(run.first + 1, run.end) for run in runs])
        if starts[-1][1] < num_layers:
            return None, next_level
        boundaries = [num_layers]
        for runs in reversed(runs_of_stages):
            begins = (run.begin_for(boundaries[-1]) for run in runs)
            boundaries.append(next(begin for begin in begins if begin is not None))
        return Partition(tuple(reversed(boundaries))), level

    def runs(self, stage: int, starts: list[tuple[int, int]], level: float, last_end: int) -> tuple[list[Run], float]:
        """Return where a stage may end that begins within ``starts``, ranges of layers, and takes ``level`` at most.

        Args:
            last_end: it ends there at the latest, so that stages after it have layers, too.

        Returns:
            Runs in ascending order; the least time above ``level`` at which there were more.
        """
        capacity, limit = (level - self._waits[stage]) * self._speeds[stage], self._limits[stage]
        too_large = self._too_large(capacity, limit)
        runs = []
        next_cost = math.inf
        for begin, last in starts:
            first = begin
            within = too_large[bisect_left(too_large, first) : bisect_right(too_large, last)]
            for obstacle in (*within, last + 1):
                if first < obstacle:
                    run = Run(first, obstacle - 1, self._end(obstacle - 1, capacity, limit, last_end))
                    runs.append(run)
                    next_cost = min(next_cost, self._cost_of_more(run.last, run.end, limit, last_end))
                if obstacle <= last:
                    next_cost = min(next_cost, self._cost_of_more(obstacle, obstacle, limit, last_end))
                first = obstacle + 1
        return runs, next_cost / self._speeds[stage] + self._waits[stage]

    def _too_large(self, capacity: float, limit: float) -> list[int]:
        """The layers that not even alone fit on a stage, ascending."""
        if self._largest_cost <= capacity and self._largest_size <= limit:
            return []
        return np.flatnonzero((self._load.costs > capacity) | (self._load.layer_bytes > limit)).tolist()

    def _end(self, begin: int, capacity: float, limit: float, last_end: int) -> int:
        """Before which layer a stage ends that takes as many as it can from ``begin`` on, which alone fits."""
        by_cost = bisect_right(self._costs, self._costs[begin] + capacity, lo=begin) - 1
        by_size = bisect_right(self._sizes, self._sizes[begin] + limit, lo=begin) - 1
        return min(max(min(by_cost, by_size), begin + 1), last_end)

    def _cost_of_more(self, begin: int, end: int, limit: float, last_end: int) -> float:
        """What the layers from ``begin`` to ``end`` cost, that one included; infinite where memory or order forbid."""
        if end >= last_end or self._sizes[end + 1] - self._sizes[begin] > limit:
            return math.inf
        return self._costs[end + 1] - self._costs[begin]


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges (first, last), ascending, with overlapping and neighbouring ones made one."""
    disjoint: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if disjoint and first <= disjoint[-1][1] + 1:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], last))
        else:
            disjoint.append((first, last))
    return disjoint
