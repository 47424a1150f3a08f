"""Keeps a training in planned micro-batches fast while ranks are slow: measures, decides, plans otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from zeroresize.measure.clocks import Clock
from zeroresize.microbatch.planners import RunPlanners
from zeroresize.microbatch.trainer import IterationReport, MicroBatchTrainer
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.plan import Indices, IterationPlan, whole_lengths
from zeroresize.policy.microbatches.replanned_costs import PlannedModel, ReplannedCosts
from zeroresize.policy.moves.rental import MIN_SAVING
from zeroresize.policy.strategy.stragglers.decision import TOLERANCE, StrategyProposal
from zeroresize.resharding.agreement import agreed, meet_over
from zeroresize.strategy.model import tell_ranks
from zeroresize.strategy.straggler_balancing import SHARES, StragglerBalancing
from zeroresize.telemetry import ChangeRecord
from zeroresize.utils.checked import checked, real
from zeroresize.utils.hashing import digest


@checked(tell=lambda given, error: tell_ranks(given["trainer"].model, error), **SHARES, optimizer_ratio=real(least=0.0))
class MicroBatchBalancer(StragglerBalancing[IterationPlan]):
    """Gives slow replicas fewer samples and slow stages fewer layers, and takes both back, when that pays::

        balancer = MicroBatchBalancer(trainer, planners)
        for iteration, samples in enumerate(batches):
            print(balancer.step(samples, lengths_of(samples)).loss)

    Each rank's busy seconds, without waits, are compared with what its part of the iteration should have taken by the
    costs that plans are made with. The numbers travel while the next iteration runs; after it all ranks decide alike
    (:mod:`zeroresize.policy.strategy.stragglers.decision`). What working that out takes is measured, and what
    iterations take is worked out anew so seldom that it is at most 1 % of training. Results stay those of training
    undivided.

    Its constructor and :meth:`step` are collective.

    Args:
        trainer: whose plans come from ``planners``; nobody else changes its strategy.
        planners: of the run.
        tolerance, min_saving, probe, clock, on_change: as of :class:`~zeroresize.strategy.StrategyBalancer`.
        optimizer_ratio: bytes of optimizer state for a byte of weights; 2 for Adam in the precision of the weights.

    Raises:
        ValueError: for values that are not allowed; on all ranks, if they differ in them; for an optimizer that sees
            whole matrices, as Muon does: the other ranks may raise a RuntimeError then.
        RuntimeError: if a rank does not come.
    """

    def __init__(
        self,
        trainer: MicroBatchTrainer,
        planners: RunPlanners,
        *,
        tolerance: float = TOLERANCE,
        min_saving: float = MIN_SAVING,
        optimizer_ratio: float = 2.0,
        probe: Callable[[], float] | None = None,
        clock: Clock | None = None,
        on_change: Callable[[ChangeRecord], object] | None = None,
    ) -> None:
        model, planner = trainer.model, planners.planner
        self._trainer, self._planners = trainer, planners
        self._change_s: float | None = None  # of a change whose first plan has not come yet
        of_model = model.optimizer_strategy, model.num_layers, model.tensors, model.nodes
        planned = PlannedModel(*of_model, self._usual_lengths(), planner.table.longest, optimizer_ratio)
        self._replanned = ReplannedCosts(planned, planner.table.costs, planner.options)
        agreement = {
            "the planner": planner.fingerprint,
            "tolerance, min_saving or optimizer_ratio": f"{tolerance} {min_saving} {optimizer_ratio}",
            "the strategy": digest(str(model.optimizer_strategy)).hex(),
        }
        strategies = (model.optimizer_strategy,)
        options = tolerance, min_saving, probe, clock, on_change, self._replanned.as_planned_s
        super().__init__(trainer, "micro-batches", strategies, self._replanned, agreement, *options)

    @property
    def strategy(self) -> Strategy:
        """Return the one in force."""
        return self.in_force[0]

    def step(self, samples: Sequence[Any], lengths_NA: Indices) -> IterationReport:
        """Make one iteration of the trainer; layers and samples may be shared out otherwise behind it.

        Raises:
            Exception: as :meth:`MicroBatchTrainer.step <zeroresize.microbatch.trainer.MicroBatchTrainer.step>`, as
                ``model.move_optimizer``, except that memory that does not suffice leaves everything as it is, and as
                :meth:`RunPlanners.restart <zeroresize.microbatch.planners.RunPlanners.restart>`.
        """
        begin = time.perf_counter()
        plan = self._trainer.fetch(samples, lengths_NA)
        if self._change_s is not None:  # what a change takes is known once the first plan of the new planners is there
            table = self._exchange.meet(self._change_s + time.perf_counter() - begin, 0.0)
            self._decision.learn(max(seconds for seconds, _ in table))
            self._change_s = None
        work_s = self._replanned.work_s(plan, self.strategy, self._model.rank)
        self._begin(has_part=work_s > 0.0)
        report = self._trainer.carry_out(plan, samples, lengths_NA, begin=begin)
        self._end(plan, work_s, report.seconds)
        return report

    def _decide(self) -> None:
        if not self._planners.is_over(self._trainer.num_steps):
            super()._decide()

    def _carry_out(self, proposal: StrategyProposal, speeds: tuple[float, ...]) -> int:
        (strategy,), received = proposal.candidate.strategies, 0
        if strategy != self.strategy:
            received = self._trainer.change_strategy(strategy)
        planner = replace(
            self._planners.planner,
            boundaries=strategy.partition(self._model.num_layers).boundaries,
            options=self._replanned.options_of(strategy, speeds),
        )
        self._planners.restart(planner, self._trainer.num_steps)
        self._costs.expect(())
        self._newest.clear()
        self._cadence.begin_anew()
        return received

    def _note_change(self, change_s: float) -> None:
        self._change_s = change_s

    def _usual_lengths(self) -> tuple[int, ...]:
        """[A] the mean of the next iteration's samples; collective, as all hear where a rank cannot tell."""
        planner, model = self._planners.planner, self._trainer.model
        meet = meet_over(model.process_group, model.device)
        iteration, what = self._trainer.num_steps, "the next iteration's lengths"
        lengths, _ = agreed(meet, lambda: whole_lengths(planner.lengths_of(iteration)).mean(axis=0), what=what)
        return tuple(lengths.round().astype(int).tolist())
