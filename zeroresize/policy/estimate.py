"""From the times of one rank's steps to its full-work numbers, update after update.

What was measured under pruning is rescaled by what pruning costs. That cost comes from a calibration, which can be off
by a third: so it is corrected by what training shows, wherever a step at full work and steps under pruning lie in one
interval. (Not by what two intervals show: between them the rank's speed may have changed.)
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.times import RankTimes, StepTimes, full_work
from zeroresize.utils.state_checks import anything, each, keyed, number, optional

#: How much of what one interval shows is believed: its time at full work is that of a single step.
_BELIEF = 0.8
#: By more than these factors no single interval changes what is known; beyond their squares it was a hiccup.
_LEAST_FACTOR, _MOST_FACTOR = 0.4, 2.5
#: What a cost is told by, besides ``borrowing``.
_POINTS = ("ratios", "gemm_share", "gather_fill_s")
#: What all intervals together make of borrowing.
_LEAST_BORROWING, _MOST_BORROWING = 0.5, 3.0


class FullWorkEstimate:
    """One rank's full-work times and what pruning costs there, learned from the steps between two updates.

    Attributes:
        times: of the last interval, None before the first.
        usual_step: of the last interval, as it was measured.
        calibrated: what pruning costs as measured apart from training.
    """

    def __init__(self, calibrated: ResizingCost) -> None:
        self.times: RankTimes | None = None
        self.usual_step: StepTimes | None = None
        self.calibrated = calibrated
        self._factors: list[float | None] = [None] * len(calibrated.ratios)
        self._borrowing = self._gather_fill_scale = 1.0

    @property
    def cost(self) -> ResizingCost:
        """What pruning and borrowing cost, as far as is known."""
        return self.calibrated.scaled([self._factor_at(point) for point in range(len(self._factors))], self._borrowing)

    def learn(self, steps: Sequence[StepTimes]) -> None:
        """Take the steps of an interval: those under the last of its plans, and those at full work.

        Left out are times that a clock which was set, or that failed, may tell.
        """
        steps = [step for step in steps if step.is_possible]
        if not steps:
            return
        now = self.usual_step = _median([step for step in steps if step.plan == steps[-1].plan])
        full = [step for step in steps if step.plan == (0.0, 0.0)]
        if full and not now.is_forced:  # odd numbers of columns cost more
            if now.borrowed_share > 0.0:
                self._learn_borrowing(now, full_gemm_s=full[-1].gemm_s)
            elif now.spared_share > 0.0:
                self._learn_cost(now, full_gemm_s=full[-1].gemm_s)
        self.times = full_work(
            busy_s=now.busy_s,
            gemm_s=now.gemm_s,
            gather_fill_s=now.gather_fill_s,
            ratio=now.spared_share,
            borrowed=now.borrowed_share,
            cost=self.cost,
            last_scale=self._gather_fill_scale,
        )
        self._gather_fill_scale = self.times.gather_fill_scale

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "calibrated": dataclasses.asdict(self.calibrated),
            "factors": list(self._factors),
            "borrowing": self._borrowing,
            "gather_fill_scale": self._gather_fill_scale,
        }

    @staticmethod
    def state_check(state: Any, where: str) -> None:
        """Check for what :meth:`load_state_dict` can take over."""
        points = dict.fromkeys(_POINTS, each(number))
        numbers = {"borrowing": number, "gather_fill_scale": number}
        keyed({"calibrated": keyed({**points, "borrowing": number}), "factors": each(optional(number)), **numbers})(
            state, where
        )
        try:
            cost = _cost_of(state["calibrated"])
        except ValueError as error:
            raise ValueError(f"{where}.calibrated: {error}") from error
        each(anything, len(cost.ratios))(state["factors"], f"{where}.factors")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; what was measured here before is forgotten."""
        self.calibrated = _cost_of(state["calibrated"])
        self._factors, self._gather_fill_scale = list(state["factors"]), state["gather_fill_scale"]
        self._borrowing = state["borrowing"]
        self.times = self.usual_step = None

    def _learn_cost(self, pruned: StepTimes, full_gemm_s: float) -> None:
        """Correct the points of the cost on both sides of what was pruned."""
        if full_gemm_s <= 0.0 or pruned.gemm_s <= 0.0:
            return
        factor = pruned.gemm_s / full_gemm_s / self.cost.gemm_share_at(pruned.spared_share)
        if not _LEAST_FACTOR**2 <= factor <= _MOST_FACTOR**2:
            return
        factor = min(max(factor, _LEAST_FACTOR), _MOST_FACTOR)
        ratios = self.calibrated.ratios
        above = next((point for point, ratio in enumerate(ratios) if ratio >= pruned.spared_share), len(ratios) - 1)
        # A point of which nothing was seen yet takes all of it; of others the nearer takes more, which tells the slope.
        upper = (pruned.spared_share - ratios[above - 1]) / (ratios[above] - ratios[above - 1])
        weights = {above: min(upper, 1.0)} | ({above - 1: max(1.0 - upper, 0.0)} if above > 1 else {})
        largest = max(weights.values())
        parts = {point: 1.0 if self._factors[point] is None else own / largest for point, own in weights.items()}
        corrected = {point: self._factor_at(point) * factor ** (_BELIEF * part) for point, part in parts.items()}
        self._factors = [corrected.get(point, known) for point, known in enumerate(self._factors)]

    def _learn_borrowing(self, borrowed: StepTimes, full_gemm_s: float) -> None:
        """Correct Φ2; the less was borrowed, the less its noisy time says of it."""
        if full_gemm_s <= 0.0 or borrowed.gemm_s <= 0.0:
            return
        expected = self.cost.borrowed_at(borrowed.borrowed_share)
        seen = borrowed.gemm_s / full_gemm_s - self.cost.gemm_share_at(borrowed.spared_share)
        factor = 1.0 + _BELIEF * min(expected, 1.0) * (seen / expected - 1.0)
        factor = min(max(factor, _LEAST_FACTOR), _MOST_FACTOR)
        self._borrowing = min(max(self._borrowing * factor, _LEAST_BORROWING), _MOST_BORROWING)

    def _factor_at(self, point: int) -> float:
        """That of the nearest point of which something was seen, with each point in between half as sure."""
        seen = [(abs(other - point), factor) for other, factor in enumerate(self._factors) if factor is not None]
        distance, factor = min(seen, default=(0, 1.0))
        return factor ** (0.5**distance)


def _cost_of(calibrated: Mapping[str, Any]) -> ResizingCost:
    return ResizingCost(**{name: tuple(calibrated[name]) for name in _POINTS}, borrowing=calibrated["borrowing"])


def _median(steps: Sequence[StepTimes]) -> StepTimes:
    """A step's usual times: a median forgives a hiccup, an evaluation or a checkpoint within the interval."""
    return StepTimes(
        busy_s=statistics.median(times.busy_s for times in steps),
        gemm_s=statistics.median(times.gemm_s for times in steps),
        gather_fill_s=statistics.median(times.gather_fill_s for times in steps),
        spared_share=steps[-1].spared_share,
        borrowed_share=steps[-1].borrowed_share,
        is_forced=steps[-1].is_forced,
        wait_s=statistics.median(times.wait_s for times in steps),
    )
