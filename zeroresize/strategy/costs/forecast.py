"""What a step takes with given ranges of lengths: their work, range by range, and the switches between strategies.

``B`` mini-batches of a sample, ``S`` strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.strategy.costs.cost_model import CostModel, Floats
from zeroresize.strategy.length_range import LengthRange, as_ranges, range_of
from zeroresize.strategy.running.packing import spread_and_pack
from zeroresize.strategy.strategy import Strategy
from zeroresize.strategy.switching.switch_order import cheapest_order, tour_seconds

#: ``pack(lengths, max_tokens, dp)``: [dp] the micro-batches of each replica, as lists of lengths.
Pack = Callable[[Sequence[int], int, int], Sequence[Sequence[Sequence[int]]]]


@dataclass(frozen=True)
class StepForecast:
    """Expected seconds of a step, on average over the mini-batches of a sample.

    Attributes:
        ranges: of lengths, with the strategies that train them.
        home: the strategy in which the optimizer steps.
        range_s: of each range's work.
        switch_s: of the switches, gradient returns included.
        reduction_s: of the all-reduce of the gradients between the replicas of home.
    """

    ranges: tuple[LengthRange, ...]
    home: Strategy
    range_s: tuple[float, ...]
    switch_s: float
    reduction_s: float

    @property
    def step_s(self) -> float:
        return float(np.sum(self.range_s)) + self.switch_s + self.reduction_s


class Tours:
    """Seconds of the cheapest tour from home through any set of strategies, each worked out once.

    Args:
        seconds: [S, S] of switching from the strategy of the row to that of the column; infinite: not possible.
        home: its number.
    """

    def __init__(self, seconds: Floats, home: int) -> None:
        self._seconds, self._home = seconds, home
        self._known: dict[int, float] = {}

    def seconds(self, used: int) -> float:
        """Of the strategies whose bits are set; infinite if there is no tour of possible switches."""
        used |= 1 << self._home
        if used not in self._known:
            members = [one for one in range(len(self._seconds)) if used >> one & 1]
            own = self._seconds[np.ix_(members, members)]
            try:
                self._known[used] = tour_seconds(own, cheapest_order(own, members.index(self._home)))
            except ValueError:
                if np.isfinite(own).all():
                    raise
                self._known[used] = float("inf")
        return self._known[used]


def token_limit(up_to: int, max_tokens: int | None) -> int:
    """Tokens of a micro-batch of sequences up to a length: ``max_tokens``, or one longest sequence if that is None.

    Raises:
        ValueError: if a sequence of that length is more.
    """
    if max_tokens is not None and max_tokens < up_to:
        raise ValueError(f"max_tokens={max_tokens} is not allowed: sequences have up to {up_to} tokens")
    return max_tokens or up_to


def forecast_step(
    ranges: Sequence[LengthRange],
    home: Strategy,
    sample: Sequence[Sequence[int]],
    cost: CostModel,
    pack: Pack,
    max_tokens: int | None = None,
) -> StepForecast:
    """What a step takes on average over a sample.

    Args:
        sample: [B] the lengths of the sequences of each mini-batch.
        max_tokens: of a micro-batch; None: as many as the longest sequence of its range may have.

    Raises:
        ValueError: for ranges that do not rise, a sample without mini-batches, a sequence that no range allows, and as
            :class:`CostModel` does.
    """
    ranges = as_ranges(ranges)
    check_sample(sample, ranges[-1].up_to)
    strategies = list(dict.fromkeys([home, *(one.strategy for one in ranges)]))
    tours = Tours(cost.switch_seconds(strategies, 0), 0)
    range_s, switch_s = np.zeros(len(ranges)), 0.0
    for mini_batch in sample:
        groups: list[list[int]] = [[] for _ in ranges]
        for length in sorted(mini_batch):
            groups[range_of(ranges, length)].append(length)
        used = 0
        for number, (own, group) in enumerate(zip(ranges, groups, strict=True)):
            range_s[number] += work_seconds(group, own.strategy, token_limit(own.up_to, max_tokens), cost, pack)
            used |= bool(group) << strategies.index(own.strategy)
        switch_s += tours.seconds(used)
    means = (range_s / len(sample)).tolist()
    return StepForecast(ranges, home, tuple(means), switch_s / len(sample), cost.reduction_seconds(home))


def packed_by_work(lengths: Sequence[int], max_tokens: int, dp: int) -> list[list[list[int]]]:
    """As training packs: sequences spread over replicas; attention inside each sequence alone."""
    replicas = spread_and_pack(lengths, max_tokens, dp)
    return [[[lengths[number] for number in own] for own in batches] for batches in replicas]


def work_seconds(lengths: Sequence[int], strategy: Strategy, tokens: int, cost: CostModel, pack: Pack) -> float:
    """Of sequences in micro-batches of so many tokens at most, without switches; 0 for no sequence."""
    return cost.work_seconds(strategy, pack(lengths, tokens, strategy.dp)) if lengths else 0.0


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
