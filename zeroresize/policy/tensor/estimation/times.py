"""A rank's times: of one step as measured, and as they would be with the full work.

``T`` is a rank's busy time of an iteration, ``M`` the part of it spent multiplying matrices in the balanced layers,
both in seconds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from zeroresize.plan.group import Workshares
from zeroresize.policy.tensor.costs import LEAST_SHARE, MOST, ResizingCost
from zeroresize.utils.usual import usual_of

#: Of a step in which a rank computes its own products and no others.
WHOLE = Workshares()
#: A plan is to hold for so many intervals: in these a change has to pay, and a rank's speed drifts on.
DURATION = 5.0
#: Of a step's busy time a part is not known more finely.
LEAST_PART = 1e-4
#: No step multiplies for less or takes longer.
LEAST_SECONDS, MOST_SECONDS = LEAST_SHARE, MOST
#: Of the rest of a step, the share that moves along when units do: what lies between the layers of a segment, and what
#: updates their weights. What is believed of all but the update before it was seen, and the most of the rest.
MOVING_REST, MOST_MOVING_REST = 0.2, 0.9


@dataclass(frozen=True)
class StepTimes:
    """Describe one iteration of a rank, in seconds.

    Attributes:
        busy_s: its time without waits in collectives, and without what balancing costs between two of them.
        gemm_s: the part of it spent multiplying matrices in the balanced layers.
        gather_fill_s: the part of it spent in their products outside the multiplication: gathers and fills.
        shares: what the rank did not compute, and what it computed for others.
        is_forced: whether someone forced just this share, whatever it costs.
        wait_s: the rest of the time between the two ends, waiting in collectives.
        outside_s: the part of ``busy_s`` before the first balanced layer of each forward, as for fetching a batch.
        outside_wait_s: the part of ``wait_s`` there.
        update_s: the part of ``busy_s`` after the last backward, as for the optimizer's step.
        layers: by name, what the products of each layer took that had any, in forward and backward together.
    """

    busy_s: float
    gemm_s: float
    gather_fill_s: float
    shares: Workshares = WHOLE
    is_forced: bool = False
    wait_s: float = 0.0
    outside_s: float = 0.0
    outside_wait_s: float = 0.0
    update_s: float = 0.0
    layers: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def is_possible(self) -> bool:
        """Whether a step can have taken these times."""
        times_s = self.busy_s, self.gemm_s, self.gather_fill_s, self.outside_s
        return all(0.0 <= seconds <= MOST_SECONDS for seconds in times_s)

    @property
    def at_even_shares(self) -> StepTimes:
        """Return the times if the products were those of an even share, in proportion."""
        if self.shares.owned in (0.0, 1.0):
            return self
        factor = 1.0 / self.shares.owned
        busy_s = self.busy_s + (factor - 1.0) * (self.gemm_s + self.gather_fill_s)
        return dataclasses.replace(
            self, busy_s=busy_s, gemm_s=factor * self.gemm_s, gather_fill_s=factor * self.gather_fill_s
        )

    @property
    def inside(self) -> StepTimes:
        """Return the times without what lies outside of the balanced layers."""
        busy_s, wait_s = max(self.busy_s - self.outside_s, 0.0), max(self.wait_s - self.outside_wait_s, 0.0)
        return dataclasses.replace(self, busy_s=busy_s, wait_s=wait_s, outside_s=0.0, outside_wait_s=0.0)


@dataclass(frozen=True)
class RankTimes:
    """Describe one rank's times at even shares, nothing pruned or lent, and what other amounts of work cost there."""

    rest_s: float  # T − M, busy seconds that pruning does not touch
    gemm_s: float  # M, seconds
    gather_fill_scale: float  # how many times as long as in the calibration gathers and fills take now
    cost: ResizingCost  # of pruning on this rank
    deviation: float = 0.0  # standard deviation of T, as a share of it
    moving_rest: float = MOVING_REST  # ρ: a rank that owns f has a rest of (1 − ρ + ρ f) ``rest_s``
    outside_s: float = 0.0  # what it takes besides, before the first balanced layer; not a part of T

    @property
    def busy_s(self) -> float:
        """Return T, seconds."""
        return self.rest_s + self.gemm_s

    def checked(self) -> RankTimes:
        """Return the times, with NaN for all numbers if one of them is nothing that a step can have taken.

        Such as zero, negative or infinite seconds of multiplying, which a clock that was set, or that is too coarse,
        may tell.
        """
        cost = self.cost.checked()
        is_sound = (
            0.0 <= self.rest_s <= MOST_SECONDS
            and LEAST_SECONDS <= self.gemm_s <= MOST_SECONDS
            and 0.0 <= self.gather_fill_scale <= MOST
            and 0.0 <= self.deviation <= MOST
            and 0.0 <= self.moving_rest <= MOST_MOVING_REST
            and 0.0 <= self.outside_s <= MOST_SECONDS
        )
        if is_sound:
            return self if cost is self.cost else dataclasses.replace(self, cost=cost)
        return RankTimes(math.nan, math.nan, math.nan, cost, math.nan)

    def faster(self, factor: float) -> RankTimes:
        """Return the times if the rank were ``factor`` times as fast."""
        return dataclasses.replace(self, rest_s=self.rest_s / factor, gemm_s=self.gemm_s / factor)

    def owning(self, owned: float) -> RankTimes:
        """Return the times of the rank once it owns ``owned`` times as much as at even shares, nothing spared of that.

        γ, and what is borrowed, are then shares of what it owns.
        """
        if owned == 1.0 or math.isnan(self.busy_s):
            return self
        return dataclasses.replace(
            self,
            rest_s=self.rest_s * (1.0 - self.moving_rest * (1.0 - owned)),
            gemm_s=max(self.gemm_s * self.cost.executed_at(owned), LEAST_SECONDS),
            cost=self.cost.owning(owned),
        )

    def beginning_after(self, outside_s: float) -> RankTimes:
        """Return the times of a rank whose every step begins with so many seconds that no division changes."""
        if not outside_s or math.isnan(self.busy_s):
            return dataclasses.replace(self, outside_s=0.0)
        return dataclasses.replace(
            self,
            rest_s=self.rest_s + outside_s,
            deviation=self.deviation * self.busy_s / (self.busy_s + outside_s),
            moving_rest=self.moving_rest * self.rest_s / (self.rest_s + outside_s),
            outside_s=0.0,
        )

    def busy_at(self, ratio: float) -> float:
        """Return the busy seconds when a share ``ratio`` of the columns is pruned."""
        shrunk_s = self.gemm_s * self.cost.gemm_share_at(ratio)
        return self.rest_s + shrunk_s + self.gather_fill_scale * self.cost.gather_fill_at(ratio)

    @property
    def least_busy_s(self) -> float:
        """Return the busy seconds at the cheapest pruning ratio."""
        return min(self.busy_at(ratio) for ratio in self.cost.ratios)


def log_parts(step: StepTimes) -> tuple[float, float]:
    """Return the logarithms of a step's rest, and of its multiplications."""
    least_s = max(LEAST_PART * step.busy_s, LEAST_SECONDS)
    rest_s = max(step.busy_s - step.gemm_s - step.gather_fill_s, least_s)
    return math.log(rest_s), math.log(max(step.gemm_s, LEAST_SECONDS))


def usual_step(steps: Sequence[StepTimes]) -> StepTimes:
    """Return a step's usual times."""
    return StepTimes(
        busy_s=usual_of([step.busy_s for step in steps]),
        gemm_s=usual_of([step.gemm_s for step in steps]),
        gather_fill_s=usual_of([step.gather_fill_s for step in steps]),
        shares=steps[-1].shares,
        is_forced=steps[-1].is_forced,
        wait_s=median([step.wait_s for step in steps]),
        update_s=usual_of([step.update_s for step in steps]),
    )
