"""In mode "off": what every other mode would decide from the same numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from zeroresize.config import BalanceConfig
from zeroresize.config_keys import MIGRATING_MODES, MODES, PRUNING_MODES
from zeroresize.plan import WorkloadPlan
from zeroresize.policy.communication import CollectiveTimes
from zeroresize.policy.controller import Controller
from zeroresize.policy.times import RankTimes

#: Modes that decide alike are tried once: those that only prune differ in the columns, not in how many.
_KIND_OF_MODE = {mode: mode if mode in MIGRATING_MODES else PRUNING_MODES[0] for mode in MODES if mode != "off"}
#: So many updates settle a controller; what is older does not have to be kept until somebody asks.
_MOST_UPDATES = 4


class WhatIf:
    """A controller for each kind of mode, which decides when somebody asks; none in another mode than "off".

    Args:
        config: of the run.
        num_ranks: size of the group.
    """

    def __init__(self, config: BalanceConfig, num_ranks: int) -> None:
        kinds = dict.fromkeys(_KIND_OF_MODE.values()) if config.mode == "off" else {}
        self._controllers = {kind: Controller(_deciding(config, kind), num_ranks) for kind in kinds}
        self._plans = {kind: controller.initial_plan() for kind, controller in self._controllers.items()}
        self._untold: deque[tuple[Sequence[RankTimes], CollectiveTimes]] = deque(maxlen=_MOST_UPDATES)

    def update(self, samples: Sequence[RankTimes], collectives: CollectiveTimes) -> None:
        """Take what :meth:`Controller.update` takes."""
        if self._controllers:
            self._untold.append((samples, collectives))

    def plans(self) -> dict[str, WorkloadPlan]:
        """What each mode would do after the updates so far, by mode."""
        for told in self._untold:
            self._plans = {kind: controller.update(*told) for kind, controller in self._controllers.items()}
        self._untold.clear()
        return {mode: self._plans[kind] for mode, kind in _KIND_OF_MODE.items() if kind in self._plans}

    def states(self) -> list[dict[str, Any]]:
        """Of the controllers, plain values."""
        self.plans()
        return [controller.state_dict() for controller in self._controllers.values()]

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from :meth:`states`; there are none where they were saved in another mode."""
        self._untold.clear()
        for controller, state in zip(self._controllers.values(), states, strict=False):
            controller.load_state_dict(state)
        self._plans = {kind: controller.current_plan() for kind, controller in self._controllers.items()}


def _deciding(config: BalanceConfig, mode: str) -> BalanceConfig:
    """What decides how much in another mode as it is configured; which columns is nobody's question here."""
    return config.in_mode(mode, ratio="auto", ranks="stragglers", pridiff_rule="budget")
