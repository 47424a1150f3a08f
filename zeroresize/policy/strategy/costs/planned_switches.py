"""What the switches between strategies send, planned once for each pair, and how long they take.

``R`` ranks, ``S`` strategies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.layout import Indices, Layout, TensorSpec
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds, SwitchPlan, fused_seconds


class PlannedSwitches:
    """Plans switches when they are asked for.

    Args:
        tensors: of the whole model; gradients are as large as weights.
        nodes: [R] on which node each rank is.
        links: of the ranks.
        num_layers: of the model.
    """

    def __init__(self, tensors: Sequence[TensorSpec], nodes: Sequence[int], links: LinkSpeeds, num_layers: int) -> None:
        self._tensors, self._nodes, self._links, self._num_layers = tensors, nodes, links, num_layers
        self._layouts: dict[Strategy, Layout] = {}
        self._weight_bytes: dict[Strategy, Indices] = {}
        self._plans: dict[tuple[Strategy, Strategy, bool], SwitchPlan] = {}
        self._seconds: dict[tuple[Strategy, Strategy, Strategy], float] = {}

    def weights(self, before: Strategy, after: Strategy) -> SwitchPlan:
        """Return the switch of the weights alone."""
        return self._plan(before, after, are_gradients=False)

    def plans(self, before: Strategy, after: Strategy, optimizer_strategy: Strategy) -> list[SwitchPlan]:
        """Return what travels: weights and, from another strategy than the optimizer's, gradients to that."""
        plans = [self.weights(before, after)]
        if before != optimizer_strategy:
            plans.append(self._plan(before, optimizer_strategy, are_gradients=True))
        return plans

    def seconds(self, strategies: Sequence[Strategy], optimizer_strategy: int) -> NDArray[np.float64]:
        """Return [S, S] seconds of switching from the strategy of the row to that of the column, 0 on the diagonal.

        Args:
            optimizer_strategy: its number among the strategies.
        """
        seconds = np.zeros((len(strategies), len(strategies)))
        for before, after in itertools.permutations(range(len(strategies)), 2):
            key = strategies[before], strategies[after], strategies[optimizer_strategy]
            if key not in self._seconds:
                self._seconds[key] = fused_seconds(self.plans(*key), self._links)
            seconds[before, after] = self._seconds[key]
        return seconds

    def weight_bytes(self, strategy: Strategy) -> Indices:
        """Return [R] bytes of weights of each rank."""
        if strategy not in self._weight_bytes:
            self._weight_bytes[strategy] = self._layout(strategy).rank_bytes(self._tensors)
        return self._weight_bytes[strategy]

    def _layout(self, strategy: Strategy) -> Layout:
        if strategy not in self._layouts:
            self._layouts[strategy] = strategy.layout(self._tensors, len(self._nodes), self._num_layers)
        return self._layouts[strategy]

    def _plan(self, before: Strategy, after: Strategy, *, are_gradients: bool) -> SwitchPlan:
        key = before, after, are_gradients
        if key not in self._plans:
            plan = plan_gradients if are_gradients else plan_weights
            self._plans[key] = plan(self._layout(before), self._layout(after), self._tensors, self._nodes)
        return self._plans[key]


def most_bytes_of(plan: SwitchPlan) -> int:
    """Return the bytes of the rank that sends or receives most."""
    sent, received = plan.sent_within + plan.sent_between, plan.received_within + plan.received_between
    return int(max(sent.max(), received.max()))
