"""In mode "off": what every other mode would decide from the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MIGRATING_MODES, MODES, PRUNING_MODES
from zeroresize.plan.group import WorkloadPlan
from zeroresize.plan.ownership import SegmentWork
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.utils.texts import percent_text

#: Modes that decide alike are tried once: those that only prune differ in the columns, not in how many.
_KIND_OF_MODE = {mode: mode if mode in MIGRATING_MODES else PRUNING_MODES[0] for mode in MODES if mode != "off"}


class WhatIf:
    """Hold a controller for each kind of mode where the mode is "off", else none; all ranks have the same."""

    def __init__(self, config: BalanceConfig, num_ranks: int, segments: Sequence[SegmentWork] = ()) -> None:
        kinds = dict.fromkeys(_KIND_OF_MODE.values()) if config.mode == "off" else {}
        self._controllers = {kind: Controller(_deciding(config, kind), num_ranks, segments) for kind in kinds}
        self._plans = {kind: controller.initial_plan() for kind, controller in self._controllers.items()}

    def update(self, samples: Sequence[RankTimes], collectives: CollectiveTimes) -> None:
        """Let every controller decide, as :meth:`Controller.update` does."""
        for kind, controller in self._controllers.items():
            self._plans[kind] = controller.update(samples, collectives)

    @property
    def plans(self) -> dict[str, WorkloadPlan]:
        """Return the plans of the last update at which each decided, by mode."""
        return {mode: self._plans[kind] for mode, kind in _KIND_OF_MODE.items() if kind in self._plans}

    @property
    def verdicts(self) -> dict[str, str]:
        """Return why units would have moved or stayed, or why a mode that moves none spares nobody; else nothing."""
        plans = {mode: kind for mode, kind in _KIND_OF_MODE.items() if kind in self._plans}
        return {mode: verdict_on(self._controllers[kind], self._plans[kind]) for mode, kind in plans.items()}

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """Return the controllers, one for each kind of mode."""
        return tuple(self._controllers.values())

    def go_on_with(self, controllers: Sequence[Controller]) -> None:
        """Go on with controllers that were loaded; there are none where they were saved in another mode."""
        self._controllers.update(zip(self._controllers, controllers, strict=False))
        self._plans = {kind: controller.current_plan() for kind, controller in self._controllers.items()}


def verdict_on(controller: Controller, plan: WorkloadPlan) -> str:
    """Return why units would have moved or stayed by a plan, or why it spares nobody; else nothing."""
    if controller.bounds is None:
        return "not all ranks have been measured yet"
    if controller.verdict or any(rank.spared for rank in plan.ranks):
        return controller.verdict
    if not any(rank.is_straggler for rank in plan.ranks):
        return "no rank has been slow for long enough, beyond noise"
    most = percent_text(max(1.0 - controller.bounds.of_products / controller.predict_step_s(plan), 0.0))
    return f"no change is worth its cost: balanced products divided by speed make steps {most} shorter at most"


def _deciding(config: BalanceConfig, mode: str) -> BalanceConfig:
    """What decides how much in another mode as it is configured; which columns is nobody's question here."""
    return config.in_mode(mode, ratio="auto", ranks="stragglers", paper={"pridiff_rule": "budget"})
