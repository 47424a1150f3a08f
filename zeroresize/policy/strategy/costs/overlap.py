"""What switches cost a step of mixed precision whose messages travel beside training.

It is what ``StrategyTrainer(overlap=True)`` does. ``V`` visits of a step. Times are seconds, memory is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.layout import Layout
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.costs.switch_memory import message_bytes
from zeroresize.policy.strategy.switches.switch_order import visiting_order
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients
from zeroresize.policy.strategy.switches.transfers import SwitchPlan, fused_seconds


class OverlappedSwitches:
    """Finds the seconds by which switches prolong a step.

    Weights travel to the next strategy while the present one trains, behind the gradients of the strategy before. What
    does not fit into memory beside training travels at the switch. No weights travel to the optimizer's strategy, which
    casts its own, and nothing hides the last gradients. Training is taken not to become slower by what travels.

    Args:
        cost: with the bytes of weights as they travel.
        optimizer_strategy: to which gradients return.
        gradient_ratio: bytes of a held gradient for a byte of a weight that travels; 2 for single precision beside 16
            bits.
        gradient_itemsize: bytes of an element of gradients that travel between nodes. Inside nodes they are summed as
            they are held.
        limit_bytes: memory of a rank.
    """

    def __init__(
        self,
        cost: CostModel,
        optimizer_strategy: Strategy,
        *,
        gradient_ratio: float = 2.0,
        gradient_itemsize: int = 4,
        limit_bytes: float = float("inf"),
    ) -> None:
        self._cost, self._optimizer_strategy = cost, optimizer_strategy
        self._gradient_ratio, self._limit_bytes = gradient_ratio, limit_bytes
        self._gradients = [replace(tensor, itemsize=gradient_itemsize) for tensor in cost.tensors]
        self._held_ratio = gradient_ratio * cost.tensors[0].itemsize / gradient_itemsize
        self._gradient_plans: dict[Strategy, SwitchPlan] = {}

    def fits(self, strategy: Strategy, tokens: int, beside: NDArray[Any] | float = 0.0) -> bool:
        """Return whether no rank needs more than the limit to train micro-batches of so many tokens.

        Args:
            beside: [R] bytes that are held besides.
        """
        optimizer_strategy, cost = self._optimizer_strategy, self._cost
        held = cost.memory_bytes(strategy, optimizer_strategy, tokens) + beside
        gradients = cost.weight_bytes(strategy).astype(float)
        if strategy != optimizer_strategy:
            gradients += cost.weight_bytes(optimizer_strategy)
        return float((held + (self._gradient_ratio - 1.0) * gradients).max()) <= self._limit_bytes

    def order(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        """Return the order in which a step visits strategies, as the trainer chooses it."""
        return visiting_order(
            strategies, self._optimizer_strategy, lambda stops: self._cost.switch_seconds(stops, 0), overlap=True
        )

    def seconds(self, visits: Sequence[Strategy], work_s: Sequence[float], tokens: Sequence[int]) -> float:
        """Return the seconds by which switches prolong a step.

        Args:
            visits: [V] the strategies in their order, each once.
            work_s: [V] what each of them trains.
            tokens: [V] of its largest micro-batch.
        """
        optimizer_strategy = self._optimizer_strategy
        prolonged_s, before, has_come = 0.0, optimizer_strategy, False
        for number, strategy in enumerate(visits):
            at_once, beside = list[SwitchPlan](), list[SwitchPlan]()
            extra: NDArray[Any] | float = 0.0
            if before != strategy and not has_come:
                at_once.append(self._cost.weight_plan(before, strategy))
            if before not in (optimizer_strategy, strategy):
                plan = self._gradient_plan(before)
                held: NDArray[Any] = self._gradient_ratio * self._cost.weight_bytes(before) + message_bytes([plan])
                if self.fits(strategy, tokens[number], held):
                    beside, extra = [plan], held
                else:
                    at_once.append(plan)
            after = visits[number + 1] if number + 1 < len(visits) else optimizer_strategy
            has_come = False
            if after != optimizer_strategy:
                plan = self._cost.weight_plan(strategy, after)
                if self.fits(strategy, tokens[number], extra + self._cost.weight_bytes(after) + message_bytes([plan])):
                    beside.append(plan)
                    has_come = True
            beside_s = sum(self._travel_s([plan]) for plan in beside)
            prolonged_s += self._travel_s(at_once) + max(0.0, beside_s - work_s[number])
            before = strategy
        last = [] if before == optimizer_strategy else [self._gradient_plan(before)]
        return prolonged_s + self._travel_s(last)

    def reduction_seconds(self) -> float:
        """Return the seconds of the all-reduce of gradients, as they are held, between the optimizer's replicas."""
        return self._gradient_ratio * self._cost.reduction_seconds(self._optimizer_strategy)

    def _travel_s(self, plans: Sequence[SwitchPlan]) -> float:
        return fused_seconds(plans, self._cost.links) if plans else 0.0

    def _gradient_plan(self, before: Strategy) -> SwitchPlan:
        if before not in self._gradient_plans:
            source, target = self._layout(before), self._layout(self._optimizer_strategy)
            plan = plan_gradients(source, target, self._gradients, self._cost.nodes)
            summed = replace(plan.summed, num_bytes=(self._held_ratio * plan.summed.num_bytes).astype(np.int64))
            self._gradient_plans[before] = replace(plan, summed=summed)
        return self._gradient_plans[before]

    def _layout(self, strategy: Strategy) -> Layout:
        return strategy.layout(self._gradients, self._cost.num_ranks, self._cost.layers.num_layers)
