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
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.layout import Indices
from zeroresize.plan.length_range import LengthRange
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel, Floats, batch_sums
from zeroresize.policy.strategy.costs.forecast import (
    Pack,
    StepForecast,
    Tours,
    check_sample,
    forecast_step,
    packed_by_work,
)
from zeroresize.utils.value_checks import at_least, number


@dataclass(frozen=True)
class SearchResult:
    """Hold the best ranges, beside the best strategy for all lengths.

    Attributes:
        best: of all ranges and the optimizer's strategies; every range with the ``max_tokens`` for which it was found
            to fit.
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
    for key, value in (
        ("num_ranks", num_ranks),
        ("num_layers", num_layers),
        *(("units", num_units) for num_units in units),
    ):
        at_least(key, value, 1)
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    at_least("ranks_per_node", per_node, 1)
    strategies = []
    for tp in _divisors(num_ranks):
        is_whole = per_node % tp == 0 or tp % per_node == 0
        if is_whole and not any(num_units % tp for num_units in units):
            stages = [pp for pp in _divisors(num_ranks // tp) if pp <= num_layers]
            strategies += [Strategy(num_ranks // (tp * pp), tp, pp) for pp in stages]
    return strategies


def default_thresholds(longest: int, shortest: int = 256) -> list[int]:
    """Return the longest length and its halves, rising, down to ``shortest``."""
    at_least("longest", longest, 1)
    thresholds = [longest]
    while thresholds[-1] // 2 >= max(shortest, 1):
        thresholds.append(thresholds[-1] // 2)
    return thresholds[::-1]


def search_strategies(
    sample: Sequence[Sequence[int]],
    candidates: Sequence[Strategy],
    cost: CostModel,
    *,
    memory_limit: float,
    thresholds: Sequence[int] | None = None,
    pack: Pack = packed_by_work,
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
        pack: how sequences are packed into micro-batches and these dealt to replicas, as in training.
        max_ranges: at most so many.
        max_tokens: of a micro-batch; None: as many as the longest sequence of its range may have.

    Raises:
        ValueError: if thresholds do not rise, no candidate is given or one is given twice, the sample has a sequence
            that is too long, or no candidate can train all lengths in the memory.
    """
    candidates, thresholds = list(candidates), _thresholds(thresholds, sample)
    _check(candidates, thresholds)
    at_least("max_ranges", max_ranges, 1)
    number("memory_limit", memory_limit, above=0.0)
    check_sample(sample, thresholds[-1])
    if max_tokens is not None:
        at_least("max_tokens", max_tokens, thresholds[-1])
    limits = [max_tokens or up_to for up_to in thresholds]
    table = _WorkTable.of(sample, candidates, cost, thresholds, limits, pack)
    static, optimizer_strategies = _BestRanges(), list[_OptimizerStrategy]()
    for place, optimizer_strategy in enumerate(candidates):
        is_allowed = [
            [cost.fits(one, optimizer_strategy, limit, memory_limit) for one in candidates] for limit in limits
        ]
        optimizer_strategies.append(
            _OptimizerStrategy(optimizer_strategy, np.where(np.array(is_allowed)[None], table.work_s, np.inf), cost)
        )
        static_s = float(optimizer_strategies[-1].work_s[0, -1, place]) + optimizer_strategies[-1].reduction_s
        static.offer(static_s, optimizer_strategy, [(len(thresholds), optimizer_strategy)])
    best = copy.copy(static)
    for option in sorted(optimizer_strategies, key=lambda one: one.least_s.min()):
        useful = np.flatnonzero(option.least_s < best.step_s)
        if not useful.size:
            continue
        kept = sorted({*useful.tolist(), candidates.index(option.strategy)})
        strategies = [candidates[one] for one in kept]
        optimizer_strategy_number = strategies.index(option.strategy)
        switch_s = np.where(
            cost.switches_fit(strategies, optimizer_strategy_number, memory_limit),
            cost.switch_seconds(strategies, optimizer_strategy_number),
            np.inf,
        )
        branches = _Branches(
            strategies,
            option.work_s[:, :, kept],
            table.is_present,
            switch_s,
            optimizer_strategy_number,
            option.reduction_s,
            max_ranges,
        )
        branches.explore(0, 0.0, [], [0] * len(sample), best)
    if static.optimizer_strategy is None or best.optimizer_strategy is None:
        raise ValueError(
            f"none of the strategies {[str(one) for one in candidates]} trains all lengths up to {thresholds[-1]} in "
            f"{memory_limit:g} bytes a rank: choose shorter sequences, smaller micro-batches or more ranks"
        )

    def forecast(optimizer_strategy: Strategy, best: _BestRanges) -> StepForecast:
        ranges = [LengthRange(thresholds[end - 1], one, limits[end - 1]) for end, one in best.ranges]
        return forecast_step(ranges, optimizer_strategy, sample, cost, pack)

    return SearchResult(forecast(best.optimizer_strategy, best), forecast(static.optimizer_strategy, static))


class _BestRanges:
    """The best so far: ``ranges`` as (end, strategy); no strategy of the optimizer if nothing fits."""

    def __init__(self) -> None:
        self.step_s = float("inf")
        self.optimizer_strategy: Strategy | None = None
        self.ranges: list[tuple[int, Strategy]] = []

    def offer(self, step_s: float, optimizer_strategy: Strategy, ranges: list[tuple[int, Strategy]]) -> None:
        if step_s < self.step_s:
            self.step_s, self.optimizer_strategy, self.ranges = step_s, optimizer_strategy, list(ranges)


class _OptimizerStrategy:
    """What one of the candidates is as the optimizer's strategy.

    Attributes:
        strategy: the optimizer's strategy.
        work_s: [K, K, S] of :class:`_WorkTable`, infinite where the memory does not suffice.
        reduction_s: of the gradients at the end of a step.
        least_s: [S] what a step takes at least that uses a candidate somewhere: the reduction, and all work with any
            number of ranges and without switches.
    """

    def __init__(self, strategy: Strategy, work_s: Floats, cost: CostModel) -> None:
        self.strategy, self.work_s, self.reduction_s = strategy, work_s, cost.reduction_seconds(strategy)
        size, by_range = len(work_s), work_s.min(axis=2)
        before, behind = np.zeros(size + 1), np.zeros(size + 1)
        for count in range(1, size + 1):
            before[count] = (before[:count] + by_range[:count, count - 1]).min()
            begin = size - count
            behind[begin] = (by_range[begin, begin:] + behind[begin + 1 :]).min()
        through = before[:-1, None, None] + work_s + behind[None, 1:, None]
        self.least_s: Floats = self.reduction_s + through.min(axis=(0, 1))


@dataclass(frozen=True, eq=False)
class _WorkTable:
    """The work of every range under every candidate.

    Attributes:
        work_s: [K, K, S] mean over the mini-batches, by begin, end − 1 and candidate; infinite where begin ≥ end.
        is_present: [B, K, K] whether a mini-batch has sequences in a range.
    """

    work_s: Floats
    is_present: Indices

    @classmethod
    def of(
        cls,
        sample: Sequence[Sequence[int]],
        candidates: list[Strategy],
        cost: CostModel,
        thresholds: list[int],
        limits: list[int],
        pack: Pack,
    ) -> _WorkTable:
        size = len(thresholds)
        work_s = np.full((size, size, len(candidates)), np.inf)
        is_present = np.zeros((len(sample), size, size), dtype=np.int64)
        lengths = [sorted(own) for own in sample]
        cuts = [[0, *(bisect.bisect_right(own, up_to) for up_to in thresholds)] for own in lengths]
        for begin in range(size):
            for last in range(begin, size):
                groups = [own[cut[begin] : cut[last + 1]] for own, cut in zip(lengths, cuts, strict=True)]
                is_present[:, begin, last] = [bool(group) for group in groups]
                for dp in {strategy.dp for strategy in candidates}:
                    sums = [batch_sums(pack(group, limits[last], dp)) for group in groups if group]
                    for place, strategy in enumerate(candidates):
                        if strategy.dp == dp:
                            taken = (cost.summed_work_seconds(strategy, own) for own in sums)
                            work_s[begin, last, place] = sum(taken) / len(sample)
        return cls(work_s, is_present)


class _Branches:
    """Branch and bound over ranges, from the shortest lengths on, for one strategy of the optimizer.

    A branch is cut off if its work, the least work that is left and the least that its switches take are no less than
    the best step found. Each strategy in use is entered by a switch at least as dear as the cheapest one to it, and
    the optimizer's strategy once more at the end; so the bound needs no triangle inequality.
    """

    def __init__(
        self,
        strategies: list[Strategy],
        work_s: Floats,
        is_present: Indices,
        switch_s: Floats,
        optimizer_strategy: int,
        reduction_s: float,
        max_ranges: int,
    ) -> None:
        self._strategies, self._work_s, self._is_present = strategies, work_s, is_present
        self._optimizer_strategy, self._reduction_s, self._max_ranges = optimizer_strategy, reduction_s, max_ranges
        self._tours = Tours(switch_s, optimizer_strategy)
        self._entry_s = np.where(np.eye(len(switch_s), dtype=bool), np.inf, switch_s).min(axis=0)
        self._size = len(self._work_s)
        self._remaining_s = self._least_work()

    def _least_work(self) -> Floats:
        """[max_ranges + 1, K + 1]: the least work behind a threshold in so many ranges at most, without switches."""
        least = np.full((self._max_ranges + 1, self._size + 1), np.inf)
        least[:, self._size] = 0.0
        by_range = self._work_s.min(axis=2)
        for count in range(1, self._max_ranges + 1):
            for begin in range(self._size):
                least[count, begin] = (by_range[begin, begin:] + least[count - 1, begin + 1 :]).min()
        return least

    def explore(
        self, begin: int, work_s: float, ranges: list[tuple[int, int]], used: list[int], best: _BestRanges
    ) -> None:
        """Offer what is better: the ranges that are chosen, and any behind them.

        Args:
            begin: the threshold behind which nothing is chosen yet.
            work_s: of the ranges that are chosen, as (end, candidate).
            used: [B] the candidates in use of each mini-batch, as bits.
        """
        if begin == self._size:
            tours_s = sum(map(self._tours.seconds, used)) / len(used)
            named_ranges = [(end, self._strategies[one]) for end, one in ranges]
            best.offer(work_s + tours_s + self._reduction_s, self._strategies[self._optimizer_strategy], named_ranges)
            return
        left = self._max_ranges - len(ranges)
        if not left:
            return
        totals = self._work_s[begin, begin:] + self._remaining_s[left - 1, begin + 1 :][:, None]
        for position in np.argsort(totals, axis=None, kind="stable").tolist():
            last, candidate = begin + position // totals.shape[1], position % totals.shape[1]
            bound_s = work_s + float(totals[last - begin, candidate]) + self._reduction_s
            if not bound_s < best.step_s:
                return
            if ranges and ranges[-1][1] == candidate:
                continue  # one range as well
            present = self._is_present[:, begin, last]
            now = [mask | int(is_there) << candidate for mask, is_there in zip(used, present, strict=True)]
            if bound_s + sum(map(self._least_switches, now)) / len(now) < best.step_s:
                spent_s = work_s + float(self._work_s[begin, last, candidate])
                self.explore(last + 1, spent_s, [*ranges, (last + 1, candidate)], now, best)

    def _least_switches(self, used: int) -> float:
        """What the strategies whose bits are set cost to enter, and the optimizer's to come back to, at least."""
        away = used & ~(1 << self._optimizer_strategy)
        if not away:
            return 0.0
        return float(
            self._entry_s[self._optimizer_strategy]
            + sum(own for one, own in enumerate(self._entry_s) if away >> one & 1)
        )


def _thresholds(given: Sequence[int] | None, sample: Sequence[Sequence[int]]) -> list[int]:
    if given is not None:
        return list(given)
    longest = max((max(own, default=0) for own in sample), default=0)
    check_sample(sample, longest)
    return default_thresholds(longest)


def _check(candidates: list[Strategy], thresholds: list[int]) -> None:
    if not candidates or len(set(candidates)) != len(candidates):
        raise ValueError("at least one candidate is needed, and none is named twice")
    for up_to in thresholds:
        at_least("thresholds", up_to, 1)
    if not thresholds or any(after <= before for before, after in itertools.pairwise(thresholds)):
        raise ValueError(f"thresholds={thresholds} are not allowed: at least one is needed, and they rise")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
