"""A rank's times: of one step as measured, and as they would be with the full work.

``T`` is a rank's busy time of an iteration, ``M`` the part of it spent multiplying matrices in the balanced layers,
both in seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroresize.policy.cost_model import ResizingCost

#: No step multiplies for less or takes longer.
LEAST_SECONDS, MOST_SECONDS = 1e-9, 1e9
#: Nor do gathers and fills take so many times as long as in the calibration.
_MOST_SCALE = 1e6


@dataclass(frozen=True)
class StepTimes:
    """One iteration of a rank, in seconds.

    Attributes:
        busy_s: its time without waits in collectives, and without what balancing costs between two of them.
        gemm_s: the part of it spent multiplying matrices in the balanced layers.
        gather_fill_s: the part of it spent in their products outside the multiplication: gathers and fills.
        spared_share: share of the rank's own product FLOPs that it did not compute, pruned or lent.
        borrowed_share: what it computed for others, in units of its own products at full work.
        is_forced: whether someone forced just this share, whatever it costs.
        wait_s: the rest of the time between the two ends, waiting in collectives.
        layers: by name, what the products of each layer took that had any, in forward and backward together.
    """

    busy_s: float
    gemm_s: float
    gather_fill_s: float
    spared_share: float = 0.0
    borrowed_share: float = 0.0
    is_forced: bool = False
    wait_s: float = 0.0
    layers: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def is_possible(self) -> bool:
        """Whether a step can have taken these times."""
        return all(0.0 <= seconds <= MOST_SECONDS for seconds in (self.busy_s, self.gemm_s, self.gather_fill_s))

    @property
    def plan(self) -> tuple[float, float]:
        """What tells steps under different plans apart."""
        return self.spared_share, self.borrowed_share


@dataclass(frozen=True)
class RankTimes:
    """One rank's full-work times and what pruning costs there.

    Attributes:
        rest_s: T − M, busy seconds that pruning does not touch.
        gemm_s: M, seconds.
        gather_fill_scale: how many times as long as in the calibration gathers and fills take now.
        cost: of pruning on this rank.
    """

    rest_s: float
    gemm_s: float
    gather_fill_scale: float
    cost: ResizingCost

    @property
    def busy_s(self) -> float:
        """T, seconds."""
        return self.rest_s + self.gemm_s

    def checked(self) -> RankTimes:
        """The same, with NaN for all three numbers if one of them is nothing that a step can have taken.

        Such as zero, negative or infinite seconds of multiplying, which a clock that was set, or that is too coarse,
        may tell. What pruning costs is mended number by number.
        """
        cost = self.cost.checked()
        is_sound = (
            0.0 <= self.rest_s <= MOST_SECONDS
            and LEAST_SECONDS <= self.gemm_s <= MOST_SECONDS
            and 0.0 <= self.gather_fill_scale <= _MOST_SCALE
        )
        if is_sound:
            return self if cost is self.cost else RankTimes(self.rest_s, self.gemm_s, self.gather_fill_scale, cost)
        return RankTimes(math.nan, math.nan, math.nan, cost)

    def busy_at(self, ratio: float) -> float:
        """Busy seconds when a share ``ratio`` of the columns is pruned."""
        shrunk_s = self.gemm_s * self.cost.gemm_share_at(ratio)
        return self.rest_s + shrunk_s + self.gather_fill_scale * self.cost.gather_fill_at(ratio)

    @property
    def least_busy_s(self) -> float:
        """Busy seconds at the cheapest pruning ratio."""
        return min(self.busy_at(ratio) for ratio in self.cost.ratios)

    def ratio_to_reach(self, target_s: float) -> float:
        """The smallest γ with busy time ``target_s`` at most; where none gets there, the smallest of the cheapest."""
        points = [(ratio, self.busy_at(ratio)) for ratio in self.cost.ratios]
        if points[0][1] <= target_s:
            return 0.0
        for (low, busy_low), (high, busy_high) in itertools.pairwise(points):
            if busy_high <= target_s:
                return min(low + (high - low) * (busy_low - target_s) / (busy_low - busy_high), high)
        return min(points, key=lambda point: point[1])[0]


def full_work(
    busy_s: float,
    gemm_s: float,
    gather_fill_s: float,
    ratio: float,
    cost: ResizingCost,
    last_scale: float,
    borrowed: float = 0.0,
) -> RankTimes:
    """Times measured while a rank did not compute ``ratio`` of its columns, rescaled to the full work.

    Fed back as measured, they would oscillate: once a straggler prunes, it no longer looks like one.

    Args:
        busy_s, gemm_s, gather_fill_s: measured seconds an iteration: in all, multiplying, gathering and filling.
        ratio: γ in force in that iteration.
        cost: of pruning on this rank.
        last_scale: the overhead's scale as last known, kept where nothing was gathered.
        borrowed: what the rank computed for others, in units of its own products at full work.
    """
    executed = cost.gemm_share_at(ratio) + cost.borrowed_at(borrowed)
    is_measured = ratio >= cost.ratios[1]  # below, the overhead is only guessed to grow from nothing
    expected_gather_fill_s = cost.gather_fill_at(ratio) if is_measured else 0.0
    return RankTimes(
        rest_s=max(busy_s - gemm_s - gather_fill_s, 0.0),
        gemm_s=gemm_s / executed if executed > 0.0 < gemm_s else math.nan,  # who computed nothing tells nothing
        gather_fill_scale=gather_fill_s / expected_gather_fill_s if expected_gather_fill_s > 0 else last_scale,
        cost=cost,
    )
