"""How samples are cut into micro-batches so that an iteration is shortest (DynaPipe, section 4); and plainer ways.

An iteration of a pipeline takes about ``fill`` times the longest micro-batch, in which the pipeline fills and drains,
and all micro-batches one after another: Eq. 1, where fill is c − 1 for c equal stages. Replicas share the second part.

``N`` samples, ``A`` lengths of each, ``K`` the most samples of a micro-batch, ``S`` stages, ``C`` limits of the longest
micro-batch, ``U`` numbers of micro-batches that are under way at once, ``X`` micro-batches that are priced together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.policy import FEW, ROUNDING
from zeroresize.policy.microbatches.costs import Prices, StageCosts
from zeroresize.policy.microbatches.plan import (
    DoesNotFitError,
    Floats,
    Indices,
    MicroBatch,
    PlanningOptions,
    SampleOrder,
)

#: What :func:`shortest_cuts` may lie above the optimum, as a share of it.
GAP = 1e-3
#: Limits of the longest micro-batch that are looked at together, and sizes that are priced together.
_TOGETHER = 32
#: Of fewer micro-batches for each replica, finer partitions are tried, whose longest takes these parts of the time.
_FEW_EACH, _FINER = 8, (1 / 2, 0.0)
#: Seconds that the solver has to improve a tour.
_TOUR_S = 0.2

#: Seconds [X], and bytes [U, X] of the stage that needs most while several like it are under way, of micro-batches of
#: so many samples [X] of such lengths [X, A]; the first of U needs least.
SegmentPrices = Callable[[Indices, Indices], tuple[Floats, Floats]]


def micro_batches(lengths_NA: Indices, costs: StageCosts, options: PlanningOptions) -> Iterator[list[MicroBatch]]:
    """Yield micro-batches of all replicas together; which are best, the schedule's length tells."""
    if options.method == "dynamic":
        yield from _planned(lengths_NA, costs, options)
    elif options.method == "packing":
        yield packed(lengths_NA, options.row_lengths, options.size)
    else:
        make = of_fixed_size if options.method == "fixed" else of_equal_tokens
        yield make(lengths_NA, ordered(lengths_NA, options.order), options.size)


def _planned(lengths_NA: Indices, costs: StageCosts, options: PlanningOptions) -> Iterator[list[MicroBatch]]:
    """By dynamic programming, for several numbers of micro-batches that are under way at once in the memory there is.

    The more there are, the less each may keep, and the less stages wait.
    """
    order = ordered(lengths_NA, options.order)
    under_way = [1]
    if not math.isinf(options.memory_limit):
        # Beside a long sample, which needs most of the memory, only short ones fit: so there may be more than stages.
        under_way = sorted({math.ceil(costs.num_stages * part / 2) for part in range(1, 2 * FEW + 1)} | {1})
    slowness_S = options.slowness_DS(costs.num_stages).mean(axis=0)

    def priced(sizes: Indices, longest: Indices) -> tuple[Floats, Floats]:
        prices = costs.prices(sizes, longest)
        needed = [_needed_bytes(prices, number) for number in under_way]
        return (prices.seconds * slowness_S).max(axis=1), np.stack(needed)

    segments = Segments.of(lengths_NA[order], priced, options.memory_limit)
    if not segments.has_partition:
        sample = int(order[int(np.flatnonzero(~np.isfinite(segments.seconds_KN[0, 1:]))[0])])
        raise DoesNotFitError(
            f"sample {sample} of {lengths_NA[sample].tolist()} tokens keeps more than memory_limit="
            f"{options.memory_limit:.0f} bytes of activations on a stage, or than what was measured"
        )
    fill = fill_of(costs, lengths_NA, slowness_S)
    seen: set[tuple[int, ...]] = set()
    for place in range(len(under_way)):
        for cuts in _coarse_and_fine(segments.within(options.memory_limit, place), fill, options.num_replicas):
            if cuts.ends not in seen:
                seen.add(cuts.ends)
                bounds = itertools.pairwise((0, *cuts.ends))
                yield [MicroBatch.of(order[begin:end], lengths_NA) for begin, end in bounds]


def _coarse_and_fine(segments: Segments, fill: float, num_replicas: int) -> Iterator[Cuts]:
    """Partitions to choose from: the best by the share that each replica has of all seconds, and finer ones.

    No replica has less than its share, and few long micro-batches leave some with more: then shorter ones are better.
    """
    cuts = shortest_cuts(segments, fill, num_replicas)
    yield cuts
    for part in _FINER if num_replicas > 1 and len(cuts.ends) < _FEW_EACH * num_replicas else ():
        finer = segments.no_longer_than(max(part * cuts.longest_s, segments.least_s))
        if finer.has_partition:
            yield shortest_cuts(finer, fill, num_replicas)


def _needed_bytes(prices: Prices, under_way: int) -> Floats:
    """[X] of the stage that needs most while so many like each are under way: a later stage has its share of them."""
    num_stages = prices.activation_bytes.shape[1]
    behind_S = num_stages - np.arange(num_stages)  # a stage keeps as many as there are from it on, where all are used
    kept_S = np.minimum(under_way, behind_S * max(under_way / num_stages, 1.0))
    needed: Floats = (kept_S * prices.activation_bytes + prices.workspace_bytes).max(axis=1)
    return needed


def fill_of(costs: StageCosts, lengths_NA: Indices, slowness_S: Floats | float = 1.0) -> float:
    """Return what a pipeline's filling and draining takes, in times of the longest micro-batch on its slowest stage.

    With equal stages it is S − 1 (Eq. 1). Where stages differ, a micro-batch passes the others in less time than the
    slowest, so it is the sum of all stages' seconds, each times its χ, over the slowest one's, less 1.
    """
    longest = lengths_NA[[int(lengths_NA.sum(axis=1).argmax())]]
    seconds = costs.prices(np.ones(1, dtype=np.int64), longest).seconds[0] * slowness_S
    slowest = float(seconds.max())
    return float(seconds.sum()) / slowest - 1.0 if slowest > 0.0 else 0.0


@dataclass(frozen=True, eq=False)
class Segments:
    """Holds what micro-batches of neighbouring samples take, infinite where they do not fit or are not as many."""

    seconds_KN: Floats  # [K, N + 1]; entry (k, n) is of the k + 1 samples up to the n-th one
    bytes_UKN: Floats  # of the same, what is needed while several like it are under way

    @classmethod
    def of(cls, lengths_NA: Indices, prices: SegmentPrices, most_bytes: float = math.inf) -> Segments:
        """Price all segments of samples in their order, from small ones on, until none of a size fits."""
        num_samples, longest_XA = len(lengths_NA), lengths_NA
        rows: list[tuple[Floats, Floats]] = []
        for first in range(1, num_samples + 1, _TOGETHER):
            sizes, longest = np.arange(first, min(first + _TOGETHER, num_samples + 1)), []
            for size in sizes.tolist():
                if size > 1:  # the longest of one sample less, and the last one
                    longest_XA = np.maximum(longest_XA[:-1], lengths_NA[size - 1 :])
                longest.append(longest_XA)
            exists = np.arange(num_samples + 1) >= sizes[:, None]
            seconds_X, bytes_UX = prices(np.repeat(sizes, exists.sum(axis=1)), np.concatenate(longest))
            seconds, needed = np.full(exists.shape, np.inf), np.full((len(bytes_UX), *exists.shape), np.inf)
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
        return math.isfinite(self.least_s)

    @property
    def least_s(self) -> float:
        """Return the seconds of the longest sample alone, infinite where one does not fit."""
        return float(self.seconds_KN[0, 1:].max())

    def seconds(self, begin: int, end: int) -> float:
        """Return the seconds of the samples from ``begin`` up to ``end``."""
        return float(self.seconds_KN[end - begin - 1, end])


@dataclass(frozen=True)
class Cuts:
    """Says where each micro-batch ends, the last one at N, and the seconds of the longest and of all."""

    ends: tuple[int, ...]
    longest_s: float
    total_s: float

    def iteration_s(self, fill: float, num_replicas: int = 1) -> float:
        """Return the seconds of an iteration (Eq. 1, with 1 / |D| where replicas share the micro-batches)."""
        return fill * self.longest_s + self.total_s / num_replicas


def shortest_cuts(segments: Segments, fill: float, num_replicas: int = 1, gap: float = GAP) -> Cuts:
    """Return the partition whose iteration is shortest, up to a gap, by dynamic programming (Eq. 2).

    Where the longest micro-batch may take t, f(t) is the least sum of seconds. f never rises with t, so between two
    limits t₁ < t₂ no iteration is shorter than fill · (the least seconds above t₁) + f(t₂) / |D|. Limits between are
    looked at, several at once, while that bound comes below the best iteration by more than the gap.
    """
    choices = np.unique(segments.seconds_KN[np.isfinite(segments.seconds_KN)])
    choices = choices[choices >= segments.least_s * (1.0 - ROUNDING)]  # every sample is in some micro-batch
    candidates: list[Cuts] = []
    totals: dict[int, float] = {}
    places = _between(-1, len(choices), _TOGETHER) | {0, len(choices) - 1}
    while places:
        looked = np.array(sorted(places))
        totals_C, cuts_at = _least_sums(segments, choices[looked])
        totals.update(zip(looked.tolist(), totals_C.tolist(), strict=True))
        candidates.append(cuts_at(int((fill * choices[looked] + totals_C / num_replicas).argmin())))
        best = min(candidates, key=lambda cuts: cuts.iteration_s(fill, num_replicas))
        aim = best.iteration_s(fill, num_replicas) * (1.0 - gap)
        bounds = [
            (fill * float(choices[low + 1]) + totals[high] / num_replicas, low, high)
            for low, high in itertools.pairwise(sorted(totals))
            if high - low >= 2
        ]
        promising = sorted(bound for bound in bounds if bound[0] < aim)[:_TOGETHER]
        each = max(_TOGETHER // max(len(promising), 1), 1)
        places = set().union(*(_between(low, high, each) for _, low, high in promising))
    return best


def _between(low: int, high: int, number: int) -> set[int]:
    """Whole numbers between two others, evenly spaced, at most so many and at least the middle."""
    places = np.linspace(low, high, number + 2)[1:-1].round().astype(int).tolist()
    return {place for place in places if low < place < high}


def _least_sums(segments: Segments, limits_C: Floats) -> tuple[Floats, Callable[[int], Cuts]]:
    """[C] least sums of seconds where no micro-batch takes longer than each limit, and how their samples are cut."""
    most, num_ends = segments.seconds_KN.shape
    sums_NC = np.full((num_ends, len(limits_C)), np.inf)
    sums_NC[0] = 0.0
    size_NC = np.zeros(sums_NC.shape, dtype=np.int64)
    limits = limits_C * (1.0 + ROUNDING)
    for end in range(1, num_ends):
        seconds_K = segments.seconds_KN[: min(most, end), end]
        fits = np.flatnonzero(seconds_K <= limits[-1])
        before_KC = sums_NC[end - 1 - fits] + seconds_K[fits, None]
        before_KC[seconds_K[fits, None] > limits] = np.inf
        choice_C = before_KC.argmin(axis=0)
        sums_NC[end] = np.take_along_axis(before_KC, choice_C[None], axis=0)[0]
        size_NC[end] = fits[choice_C] + 1

    def cuts_at(place: int) -> Cuts:
        ends = [num_ends - 1]
        while ends[-1]:
            ends.append(ends[-1] - int(size_NC[ends[-1], place]))
        bounds = ends[::-1]
        longest_s = max(itertools.starmap(segments.seconds, itertools.pairwise(bounds)))
        return Cuts(tuple(bounds[1:]), longest_s, float(sums_NC[-1, place]))

    return sums_NC[-1], cuts_at


def ordered(lengths_NA: Indices, order: SampleOrder = "sorted") -> Indices:
    """Return [N] the samples' numbers in an order in which neighbours are of similar lengths.

    "sorted": by the first length, then by the second one. "tour": pairs of lengths are points, visited on a short way
    of a travelling salesman, without its longest edge, from its shorter end; with one length that is the same.
    """
    by_length: Indices = np.lexsort(lengths_NA.T[::-1])
    points, point_of = np.unique(lengths_NA, axis=0, return_inverse=True)
    if order == "sorted" or lengths_NA.shape[1] == 1 or len(points) <= FEW:
        return by_length
    try:
        from fast_tsp import find_tour
    except ImportError as error:
        raise ImportError('order="tour" needs a solver: pip install "zeroresize[microbatches]"') from error
    distances = np.abs(points[:, None, :] - points[None, :, :]).sum(axis=2)
    tour = np.array(find_tour(distances.tolist(), duration_seconds=_TOUR_S), dtype=np.int64)
    path = np.roll(tour, -1 - int(distances[tour, np.roll(tour, -1)].argmax()))
    if points[path[-1]].sum() < points[path[0]].sum():
        path = path[::-1]
    by_tour: Indices = np.argsort(np.argsort(path)[point_of.ravel()], kind="stable")
    return by_tour


def packed(lengths_NA: Indices, max_lengths: Sequence[int], rows_each: int) -> list[MicroBatch]:
    """Return micro-batches of rows of the maximum length [A], into which samples are packed one behind another.

    Each sample, in the order of the data, goes into the first row with room for all of its lengths, else into a new
    one. All rows are as long as the maximum, whatever they hold: that is what packing computes.
    """
    limits = np.asarray(max_lengths, dtype=np.int64)
    rooms_NA = np.tile(limits, (len(lengths_NA), 1))
    rows: list[list[int]] = []
    for sample, lengths in enumerate(lengths_NA):
        if (lengths > limits).any():
            raise ValueError(
                f"sample {sample} has lengths {lengths.tolist()}: rows have {limits.tolist()} tokens at most"
            )
        row = int((rooms_NA >= lengths).all(axis=1).argmax())
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        rooms_NA[row] -= lengths
    full, of_rows = tuple(limits.tolist()), list(map(tuple, rows))
    return [MicroBatch(tuple(of_rows[begin : begin + rows_each]), full) for begin in range(0, len(rows), rows_each)]


def of_fixed_size(lengths_NA: Indices, order: Indices, size: int) -> list[MicroBatch]:
    """Return micro-batches of so many samples, but for the last one, in this order."""
    return [MicroBatch.of(order[begin : begin + size], lengths_NA) for begin in range(0, len(order), size)]


def of_equal_tokens(lengths_NA: Indices, order: Indices, max_tokens: int) -> list[MicroBatch]:
    """Return micro-batches of at most so many tokens, padding included, in this order; a longer sample is alone."""
    microbatches: list[MicroBatch] = []
    begin, longest = 0, np.zeros(lengths_NA.shape[1], dtype=np.int64)
    for place, sample in enumerate(order.tolist()):
        longest = np.maximum(longest, lengths_NA[sample])
        if place > begin and (place - begin + 1) * int(longest.sum()) > max_tokens:
            microbatches.append(MicroBatch.of(order[begin:place], lengths_NA))
            begin, longest = place, lengths_NA[sample]
    return [*microbatches, MicroBatch.of(order[begin:], lengths_NA)]
