"""The order in which a step visits its strategies, by what the switches of this model send."""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.switches.switch_order import visiting_order
from zeroresize.policy.strategy.switches.switch_plan import plan_gradients, plan_weights
from zeroresize.policy.strategy.switches.transfers import LinkSpeeds, fused_seconds
from zeroresize.strategy.model import SwitchableModel

#: Of NVLink and InfiniBand, roughly. Orders depend on their ratio alone, and inside one node on neither.
TYPICAL_LINKS = LinkSpeeds(within_bytes_per_s=200e9, between_bytes_per_s=25e9)


class SwitchTour:
    """Finds the tour from the optimizer's strategy through some strategies and back whose switches take least.

    Args:
        links: of the ranks, the same on all of them.
        overlap: whether weights travel to the next strategy while the present one trains.
    """

    def __init__(self, model: SwitchableModel, links: LinkSpeeds = TYPICAL_LINKS, *, overlap: bool = False) -> None:
        self._model, self._links, self._overlap = model, links, overlap
        self._seconds: dict[tuple[Strategy, Strategy, Strategy], float] = {}

    def order(self, strategies: Sequence[Strategy]) -> list[Strategy]:
        """Return the strategies, the optimizer's first where it is one of them; the same on all ranks.

        Raises:
            ValueError: for more strategies than :mod:`~zeroresize.policy.strategy.switches.switch_order` takes.
        """
        return visiting_order(strategies, self._model.optimizer_strategy, self._seconds_between, overlap=self._overlap)

    def _seconds_between(self, stops: Sequence[Strategy]) -> list[list[float]]:
        return [[0.0 if one == other else self._between(one, other) for other in stops] for one in stops]

    def _between(self, before: Strategy, after: Strategy) -> float:
        model, optimizer_strategy = self._model, self._model.optimizer_strategy
        key = before, after, optimizer_strategy
        if key not in self._seconds:
            old, new, back = (model.layout_of(one) for one in key)
            plans = [plan_weights(old, new, model.tensors, model.nodes)]
            if before != optimizer_strategy:
                plans.append(plan_gradients(old, back, model.tensors, model.nodes))
            self._seconds[key] = fused_seconds(plans, self._links)
        return self._seconds[key]
