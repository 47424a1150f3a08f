"""Measuring one rank's steps: a timer in its balanced layers, and what is learned from it at every update."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection
from typing import Any

import torch

from zeroresize.linear import BalancedLinear
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.estimate import FullWorkEstimate, StepTimes
from zeroresize.policy.ratio import RankTimes
from zeroresize.pretest import measure_resizing_cost
from zeroresize.timing import StepTimer, clock_for

logger = logging.getLogger(__name__)


class Measurement:
    """Times the steps of this rank's balanced layers, from update to update.

    Args:
        layers: balanced layers, all on one device.
        max_ratio: the largest pruning ratio whose cost is of interest.
    """

    def __init__(self, layers: Collection[BalancedLinear], max_ratio: float) -> None:
        self._layers, self._max_ratio = layers, max_ratio
        self._estimate = FullWorkEstimate(ResizingCost.linear(max_ratio))
        self._interval: list[StepTimes] = []
        device = next(iter(layers)).weight.device if layers else torch.device("cpu")
        self._timer = StepTimer(clock_for(device))
        for layer in layers:
            layer.probes.add_outermost(self._timer)
        self.close = weakref.finalize(self, _detach, self._timer, list(layers))

    @property
    def times(self) -> RankTimes | None:
        """Full-work times of the last update's interval, None before the first."""
        return self._estimate.times

    @property
    def cost(self) -> ResizingCost:
        """What pruning costs; proportional to FLOPs until :meth:`pretest`."""
        return self._estimate.cost

    @property
    def overhead_s(self) -> float:
        """Seconds that timing cost in the last step."""
        return self._timer.overhead_s

    def begin_step(self, pruned_share: float) -> None:
        """A step begins under a plan that prunes this share of the rank's products."""
        self._timer.begin_step(pruned_share)

    def end_step(self) -> None:
        """The step is over."""
        times = self._timer.end_step()
        if times is not None:
            self._interval.append(times)

    def pretest(self) -> None:
        """Measure what pruning costs on the shapes of the step that has just ended; takes about a second."""
        pretested = measure_resizing_cost(self._layers, self._max_ratio)
        self._estimate.take_pretest(pretested)
        logger.debug("cost of pruning: %s", pretested)

    def learn(self) -> None:
        """Full-work times, and what pruning costs, from the interval that ends."""
        self._estimate.learn(self._interval)
        self._interval = []

    def state_dict(self) -> dict[str, Any]:
        """This rank's own, plain numbers."""
        return self._estimate.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`; the steps since the last update are dropped."""
        self._interval = []
        self._estimate.load_state_dict(state)


def _detach(timer: StepTimer, layers: list[BalancedLinear]) -> None:
    timer.close()
    for layer in layers:
        layer.probes.remove(timer)
