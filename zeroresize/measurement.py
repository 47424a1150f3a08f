"""Measuring one rank's steps: a timer in its balanced layers, and what is learned from it at every update."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from zeroresize.config import BalanceConfig
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
        layers: balanced layers by name, all on one device.
        config: how to balance.
    """

    def __init__(self, layers: Mapping[str, BalancedLinear], config: BalanceConfig) -> None:
        self._layers, self._config = layers, config
        self._estimate = FullWorkEstimate(ResizingCost.linear(config.max_ratio))
        self._is_pretested = False
        self._interval: list[StepTimes] = []
        device = next(iter(layers.values())).weight.device if layers else torch.device("cpu")
        self._timer = StepTimer(clock_for(device))
        for layer in layers.values():
            layer.probes.add_outermost(self._timer)
        self.close = weakref.finalize(self, _detach, self._timer, list(layers.values()))

    @property
    def times(self) -> RankTimes | None:
        """Full-work times of the last update's interval, None before the first."""
        return self._estimate.times

    @property
    def wait_s(self) -> float:
        """Seconds of waiting in a usual step of the last update's interval, NaN before the first."""
        return self._estimate.usual_step.wait_s if self._estimate.usual_step is not None else math.nan

    @property
    def cost(self) -> ResizingCost:
        """What pruning costs; proportional to FLOPs until :meth:`pretest`."""
        return self._estimate.cost

    @property
    def overhead_s(self) -> float:
        """Seconds that timing cost in the last step."""
        return self._timer.overhead_s

    def begin_step(self, spared_share: float, borrowed_share: float, is_exact: bool) -> None:
        """A step begins under a plan that spares this rank a share of its products and adds one of others'."""
        self._timer.begin_step(spared_share, borrowed_share, is_exact)

    def end_step(self) -> None:
        """The step is over."""
        self._interval += self._timer.end_step()

    def pretest(self) -> None:
        """Measure what pruning costs on the shapes of the step that has just ended; takes about a second.

        Once, and not again after resuming.
        """
        if self._is_pretested:
            return
        self._estimate.pretested = measure_resizing_cost(self._layers, self._config)
        self._is_pretested = True
        cost = self._estimate.pretested
        logger.info(
            "pre-test of pruning: at γ = %.2f multiplications take %.2f of their time, gathers and fills %.1f ms",
            cost.max_ratio,
            cost.gemm_share[-1],
            1e3 * cost.overhead_s[-1],
        )

    def learn(self) -> None:
        """Full-work times, and what pruning costs, from the interval that ends."""
        self._estimate.learn(self._interval)
        self._interval = []

    def state_dict(self) -> dict[str, Any]:
        """This rank's own, plain values."""
        return {
            "is_pretested": self._is_pretested,
            "estimate": self._estimate.state_dict(),
            "interval": [dataclasses.astuple(step) for step in self._interval],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self._is_pretested = state["is_pretested"]
        self._interval = [StepTimes(*values) for values in state["interval"]]
        self._estimate.load_state_dict(state["estimate"])


def _detach(timer: StepTimer, layers: list[BalancedLinear]) -> None:
    timer.close()
    for layer in layers:
        layer.probes.remove(timer)
