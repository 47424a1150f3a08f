"""How ordered samples are cut into micro-batches so that an iteration is shortest (DynaPipe, section 4).

An iteration of a pipeline takes about ``fill`` times the longest micro-batch, in which the pipeline fills and drains,
and all micro-batches one after another: Eq. 1, where fill is c − 1 for c equal stages. Replicas share the second part.

``N`` samples in their order, ``K`` the most samples of a micro-batch, ``C`` limits of the longest micro-batch, ``U``
numbers of micro-batches that are under way at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.policy.microbatches.micro_batch import Floats, Indices

#: What :func:`shortest_cuts` may lie above the optimum, as a share of it.
GAP = 1e-3
#: Limits of the longest micro-batch that are looked at together.
_TOGETHER = 24
#: So many sizes are priced together.
_SIZES_TOGETHER = 32
#: Rounds of bisecting limits at most; each shrinks the range of each interval by :data:`_TOGETHER`.
_ROUNDS = 12

#: Seconds [X], and bytes [U, X] of the stage that needs most while several like it are under way, of micro-batches of
#: the samples from entry x of the first argument up to entry x of the second; the first of U needs least.
SegmentPrices = Callable[[Indices, Indices], tuple[Floats, Floats]]


@dataclass(frozen=True, eq=False)
class Segments:
    """Holds what micro-batches of neighbouring samples take.

    Attributes:
        seconds_KN: [K, N + 1]; entry (k, n) is of the k + 1 samples up to the n-th one, infinite where they do not fit
            or there are not as many.
        bytes_UKN: of the same, what is needed while several like it are under way.
    """

    seconds_KN: Floats
    bytes_UKN: Floats

    @classmethod
    def of(cls, num_samples: int, prices: SegmentPrices, most_bytes: float = math.inf) -> Segments:
        """Price all segments, from small ones on, until none of a size fits.

        Raises:
            ValueError: for no samples.
        """
        if num_samples < 1:
            raise ValueError("no samples are given: at least one is needed")
        ends = np.arange(num_samples + 1)
        rows: list[tuple[Floats, Floats]] = []
        for first in range(1, num_samples + 1, _SIZES_TOGETHER):
            sizes = np.arange(first, min(first + _SIZES_TOGETHER, num_samples + 1))
            begins = ends[None, :] - sizes[:, None]
            exists = begins >= 0
            seconds_X, bytes_UX = prices(begins[exists], np.broadcast_to(ends, begins.shape)[exists])
            seconds, needed = np.full(begins.shape, np.inf), np.full((len(bytes_UX), *begins.shape), np.inf)
            seconds[exists], needed[:, exists] = seconds_X, bytes_UX
            rows.append((seconds, needed))
            if not (needed[0, -1] <= most_bytes).any():
                break
        seconds_KN = np.concatenate([seconds for seconds, _ in rows])
        return cls(seconds_KN, np.concatenate([needed for _, needed in rows], axis=1)).within(most_bytes)

    def within(self, most_bytes: float, place: int = 0) -> Segments:
        """Return those that need at most so many bytes with as many under way as that place of U says.

        A sample by itself stays where it fits with the least under way: nothing smaller could be made of it.
        """
        fits = self.bytes_UKN[place] <= most_bytes
        fits[0] = self.bytes_UKN[0, 0] <= most_bytes
        seconds_KN = np.where(fits, self.seconds_KN, np.inf)
        sizes_that_fit = np.flatnonzero(np.isfinite(seconds_KN).any(axis=1))
        num_sizes = int(sizes_that_fit[-1]) + 1 if len(sizes_that_fit) else 1
        return Segments(seconds_KN[:num_sizes], self.bytes_UKN[:, :num_sizes])

    def no_longer_than(self, seconds: float) -> Segments:
        """Return those that take at most so many seconds."""
        return Segments(np.where(self.seconds_KN <= seconds, self.seconds_KN, np.inf), self.bytes_UKN)

    @property
    def has_partition(self) -> bool:
        """Whether each sample fits into a micro-batch by itself."""
        return bool(np.isfinite(self.seconds_KN[0, 1:]).all())

    @property
    def num_samples(self) -> int:
        """Return N."""
        return self.seconds_KN.shape[1] - 1

    def seconds(self, begin: int, end: int) -> float:
        """Return the seconds of the samples from ``begin`` up to ``end``."""
        return float(self.seconds_KN[end - begin - 1, end])


@dataclass(frozen=True)
class Cuts:
    """Describe a partition.

    Attributes:
        ends: where each micro-batch ends, rising; the last one at N.
        longest_s, total_s: seconds of the longest micro-batch, and of all.
    """

    ends: tuple[int, ...]
    longest_s: float
    total_s: float

    def iteration_s(self, fill: float, num_replicas: int = 1) -> float:
        """Return the seconds of an iteration (Eq. 1, with 1 / |D| where replicas share the micro-batches)."""
        return fill * self.longest_s + self.total_s / num_replicas


def shortest_cuts(segments: Segments, fill: float, num_replicas: int = 1, gap: float = GAP) -> Cuts:
    """Return the partition whose iteration is shortest, up to a gap, by dynamic programming (Eq. 2).

    Where the longest micro-batch may take t, f(t) is the least sum of seconds. f never rises with t, so between two
    limits t₁ < t₂ no iteration is shorter than fill · (the least seconds above t₁) + f(t₂) / |D|. Intervals whose bound
    comes within the gap of the best one are done; the others are divided. All limits of a round share their arrays.

    Args:
        fill: see the module.
        num_replicas: |D|.
        gap: share of the optimum that the result may lie above it; 0 for the optimum itself.
    """
    choices = np.unique(segments.seconds_KN[np.isfinite(segments.seconds_KN)])
    least = float(segments.seconds_KN[0, 1:].max())  # every sample is in some micro-batch
    choices = choices[choices >= least * (1.0 - 1e-12)]
    best = _Best(segments, fill, num_replicas)
    places = np.unique(np.linspace(0, len(choices) - 1, _TOGETHER).round().astype(np.int64))
    totals = best.look(choices[places])
    intervals = [
        (int(low), int(high), float(total)) for low, high, total in zip(places, places[1:], totals[1:], strict=False)
    ]
    for _ in range(_ROUNDS):
        aim = best.iteration_s * (1.0 - gap)
        open_intervals = []
        for low, high, total in intervals:
            of_interval = fill * float(choices[low + 1]) + total / num_replicas
            if high - low >= 2 and of_interval < aim:
                open_intervals.append((low, high, total))
        if not open_intervals:
            break
        intervals = []
        for group in _groups(open_intervals, _TOGETHER):
            inner = [_inside(low, high, max(_TOGETHER // len(group), 1)) for low, high, _ in group]
            totals = best.look(choices[np.concatenate(inner)])
            begin = 0
            for (low, high, total), between in zip(group, inner, strict=True):
                of_inner = totals[begin : begin + len(between)].tolist()
                begin += len(between)
                points, sums = [low, *between.tolist(), high], [*of_inner, total]
                intervals += list(zip(points, points[1:], sums, strict=False))
    return best.cuts


class _Best:
    """The best partition of those that were looked at."""

    def __init__(self, segments: Segments, fill: float, num_replicas: int) -> None:
        self._segments, self._fill, self._num_replicas = segments, fill, num_replicas
        self.cuts = Cuts((), math.inf, math.inf)

    @property
    def iteration_s(self) -> float:
        return self.cuts.iteration_s(self._fill, self._num_replicas)

    def look(self, limits_C: Floats) -> Floats:
        """Least sums [C] at these limits, of which the best is taken."""
        totals, cuts_of = _least_sums(self._segments, limits_C)
        place = int((self._fill * limits_C + totals / self._num_replicas).argmin())
        self.take(float(totals[place]), cuts_of(place))
        return totals

    def take(self, total_s: float, ends: tuple[int, ...]) -> None:
        longest_s = max(self._segments.seconds(begin, end) for begin, end in itertools.pairwise((0, *ends)))
        cuts = Cuts(ends, longest_s, total_s)
        if math.isinf(self.cuts.total_s) or cuts.iteration_s(self._fill, self._num_replicas) < self.iteration_s:
            self.cuts = cuts


def _least_sums(segments: Segments, limits_C: Floats) -> tuple[Floats, Callable[[int], tuple[int, ...]]]:
    """[C] least sums of seconds where no micro-batch takes longer than each limit, and how their samples are cut."""
    num_samples, most = segments.num_samples, len(segments.seconds_KN)
    sums_NC = np.full((num_samples + 1, len(limits_C)), np.inf)
    sums_NC[0] = 0.0
    size_NC = np.zeros(sums_NC.shape, dtype=np.int64)
    limits = limits_C * (1.0 + 1e-12)
    for end in range(1, num_samples + 1):
        most_here = min(most, end)
        seconds_K = segments.seconds_KN[:most_here, end]
        fits = np.flatnonzero(seconds_K <= limits[-1])
        before_KC = sums_NC[end - 1 - fits] + seconds_K[fits, None]
        before_KC[seconds_K[fits, None] > limits] = np.inf
        choice_C = before_KC.argmin(axis=0)
        sums_NC[end] = np.take_along_axis(before_KC, choice_C[None], axis=0)[0]
        size_NC[end] = fits[choice_C] + 1

    def cuts_of(place: int) -> tuple[int, ...]:
        ends: list[int] = []
        end = num_samples
        while end:
            ends.append(end)
            end -= int(size_NC[end, place])
        return tuple(reversed(ends))

    return sums_NC[-1], cuts_of


def _inside(low: int, high: int, number: int) -> Indices:
    """Numbers between two others, evenly spaced, at most so many."""
    between = np.linspace(low, high, number + 2)[1:-1].round().astype(np.int64)
    return np.unique(between[(between > low) & (between < high)])


def _groups(values: Sequence[tuple[int, int, float]], size: int) -> list[Sequence[tuple[int, int, float]]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]
