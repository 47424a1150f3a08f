"""What neighbouring stages would hand over in one round of diffusion: pairs of them, or relays along several.

``L`` layers, ``S`` stages, ``B`` boundaries between neighbours. No layer crosses more than one boundary in a round.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.pipeline.pipeline_load import Floats, Indices, PipelineLoad

#: How far a relay is to bring stages down, as shares of what the overloaded one takes beyond the mean.
_GOALS = (1.0, 0.75, 0.5, 0.25)


def potential(times: Floats, speeds: Floats) -> float:
    """Return φ = Σ w_u w_v |x_u − x_v| over all pairs of stages, x their times and w their speeds relative to the mean.

    The potential of DynPipe's supplement, B.3.2, for equal speeds. With others a layer changes two times by different
    amounts, and pairs that come closer only make sure that the weighted potential does not rise.

    Args:
        times, speeds: [S].
    """
    order = np.argsort(times, kind="stable")
    weights = speeds[order] / speeds.mean()
    before = np.cumsum(weights) - weights
    return float((weights * times[order] * (2 * before + weights - weights.sum())).sum())


@dataclass(frozen=True, eq=False)
class Exchanges:
    """Find the rounds that are possible from a partition, given by its boundaries, [S + 1].

    Attributes:
        crossing_sums: [L + 1] seconds in which the first layers cross a boundary; zeros where that does not count.
        num_steps: over which an exchange must save more than it takes.
    """

    load: PipelineLoad
    crossing_sums: Floats
    num_steps: float

    def seconds(self, before: Indices, after: Indices) -> float:
        """Return what a round takes, all boundaries at once."""
        return float(np.abs(self.crossing_sums[after] - self.crossing_sums[before]).max())

    def pairs(self, boundaries: Indices) -> Indices:
        """Return the boundaries after pairs have divided their layers anew, those with the largest gaps first.

        Each stage is in one pair at most.

        A pair divides as evenly as layers and memory allow, if that makes the slower stage faster, and neither faster
        than the faster one was.
        """
        wanted_B, gaps_B = self._wanted(boundaries)
        movable = np.flatnonzero(wanted_B != boundaries[1:-1])
        is_free = np.ones(len(boundaries), dtype=bool)
        after = boundaries.copy()
        for left in movable[np.argsort(-gaps_B[movable], kind="stable")].tolist():
            if is_free[left] and is_free[left + 1]:
                is_free[left : left + 2] = False
                after[left + 1] = wanted_B[left]
        return after

    def _wanted(self, boundaries: Indices) -> tuple[Indices, Floats]:
        """[B] with which layer the right stage of each pair would begin, and [B] the pairs' gaps."""
        load = self.load
        begin_B, now_B, end_B = boundaries[:-2], boundaries[1:-1], boundaries[2:]
        sums, speeds = load.cost_sums, load.speeds
        more_B = (sums[end_B] - sums[begin_B]) / speeds[1:] + np.diff(load.waits)  # of the right one without any layer
        even_B = sums[begin_B] + more_B * speeds[:-1] * speeds[1:] / (speeds[:-1] + speeds[1:])
        after_B = np.searchsorted(sums, even_B)
        lowest_B = np.searchsorted(load.byte_sums, load.byte_sums[end_B] - load.memory_limits[1:])
        highest_B = np.searchsorted(load.byte_sums, load.byte_sums[begin_B] + load.memory_limits[:-1], side="right") - 1
        # The two places next to the even one are the best: elsewhere the slower stage is slower.
        tried = np.stack([after_B - 1, after_B])
        tried = np.clip(tried, np.maximum(lowest_B, begin_B + 1), np.minimum(highest_B, end_B - 1))
        slower, faster = self._pair_times(begin_B, tried, end_B)
        slower_now, faster_now = self._pair_times(begin_B, now_B, end_B)
        crossing_s = np.abs(self.crossing_sums[tried] - self.crossing_sums[now_B])
        pays = (crossing_s == 0.0) | (crossing_s < self.num_steps * (slower_now - slower))
        slower = np.where((slower < slower_now) & (faster >= faster_now) & pays, slower, np.inf)
        best_B = tried[slower.argmin(axis=0), np.arange(len(now_B))]
        return np.where(np.isfinite(slower).any(axis=0), best_B, now_B), slower_now - faster_now

    def _pair_times(self, begin_B: Indices, middle: Indices, end_B: Indices) -> tuple[Floats, Floats]:
        """Times of the slower and of the faster stage of each pair, divided at ``middle``, [..., B]."""
        sums, speeds, waits = self.load.cost_sums, self.load.speeds, self.load.waits
        left = (sums[middle] - sums[begin_B]) / speeds[:-1] + waits[:-1]
        right = (sums[end_B] - sums[middle]) / speeds[1:] + waits[1:]
        return np.maximum(left, right), np.minimum(left, right)

    def relays(self, boundaries: Indices) -> Indices:
        """Return the boundaries after relays that relieve overloaded stages, the slowest first.

        Each stage is in one relay at most.

        In a relay a stage gives layers to its neighbour, which gives some of its own to the next one, until a stage
        can keep what it gets. All of them are then faster than the relieved one was, and φ has not risen. So work gets
        from overloaded stages to underloaded ones, as in Algorithm 2, where no two neighbours differ by a layer.
        """
        load = self.load
        times = load.times_between(boundaries)
        phi = potential(times, load.speeds)
        overloaded = np.flatnonzero(times > load.even_time)
        is_free = np.ones(load.num_stages, dtype=bool)
        after = boundaries
        for source in overloaded[np.argsort(-times[overloaded], kind="stable")].tolist():
            tried = self._relays_through(source, boundaries, is_free) if is_free[source] else []
            relays = [self._judged(after, boundaries, one, float(times[source])) for one in tried]
            relays = [one for one in relays if one.is_worthwhile and one.phi <= phi]
            if relays:
                best = min(relays, key=lambda one: one.phi)
                is_free[best.stages] = False
                after, phi = best.boundaries, best.phi
        return after

    def _judged(self, after: Indices, before: Indices, relay: Indices, source_time: float) -> _Relay:
        """A relay on top of others of the round.

        Args:
            after, before: [S + 1] with and without the others.
            relay: [S + 1] with this one only.
            source_time: what the stage took that is to be relieved.
        """
        changed = np.flatnonzero(relay != before)
        stages = slice(int(changed[0]) - 1, int(changed[-1]) + 1)
        boundaries = after.copy()
        boundaries[changed] = relay[changed]
        times = self.load.times_between(boundaries)
        saved, crossing_s = source_time - float(times[stages].max()), self.seconds(before, relay)
        is_worthwhile = saved > 0.0 and (crossing_s == 0.0 or crossing_s < self.num_steps * saved)
        return _Relay(boundaries, stages, potential(times, self.load.speeds), is_worthwhile)

    def _relays_through(self, source: int, boundaries: Indices, is_free: NDArray[np.bool_]) -> list[Indices]:
        """[S + 1] the boundaries after each relay that is tried: of both directions, for several goals.

        A relay begins at the overloaded stage or, as that may have a single layer and must get one before it gives it,
        at the nearest stage behind it that has more.
        """
        load = self.load
        mean = load.even_time
        excess = float(load.times_between(boundaries)[source]) - mean
        relays = []
        for line, source_there, places, are_free in (
            (self._rightwards, source, boundaries, is_free),
            (self._leftwards, load.num_stages - 1 - source, load.num_layers - boundaries[::-1], is_free[::-1]),
        ):
            behind = np.flatnonzero(np.diff(places[: source_there + 1]) > 1)[-1:].tolist()
            for start, goal in itertools.product([source_there, *behind], _GOALS):
                relay = line.relay(start, source_there, mean + goal * excess, places.tolist(), are_free)
                if relay is not None:
                    relays.append(relay if line is self._rightwards else load.num_layers - relay[::-1])
        return relays

    @cached_property
    def _rightwards(self) -> _Line:
        load = self.load
        of_stages = (load.speeds, load.memory_limits, load.waits)
        return _Line(load.cost_sums.tolist(), load.byte_sums.tolist(), *(values.tolist() for values in of_stages))

    @cached_property
    def _leftwards(self) -> _Line:
        load = self.load
        costs, sizes = (sums[-1] - sums[::-1] for sums in (load.cost_sums, load.byte_sums))
        of_stages = (load.speeds, load.memory_limits, load.waits)
        return _Line(costs.tolist(), sizes.tolist(), *(values[::-1].tolist() for values in of_stages))


@dataclass(frozen=True, eq=False)
class _Relay:
    """A relay on top of others.

    Attributes:
        boundaries: [S + 1] after it and the others.
        stages: that take part.
        phi: after it and the others.
        is_worthwhile: whether it relieves the overloaded stage, overloads no other as much, and saves what it takes.
    """

    boundaries: Indices
    stages: slice
    phi: float
    is_worthwhile: bool


@dataclass(frozen=True)
class _Line:
    """Layers and stages in the direction of a relay.

    Attributes:
        costs, sizes: [L + 1] of the first layers.
        speeds, limits, waits: [S].
    """

    costs: Sequence[float]
    sizes: Sequence[float]
    speeds: Sequence[float]
    limits: Sequence[float]
    waits: Sequence[float]

    def relay(
        self, start: int, source: int, level: float, boundaries: list[int], is_free: NDArray[np.bool_]
    ) -> Indices | None:
        """[S + 1] the boundaries after the shortest relay from ``start`` through ``source``; None where there is none.

        Every stage on the way takes less than ``level`` then. Each hands on as few layers as it can, none of them such
        as it has just got.
        """
        after = list(boundaries)
        for stage in range(start, len(self.speeds)):
            if not is_free[stage]:
                return None
            begin, end = after[stage], boundaries[stage + 1]
            capacity = (level - self.waits[stage]) * self.speeds[stage]
            faster = bisect_left(self.costs, self.costs[begin] + capacity, lo=begin) - 1
            fitting = bisect_right(self.sizes, self.sizes[begin] + self.limits[stage], lo=begin) - 1
            most = min(faster, fitting)
            if stage <= source:
                most = min(most, end - 1)
            elif most >= end:
                return np.array(after)
            if stage == len(self.speeds) - 1 or most < max(boundaries[stage], begin + 1):
                return None
            after[stage + 1] = most
        return None
