"""When ranks that are slow get fewer samples or fewer layers: one decision, by the seconds of an iteration.

To plan with new speeds moves nothing: samples are shared out anew, and micro-batches are cut by the pace of the slowest
stage. It costs the plans that were made ahead. What a change of layers saves is counted beyond what new plans save, so
samples and layers never answer the same slowness twice.

Pure: the same speeds give the same decisions on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.iteration_plan import IterationPlan
from zeroresize.policy.microbatches.planning_options import PlanningOptions
from zeroresize.policy.microbatches.replanned_costs import SAMPLE, CostsOfStages, PlannedModel, ReplannedCosts
from zeroresize.policy.moves.least_saving import MIN_SAVING, beyond_noise, is_saving
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.ski_rental import SkiRental
from zeroresize.policy.strategy.stragglers.decision import (
    TOLERANCE,
    StragglerDecision,
    StragglerState,
    StrategyProposal,
)
from zeroresize.policy.strategy.stragglers.sample_cadence import SampleCadence

#: The candidate that moves nothing.
REPLAN = "replan"


@dataclass(frozen=True)
class Replanning:
    """Describe what is to be put in force.

    Attributes:
        kind: "replan", or that of the strategy's candidate, such as "rearrange" or "original".
        strategy: how the model is spread.
        options: of planning, with the speeds that ranks have now.
        step_s, saving_s: seconds of an iteration then, and by how much that is shorter than as it is.
        switch_s: what it takes, as far as is known.
        proposal: of the strategy; None where it stays.
    """

    kind: str
    strategy: Strategy
    options: PlanningOptions
    step_s: float
    saving_s: float
    switch_s: float
    proposal: StrategyProposal | None = None


@dataclass(frozen=True)
class MicroBatchState:
    """Hold what a decision goes on from: what new plans are owed, and the decision on strategies."""

    rental: SkiRental
    decision: StragglerState


class MicroBatchDecision:
    """Decide, step by step, how samples are shared out and which stages have which layers.

    Args:
        model: what is trained.
        costs_of: of stages with given boundaries.
        options: of planning while no rank is slow.
        replan_s: seconds that training waits for new plans.
        cost: of a change of strategy, without waiting for new plans.
        tolerance, min_saving: as of :class:`~zeroresize.policy.strategy.stragglers.decision.StragglerDecision`.

    Attributes:
        costs: tells what iterations take.

    Raises:
        ValueError: for values that are not allowed.
    """

    def __init__(
        self,
        model: PlannedModel,
        costs_of: CostsOfStages,
        options: PlanningOptions,
        *,
        replan_s: float,
        cost: MoveCost,
        tolerance: float = TOLERANCE,
        min_saving: float = MIN_SAVING,
    ) -> None:
        self.costs = ReplannedCosts(model, costs_of, options)
        self._replan, self._min_saving = MoveCost(0.0, replan_s), min_saving
        self._rental = SkiRental()
        self._newest: deque[IterationPlan] = deque(maxlen=SAMPLE)
        self._cadence = SampleCadence(SAMPLE)
        self._is_planned_evenly = True
        self._switched = model.original, model.original  # the strategies before and after the last change
        self._decision = StragglerDecision(
            (model.original,),
            self.costs.division,
            self.costs,
            tolerance=tolerance,
            min_saving=min_saving,
            cost=replace(cost, fixed_s=cost.fixed_s + replan_s),
        )

    @property
    def strategy(self) -> Strategy:
        """Return the one in force."""
        return self._decision.in_force[0]

    def expect(self, plan: IterationPlan) -> None:
        """Expect iterations like this one, the newest, which was planned for the strategy in force."""
        self._newest.append(plan)
        if self._cadence.is_due():
            self.costs.forget()
            for newest in self._newest:
                self.costs.expect(newest)
            self._decision.look_again()

    def take_cost(self, working_s: float, step_s: float) -> None:
        """Take how many seconds the slowest rank has worked in this class since the step before, and those of the step.

        What iterations take is worked out anew as often as that may cost; see
        :class:`~zeroresize.policy.strategy.stragglers.sample_cadence.SampleCadence`.
        """
        self._cadence.learn(working_s, step_s)

    def update(self, speeds: Sequence[float]) -> Replanning | None:
        """Take an iteration made at these speeds and return what is to be put in force now; None where all stays.

        Whoever is given one calls :meth:`made`, or :meth:`refuse`. Nothing is worked out where there is nothing to do:
        all ranks are equally fast, plans are made for that, the original strategy is in force, and nothing is owed.
        """
        proposal = self._decision.update(speeds)
        is_settled = self._decision.is_settled and self._is_planned_evenly and not self._rental.owed_s
        if is_settled and len(set(speeds)) == 1:
            self._rental.next_update()
            return None
        now_s = self.costs.as_planned_s(self.strategy, speeds)
        if proposal is not None:
            strategy, step_s, switch_s = proposal.candidate.strategies[0], proposal.step_s, proposal.switch_s
            options = self.costs.options_of(strategy, speeds)
            return Replanning(proposal.candidate.kind, strategy, options, step_s, now_s - step_s, switch_s, proposal)
        step_s = self._decision.what_if(speeds)[0].step_s
        saving_s = now_s - step_s
        self._rental.next_update()
        self._rental.charge({REPLAN: beyond_noise(saving_s, now_s, self._min_saving)}, 1)
        price_s = self._replan.there_and_back(0.0)
        if not is_saving(saving_s, now_s, self._min_saving) or not self._rental.is_due(REPLAN, price_s):
            return None
        options = self.costs.options_of(self.strategy, speeds)
        return Replanning(REPLAN, self.strategy, options, step_s, saving_s, price_s / 2.0)

    def made(self, replanning: Replanning) -> None:
        """Note that it is in force."""
        self._rental.settle()
        if replanning.proposal is not None:
            self._switched = self.strategy, replanning.strategy
            self._decision.made(replanning.proposal)
        self.costs.forget()
        self._newest.clear()
        self._cadence.begin_anew()
        slowness = {factor for row in replanning.options.slowness for factor in row}
        self._is_planned_evenly = len(slowness) <= 1

    def learn(self, replanning: Replanning, seconds: float) -> None:
        """Take how long the last change took, until the next iteration began."""
        if replanning.proposal is None:
            self._replan = self._replan.learned(0.0, seconds)
        else:
            before, after = self._switched
            self._decision.learn((before,), (after,), seconds)

    def refuse(self) -> None:
        """Note that memory did not suffice: everything is as it was, and nothing is tried for a while."""
        self._decision.refuse()

    @property
    def state(self) -> MicroBatchState:
        """Return what a saved run needs, the same on every rank."""
        return MicroBatchState(self._rental, self._decision.state)

    def go_on_from(self, state: MicroBatchState) -> None:
        """Go on from :attr:`state`; the strategy in force stays."""
        self._decision.go_on_from(state.decision)
        self._rental = state.rental
