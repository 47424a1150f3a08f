"""From the times of one rank's steps to its full-work numbers, update after update.

What was measured under pruning is rescaled by what pruning costs (Decided 2). That cost comes from a pre-test, which
can be off by a third: so it is corrected by whatever training shows of it, the same multiplications once at full work
and once under pruning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.ratio import RankTimes, full_work

#: Of a share larger than this, noise is too great a part.
_MOST_TELLING_SHARE = 0.95
#: Nothing is ever said to cost more than this power of what was pre-tested.
_LEAST_EXPONENT = 0.1
#: Whoever seems to gain more by pruning than this power, or to take longer than this share of the full time, has
#: changed its speed meanwhile.
_MOST_EXPONENT, _MOST_SEEN_SHARE = 2.5, 1.1


@dataclass(frozen=True)
class StepTimes:
    """One iteration of a rank, in seconds.

    Attributes:
        busy_s: the time between two ends of a step, without waits in collectives.
        gemm_s: the part of it spent multiplying matrices in the balanced layers.
        overhead_s: the part of it spent in their products outside the multiplication: gathers and fills.
        pruned_share: share of the rank's product FLOPs that was not computed.
    """

    busy_s: float
    gemm_s: float
    overhead_s: float
    pruned_share: float = 0.0


class FullWorkEstimate:
    """One rank's full-work times and what pruning costs there, learned from the steps between two updates.

    Attributes:
        times: of the last interval, None before the first.
        exponents: what the pre-tested gemm share of each point is raised to, to agree with what training showed there;
            None where it showed nothing.
    """

    def __init__(self, pretested: ResizingCost) -> None:
        self._pretested = pretested
        self.times: RankTimes | None = None
        self.exponents: list[float | None] = [None] * len(pretested.ratios)
        self._overhead_scale = 1.0
        self._last_full_gemm_s: list[float] = []

    @property
    def cost(self) -> ResizingCost:
        """What pruning costs, as far as is known."""
        return self._pretested.with_exponents([self._exponent_at(ratio) for ratio in self._pretested.ratios])

    def take_pretest(self, pretested: ResizingCost) -> None:
        """Take what was measured apart from training."""
        self._pretested = pretested

    def learn(self, steps: Sequence[StepTimes]) -> None:
        """Take the steps of an interval; those under another plan than the last tell what that plan costs."""
        if not steps:
            return
        now = _median([step for step in steps if step.pruned_share == steps[-1].pruned_share])
        full_gemm_s = [step.gemm_s for step in steps if step.pruned_share == 0.0] or self._last_full_gemm_s
        if now.pruned_share > 0.0 and full_gemm_s:
            self._learn_cost(now.pruned_share, now.gemm_s, full_gemm_s)
        self._last_full_gemm_s = [] if now.pruned_share > 0.0 else full_gemm_s
        self.times = full_work(
            busy_s=now.busy_s,
            gemm_s=now.gemm_s,
            overhead_s=now.overhead_s,
            ratio=now.pruned_share,
            cost=self.cost,
            last_scale=self._overhead_scale,
        )
        self._overhead_scale = self.times.overhead_scale

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; the pre-test is not among them, since it is made anew."""
        return {
            "exponents": list(self.exponents),
            "overhead_scale": self._overhead_scale,
            "last_full_gemm_s": list(self._last_full_gemm_s),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; what was measured here before is forgotten."""
        self.exponents, self._overhead_scale = list(state["exponents"]), state["overhead_scale"]
        self._last_full_gemm_s = list(state["last_full_gemm_s"])
        self.times = None

    def _learn_cost(self, ratio: float, gemm_s: float, full_gemm_s: Sequence[float]) -> None:
        """Correct the points around ``ratio``, the more the longer the full time was measured."""
        told, seen = self.cost.gemm_share_at(ratio), gemm_s / statistics.median(full_gemm_s)
        if told > _MOST_TELLING_SHARE or seen > _MOST_SEEN_SHARE:
            return
        correction = math.log(min(seen, _MOST_TELLING_SHARE)) / math.log(told)
        weight = len(full_gemm_s) / (len(full_gemm_s) + 2)
        above = next((i for i, point in enumerate(self._pretested.ratios) if point >= ratio), len(self.exponents) - 1)
        around = {max(above - 1, 1), above}
        for point, exponent in {point: self._exponent_at(self._pretested.ratios[point]) for point in around}.items():
            if exponent * correction <= _MOST_EXPONENT:
                self.exponents[point] = max(exponent * correction**weight, _LEAST_EXPONENT)

    def _exponent_at(self, ratio: float) -> float:
        """The exponent of the nearest point of which something was seen."""
        seen = [
            (abs(point - ratio), own) for point, own in zip(self._pretested.ratios, self.exponents, strict=True) if own
        ]
        return min(seen)[1] if seen else 1.0


def _median(steps: Sequence[StepTimes]) -> StepTimes:
    """A step's usual times: a median forgives a hiccup, an evaluation or a checkpoint within the interval."""
    return StepTimes(
        busy_s=statistics.median(times.busy_s for times in steps),
        gemm_s=statistics.median(times.gemm_s for times in steps),
        overhead_s=statistics.median(times.overhead_s for times in steps),
        pruned_share=steps[-1].pruned_share,
    )
