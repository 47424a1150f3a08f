"""Which strategy trains which lengths, so that a step takes least: what HotSPa leaves to its users.

For each strategy of the optimizer a dynamic program over ranges finds the least work that is left behind every
threshold. With it as the bound, branch and bound finds the least step exactly, although what a switch costs depends on
all strategies in use: each mini-batch pays for the tour of the strategies for which it has sequences. Strategies of the
optimizer and candidates with which even the work alone takes no less than the best step so far are left out; switches
are planned between the others only.

``B`` mini-batches of a sample, ``S`` candidates, ``K`` thresholds. ``begin`` and ``end`` count thresholds: a range is
from the length at ``begin`` (0 for 0) to that at ``end``, 1 to K.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.layout import Indices
from zeroresize.plan.strategy import LengthRange, Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.packing import Floats, packed_sums
from zeroresize.policy.strategy.switches.switch_order import cheapest_order, tour_seconds
from zeroresize.utils.checked import checked, integer, real
from zeroresize.utils.value_checks import at_least

#: The shortest range that a search thinks of by itself.
_SHORTEST_RANGE = 256


@dataclass(frozen=True)
class StepForecast:
    """Describe the expected seconds of a step, on average over the mini-batches of a sample.

    Attributes:
        ranges: of lengths, with the strategies that train them, and the ``max_tokens`` for which these were found to
            fit.
        optimizer_strategy: the strategy in which the optimizer steps.
        step_s: of the ranges' work, the switches, and the all-reduce of the gradients between the replicas of the
            optimizer's strategy.
    """

    ranges: tuple[LengthRange, ...]
    optimizer_strategy: Strategy
    step_s: float


@dataclass(frozen=True)
class SearchResult:
    """Hold the best ranges, beside the best strategy for all lengths.

    Attributes:
        best: of all ranges and the optimizer's strategies.
        static: of one range.
    """

    best: StepForecast
    static: StepForecast

    @property
    def ranges(self) -> tuple[LengthRange, ...]:
        """Return the best ranges."""
        return self.best.ranges

    @property
    def optimizer_strategy(self) -> Strategy:
        """Return the optimizer's strategy of the best ranges."""
        return self.best.optimizer_strategy

    @property
    def speedup(self) -> float:
        """Return how many times as fast the best ranges are as the best strategy without switching."""
        return self.static.step_s / self.best.step_s


@checked(num_ranks=integer(1), num_layers=integer(1), units=integer(1), ranks_per_node=integer(1))
def candidate_strategies(
    num_ranks: int, num_layers: int, units: Sequence[int], ranks_per_node: int | None = None
) -> list[Strategy]:
    """Return all (dp, tp, pp) on the first ``num_ranks`` ranks whose layers and units divide.

    Args:
        num_layers: every stage has at least one.
        units: of the layers' segments, such as heads and feed-forward neurons: tp divides each number.
        ranks_per_node: where given, a tensor-parallel group lies in one node or fills whole ones.

    Raises:
        ValueError: for numbers below 1.
    """
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    strategies = []
    for tp in _divisors(num_ranks):
        is_whole = per_node % tp == 0 or tp % per_node == 0
        if is_whole and not any(num_units % tp for num_units in units):
            stages = [pp for pp in _divisors(num_ranks // tp) if pp <= num_layers]
            strategies += [Strategy(num_ranks // (tp * pp), tp, pp) for pp in stages]
    return strategies


def default_thresholds(longest: int, shortest: int = _SHORTEST_RANGE) -> list[int]:
    """Return the longest length and its halves, rising, down to ``shortest``."""
    thresholds = [longest]
    while thresholds[-1] // 2 >= max(shortest, 1):
        thresholds.append(thresholds[-1] // 2)
    return thresholds[::-1]


@checked(memory_limit=real(above=0.0), max_ranges=integer(1), max_tokens=integer(1))
def search_strategies(
    sample: Sequence[Sequence[int]],
    candidates: Sequence[Strategy],
    cost: CostModel,
    *,
    memory_limit: float,
    thresholds: Sequence[int] | None = None,
    max_ranges: int = 4,
    max_tokens: int | None = None,
) -> SearchResult:
    """Search for the ranges, their strategies and the optimizer's strategy with which a step takes least.

    A step is the mean of a sample.

    Args:
        sample: [B] the lengths of the sequences of each mini-batch.
        candidates: [S] any of them may be the optimizer's strategy.
        memory_limit: bytes of a rank, which training and switches keep.
        thresholds: [K] rising lengths at which a range may end; the last one is the longest sequence allowed. None: the
            longest of the sample and its halves, as :func:`default_thresholds` says.
        max_ranges: at most so many.
        max_tokens: of a micro-batch; None: as many as the longest sequence of its range may have.

    Raises:
        ValueError: if thresholds do not rise, no candidate is given or one is given twice, the sample has a sequence
            that is too long, or no candidate can train all lengths in the memory.
    """
    candidates = list(candidates)
    thresholds = _checked(sample, candidates, thresholds)
    if max_tokens is not None:
        at_least("max_tokens", max_tokens, thresholds[-1])
    limits = [max_tokens or up_to for up_to in thresholds]
    work_s, is_present = _work(sample, candidates, cost, thresholds, limits)
    static, options = _Ranges(), []
    for place, strategy in enumerate(candidates):
        fits = [[cost.fits(other, strategy, limit, memory_limit) for other in candidates] for limit in limits]
        fitting_s, reduction_s = np.where(np.array(fits)[None], work_s, np.inf), cost.reduction_seconds(strategy)
        alone = _Ranges(float(fitting_s[0, -1, place]) + reduction_s, strategy, ((len(thresholds), strategy),))
        static = min(static, alone, key=lambda ranges: ranges.step_s)
        options.append((reduction_s + _least_through(fitting_s), place, fitting_s, reduction_s))
    best = static
    for least_s, place, fitting_s, reduction_s in sorted(options, key=lambda option: float(option[0].min())):
        useful = np.flatnonzero(least_s < best.step_s).tolist()
        if useful:
            kept = sorted({*useful, place})
            strategies, optimizer_strategy = [candidates[number] for number in kept], kept.index(place)
            are_possible = cost.switches_fit(strategies, optimizer_strategy, memory_limit)
            switch_s = np.where(are_possible, cost.switches.seconds(strategies, optimizer_strategy), np.inf)
            branches = _Branches(
                strategies, optimizer_strategy, fitting_s[:, :, kept], is_present, switch_s, reduction_s, max_ranges
            )
            best = branches.best(best)

    def forecast(least: _Ranges) -> StepForecast:
        if least.optimizer_strategy is None:
            raise ValueError(
                f"none of the strategies {list(map(str, candidates))} trains all lengths up to {thresholds[-1]} in "
                f"{memory_limit:g} bytes a rank: choose shorter sequences, smaller micro-batches or more ranks"
            )
        ranges = (LengthRange(thresholds[end - 1], strategy, limits[end - 1]) for end, strategy in least.ranges)
        return StepForecast(tuple(ranges), least.optimizer_strategy, least.step_s)

    return SearchResult(forecast(best), forecast(static))


@dataclass(frozen=True)
class _Ranges:
    """Seconds of a step with ranges as (end, strategy); without a strategy of the optimizer where nothing fits."""

    step_s: float = float("inf")
    optimizer_strategy: Strategy | None = None
    ranges: tuple[tuple[int, Strategy], ...] = ()


def _work(
    sample: Sequence[Sequence[int]],
    candidates: list[Strategy],
    cost: CostModel,
    thresholds: list[int],
    limits: list[int],
) -> tuple[Floats, Indices]:
    """[K, K, S] mean seconds of ranges by begin, end − 1 and candidate, and [B, K, K] which have sequences."""
    size = len(thresholds)
    work_s = np.full((size, size, len(candidates)), np.inf)
    is_present = np.zeros((len(sample), size, size), dtype=np.int64)
    lengths = [sorted(batch) for batch in sample]
    cuts = [[0, *(bisect.bisect_right(batch, up_to) for up_to in thresholds)] for batch in lengths]
    for begin, last in itertools.combinations_with_replacement(range(size), 2):
        groups = [batch[cut[begin] : cut[last + 1]] for batch, cut in zip(lengths, cuts, strict=True)]
        is_present[:, begin, last] = [bool(group) for group in groups]
        for dp in {strategy.dp for strategy in candidates}:
            sums = [packed_sums(group, limits[last], dp) for group in groups if group]
            for place, strategy in enumerate(candidates):
                if strategy.dp == dp:
                    taken = (cost.work_seconds(strategy, of_batch) for of_batch in sums)
                    work_s[begin, last, place] = sum(taken) / len(sample)
    return work_s, is_present


def _least_behind(work_s: Floats, max_ranges: int) -> Floats:
    """[max_ranges + 1, K + 1]: the least work behind a threshold in so many ranges at most, without switches."""
    size, by_range = len(work_s), work_s.min(axis=2)
    least = np.full((max_ranges + 1, size + 1), np.inf)
    least[:, size] = 0.0
    for count in range(1, max_ranges + 1):
        for begin in range(size):
            least[count, begin] = (by_range[begin, begin:] + least[count - 1, begin + 1 :]).min()
    return least


def _least_through(work_s: Floats) -> Floats:
    """[S] the least work in any number of ranges, of which one has the candidate."""
    size = len(work_s)
    before = _least_behind(work_s[::-1, ::-1].transpose(1, 0, 2), size)[-1][::-1]
    behind = _least_behind(work_s, size)[-1]
    through: Floats = (before[:-1, None, None] + work_s + behind[None, 1:, None]).min(axis=(0, 1))
    return through


@dataclass(eq=False)
class _Branches:
    """Branch and bound over ranges, from the shortest lengths on, for one strategy of the optimizer.

    A branch is cut off if its work, the least work that is left and the least that its switches take are no less than
    the best step found. Each strategy in use is entered by a switch at least as dear as the cheapest one to it, and
    the optimizer's strategy once more at the end; so the bound needs no triangle inequality.
    """

    _strategies: list[Strategy]
    _optimizer_strategy: int
    _work_s: Floats
    _is_present: Indices
    _switch_s: Floats
    _reduction_s: float
    _max_ranges: int

    def best(self, known: _Ranges) -> _Ranges:
        """Return the best ranges, or those that are known already."""
        self._best, self._tours_s = known, dict[int, float]()
        self._entry_s = np.where(np.eye(len(self._switch_s), dtype=bool), np.inf, self._switch_s).min(axis=0)
        self._remaining_s = _least_behind(self._work_s, self._max_ranges)
        self._explore(0, 0.0, [], [0] * len(self._is_present))
        return self._best

    def _explore(self, begin: int, work_s: float, ranges: list[tuple[int, int]], used: list[int]) -> None:
        """Look at all behind a threshold; ``used`` has for each mini-batch the bits of its candidates."""
        if begin == len(self._work_s):
            step_s = work_s + sum(map(self._tour_s, used)) / len(used) + self._reduction_s
            if step_s < self._best.step_s:
                named = tuple((end, self._strategies[number]) for end, number in ranges)
                self._best = _Ranges(step_s, self._strategies[self._optimizer_strategy], named)
            return
        left = self._max_ranges - len(ranges)
        if not left:
            return
        totals = self._work_s[begin, begin:] + self._remaining_s[left - 1, begin + 1 :][:, None]
        for position in np.argsort(totals, axis=None, kind="stable").tolist():
            last, candidate = begin + position // totals.shape[1], position % totals.shape[1]
            bound_s = work_s + float(totals[last - begin, candidate]) + self._reduction_s
            if not bound_s < self._best.step_s:
                return
            if ranges and ranges[-1][1] == candidate:
                continue  # as good as a single range
            present = self._is_present[:, begin, last]
            now = [mask | int(is_there) << candidate for mask, is_there in zip(used, present, strict=True)]
            if bound_s + sum(map(self._least_switches, now)) / len(now) < self._best.step_s:
                spent_s = work_s + float(self._work_s[begin, last, candidate])
                self._explore(last + 1, spent_s, [*ranges, (last + 1, candidate)], now)

    def _least_switches(self, used: int) -> float:
        """What the strategies whose bits are set cost to enter, and the optimizer's to come back to, at least."""
        away = used & ~(1 << self._optimizer_strategy)
        if not away:
            return 0.0
        entered_s = sum(entry_s for number, entry_s in enumerate(self._entry_s) if away >> number & 1)
        return float(self._entry_s[self._optimizer_strategy] + entered_s)

    def _tour_s(self, used: int) -> float:
        """The cheapest tour of the strategies whose bits are set, worked out once; infinite where none is possible."""
        used |= 1 << self._optimizer_strategy
        if used not in self._tours_s:
            members = [number for number in range(len(self._switch_s)) if used >> number & 1]
            between_s = self._switch_s[np.ix_(members, members)]
            try:
                order = cheapest_order(between_s, members.index(self._optimizer_strategy))
                self._tours_s[used] = tour_seconds(between_s, order)
            except ValueError:
                if np.isfinite(between_s).all():
                    raise
                self._tours_s[used] = float("inf")
        return self._tours_s[used]


def _checked(
    sample: Sequence[Sequence[int]], candidates: list[Strategy], thresholds: Sequence[int] | None
) -> list[int]:
    """The thresholds, once they, the candidates and the sample are sound."""
    if not sample or not all(len(batch) for batch in sample):
        raise ValueError("the sample of lengths needs at least one mini-batch, and each at least one sequence")
    if not candidates or len(set(candidates)) != len(candidates):
        raise ValueError("at least one candidate is needed, and none is named twice")
    shortest, longest = min(map(min, sample)), max(map(max, sample))
    thresholds = default_thresholds(longest) if thresholds is None else list(thresholds)
    if not thresholds or thresholds[0] < 1 or any(after <= before for before, after in itertools.pairwise(thresholds)):
        raise ValueError(f"thresholds={thresholds} are not allowed: lengths of at least 1 that rise are needed")
    if shortest < 1 or longest > thresholds[-1]:
        raise ValueError(
            f"the sample has sequences of {shortest} to {longest} tokens: allowed are 1 to {thresholds[-1]}, where the "
            "last range ends"
        )
    return thresholds


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
