"""What a step takes with given ranges of lengths: their work, range by range, and the switches between strategies.

``B`` mini-batches of a sample, ``S`` strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.length_range import LengthRange, as_ranges, lengths_by_range, with_limits
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel, Floats
from zeroresize.policy.strategy.packing import spread_and_pack
from zeroresize.policy.strategy.switches.switch_order import cheapest_order, tour_seconds

#: ``pack(lengths, max_tokens, dp)``: [dp] the micro-batches of each replica, as lists of lengths.
Pack = Callable[[Sequence[int], int, int], Sequence[Sequence[Sequence[int]]]]


@dataclass(frozen=True)
class StepForecast:
    """Describe the expected seconds of a step, on average over the mini-batches of a sample.

    Attributes:
        ranges: of lengths, with the strategies that train them.
        optimizer_strategy: the strategy in which the optimizer steps.
        range_s: of each range's work.
        switch_s: of the switches, gradient returns included.
        reduction_s: of the all-reduce of the gradients between the replicas of the optimizer's strategy.
    """

    ranges: tuple[LengthRange, ...]
    optimizer_strategy: Strategy
    range_s: tuple[float, ...]
    switch_s: float
    reduction_s: float

    @property
    def step_s(self) -> float:
        """Return the seconds of the whole step."""
        return float(np.sum(self.range_s)) + self.switch_s + self.reduction_s


class Tours:
    """Find the seconds of the cheapest tour from the optimizer's strategy through any set of strategies.

    Each is worked out once.

    Args:
        seconds: [S, S] of switching from the strategy of the row to that of the column; infinite: not possible.
        optimizer_strategy: its number.
    """

    def __init__(self, seconds: Floats, optimizer_strategy: int) -> None:
        self._seconds, self._optimizer_strategy = seconds, optimizer_strategy
        self._known: dict[int, float] = {}

    def seconds(self, used: int) -> float:
        """Return the seconds of the tour of the strategies whose bits are set.

        They are infinite if no possible switches make a tour.
        """
        used |= 1 << self._optimizer_strategy
        if used not in self._known:
            members = [one for one in range(len(self._seconds)) if used >> one & 1]
            between_s = self._seconds[np.ix_(members, members)]
            try:
                self._known[used] = tour_seconds(
                    between_s, cheapest_order(between_s, members.index(self._optimizer_strategy))
                )
            except ValueError:
                if np.isfinite(between_s).all():
                    raise
                self._known[used] = float("inf")
        return self._known[used]


def forecast_step(
    ranges: Sequence[LengthRange],
    optimizer_strategy: Strategy,
    sample: Sequence[Sequence[int]],
    cost: CostModel,
    pack: Pack,
    max_tokens: int | None = None,
) -> StepForecast:
    """Return what a step takes on average over a sample.

    Args:
        sample: [B] the lengths of the sequences of each mini-batch.
        max_tokens: of a micro-batch, where a range does not say; None: as many as its longest sequence may have.

    Raises:
        ValueError: for ranges that do not rise, ``max_tokens`` below the longest sequence of a range, a sample
            without mini-batches, a sequence that no range allows, and as :class:`CostModel` does.
    """
    ranges = with_limits(as_ranges(ranges), max_tokens)
    check_sample(sample, ranges[-1].up_to)
    strategies = list(dict.fromkeys([optimizer_strategy, *(one.strategy for one in ranges)]))
    tours = Tours(cost.switch_seconds(strategies, 0), 0)
    range_s, switch_s = np.zeros(len(ranges)), 0.0
    for mini_batch in sample:
        used = 0
        groups = lengths_by_range(ranges, sorted(mini_batch))
        for number, (length_range, group) in enumerate(zip(ranges, groups, strict=True)):
            if group:
                replicas = pack(group, length_range.max_tokens or length_range.up_to, length_range.strategy.dp)
                range_s[number] += cost.work_seconds(length_range.strategy, replicas)
            used |= bool(group) << strategies.index(length_range.strategy)
        switch_s += tours.seconds(used)
    reduction_s = cost.reduction_seconds(optimizer_strategy)
    means = (range_s / len(sample)).tolist()
    return StepForecast(ranges, optimizer_strategy, tuple(means), switch_s / len(sample), reduction_s)


def packed_by_work(lengths: Sequence[int], max_tokens: int, dp: int) -> list[list[list[int]]]:
    """Return what training packs: sequences spread over replicas; attention is inside each sequence alone."""
    replicas = spread_and_pack(lengths, max_tokens, dp)
    return [[[lengths[number] for number in own] for own in batches] for batches in replicas]


def check_sample(sample: Sequence[Sequence[int]], longest: int) -> None:
    """Check that there are mini-batches of sequences, none of them longer than the ranges allow.

    Raises:
        ValueError: otherwise.
    """
    if not sample or not all(len(own) for own in sample):
        raise ValueError("the sample of lengths needs at least one mini-batch, and each at least one sequence")
    smallest, largest = min(map(min, sample)), max(map(max, sample))
    if smallest < 1 or largest > longest:
        raise ValueError(
            f"the sample has sequences of {smallest} to {largest} tokens: allowed are 1 to {longest}, where the last "
            "range ends"
        )
