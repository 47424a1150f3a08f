"""What one rank knows of its own speed: full-work times of the steps since the last update, what pruning costs."""

from __future__ import annotations

import logging
import statistics
import weakref
from collections.abc import Collection

import torch

from zeroresize.linear import BalancedLinear
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.ratio import RankTimes, full_work
from zeroresize.pretest import measure_resizing_cost
from zeroresize.timing import StepTimer, StepTimes, clock_for

logger = logging.getLogger(__name__)


class Measurement:
    """Times the steps of this rank's balanced layers, from update to update.

    Args:
        layers: balanced layers, all on one device.
        max_ratio: the largest pruning ratio whose cost is of interest.

    Attributes:
        times: full-work times of the last update's interval, None before the first.
        cost: what pruning costs; proportional to FLOPs until :meth:`pretest`.
    """

    def __init__(self, layers: Collection[BalancedLinear], max_ratio: float) -> None:
        self._layers, self._max_ratio = layers, max_ratio
        self.times: RankTimes | None = None
        self.cost = ResizingCost.linear(max_ratio)
        self._interval: list[StepTimes] = []
        device = next(iter(layers)).weight.device if layers else torch.device("cpu")
        self._timer = StepTimer(clock_for(device))
        for layer in layers:
            layer.probes.add_outermost(self._timer)
        self.close = weakref.finalize(self, _detach, self._timer, list(layers))

    def begin_step(self, pruned_share: float) -> None:
        """A step begins under a plan that prunes this share of the rank's products."""
        self._timer.begin_step(pruned_share)

    def end_step(self) -> None:
        """The step is over."""
        times = self._timer.end_step()
        if times is not None:
            self._interval.append(times)

    @property
    def overhead_s(self) -> float:
        """Seconds that timing cost in the last step."""
        return self._timer.overhead_s

    def pretest(self) -> None:
        """Measure what pruning costs on the shapes of the step that has just ended; takes about a second."""
        self.cost = measure_resizing_cost(self._layers, self._max_ratio)
        logger.debug("cost of pruning: %s", self.cost)

    def learn(self) -> None:
        """Full-work times from the medians of the interval that ends."""
        steps = [times for times in self._interval if times.plan_key == self._interval[-1].plan_key]
        self._interval = []
        if not steps:
            return
        now = _median(steps)
        self.times = full_work(
            busy_s=now.busy_s,
            gemm_s=now.gemm_s,
            overhead_s=now.overhead_s,
            ratio=now.plan_key,
            cost=self.cost,
            last_scale=self.times.overhead_scale if self.times is not None else 1.0,
        )

    def forget(self) -> None:
        """Drop the steps since the last update."""
        self._interval = []


def _median(steps: list[StepTimes]) -> StepTimes:
    """A step's usual times: a median forgives a hiccup, an evaluation or a checkpoint within the interval."""
    return StepTimes(
        busy_s=statistics.median(times.busy_s for times in steps),
        gemm_s=statistics.median(times.gemm_s for times in steps),
        overhead_s=statistics.median(times.overhead_s for times in steps),
        plan_key=steps[-1].plan_key,
    )


def _detach(timer: StepTimer, layers: list[BalancedLinear]) -> None:
    timer.close()
    for layer in layers:
        layer.probes.remove(timer)
