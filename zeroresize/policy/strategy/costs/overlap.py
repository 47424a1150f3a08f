"""What switches cost a step where their messages travel beside training, as ``StrategyTrainer(overlap=True)`` does it.

``V`` visits of a step. Times are seconds, memory is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.costs.switch_memory import message_bytes
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients
from zeroresize.policy.strategy.switches.transfers import SwitchPlan, fused_seconds


class OverlappedSwitches:
    """Finds the seconds by which switches prolong a step of mixed precision.

    Weights travel to the next strategy while the present one trains, behind the gradients of the strategy before. What
    does not fit into memory beside training travels at the switch. No weights travel to the optimizer's strategy, which
    casts its own, and nothing hides the last gradients. Training is taken not to become slower by what travels.

    Args:
        cost: with the bytes of weights as they travel.
        optimizer_strategy: to which gradients return.
        gradient_ratio: bytes of a held gradient for a byte of a weight that travels; 2 for single precision beside 16
            bits.
        gradient_itemsize: bytes of an element of gradients that travel.
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

    def seconds(self, visits: Sequence[Strategy], work_s: Sequence[float], tokens: Sequence[int]) -> float:
        """Return the seconds by which switches prolong a step.

        Args:
            visits: [V] the strategies in their order.
            work_s: [V] what each of them trains.
            tokens: [V] of its largest micro-batch.
        """
        prolonged_s, home = 0.0, self._optimizer_strategy
        if visits[0] != home:
            prolonged_s += self._travel_s([self._cost.weight_plan(home, visits[0])])
        for number, strategy in enumerate(visits):
            after = visits[number + 1] if number + 1 < len(visits) else home
            before = visits[number - 1] if number else home
            beside_s = at_once_s = extra = 0.0
            if before != home and strategy != home:
                plan = self._gradient_plan(before)
                held = self._gradient_ratio * self._cost.weight_bytes(before) + message_bytes([plan])
                if self._fits(strategy, tokens[number], held):
                    beside_s, extra = self._travel_s([plan]), held
                else:
                    at_once_s = self._travel_s([plan])
            if after not in (home, strategy):
                plan = self._cost.weight_plan(strategy, after)
                held = self._cost.weight_bytes(after) + message_bytes([plan])
                if self._fits(strategy, tokens[number], extra + held):
                    beside_s += self._travel_s([plan])
                else:
                    at_once_s += self._travel_s([plan])
            prolonged_s += at_once_s + max(0.0, beside_s - work_s[number])
        if visits[-1] != home:
            prolonged_s += self._travel_s([self._gradient_plan(visits[-1])])
        return prolonged_s

    def _travel_s(self, plans: Sequence[SwitchPlan]) -> float:
        return fused_seconds(plans, self._cost.links)

    def _gradient_plan(self, before: Strategy) -> SwitchPlan:
        layouts = (
            one.layout(self._gradients, self._cost.num_ranks, self._cost.layers.num_layers)
            for one in (before, self._optimizer_strategy)
        )
        return plan_gradients(*layouts, self._gradients, self._cost.nodes)

    def _fits(self, strategy: Strategy, tokens: int, beside: object) -> bool:
        home, cost = self._optimizer_strategy, self._cost
        held = cost.memory_bytes(strategy, home, tokens) + beside
        wider = cost.weight_bytes(strategy) + (strategy != home) * cost.weight_bytes(home)
        return float((held + (self._gradient_ratio - 1.0) * wider).max()) <= self._limit_bytes
