"""Keeps a training in planned micro-batches fast while ranks are slow: measures, decides, plans otherwise."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from zeroresize.measure.clocks import Clock
from zeroresize.measure.links import measure_move_cost
from zeroresize.microbatch.run_planners import RunPlanners
from zeroresize.microbatch.trainer import IterationReport, MicroBatchTrainer
from zeroresize.optim.independence import why_not_elementwise
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.microbatches.micro_batch import Indices
from zeroresize.policy.microbatches.replanned_costs import PlannedModel
from zeroresize.policy.microbatches.straggler_decision import MicroBatchDecision, MicroBatchState, Replanning
from zeroresize.policy.moves.least_saving import MIN_SAVING
from zeroresize.policy.strategy.stragglers.decision import TOLERANCE
from zeroresize.policy.strategy.stragglers.rank_speeds import RankSpeeds
from zeroresize.resharding.agreement import NotEnoughMemoryError, meet_over, meet_prepared
from zeroresize.strategy.setup_cost import slowest_setup_s
from zeroresize.strategy.speed_meter import SpeedMeter
from zeroresize.utils.codec import loaded, saved
from zeroresize.utils.fingerprint import digest

logger = logging.getLogger(__name__)

#: Seconds for which training waits for other plans, before that was seen.
REPLAN_S = 0.2


@dataclass(frozen=True)
class _State:
    """What a balancer goes on from."""

    steps: int
    speeds: RankSpeeds
    decision: MicroBatchState


@dataclass(frozen=True)
class ReplanRecord:
    """Tells of a decision what was done, and what it took; plain numbers, the same on every rank.

    Attributes:
        step: how many iterations were over.
        what: "replan", or what became of the strategy, such as "rearrange" or "original".
        speeds: of all ranks, as they were believed to be.
        before, after: the strategy, as plain values.
        step_s, expected_step_s: seconds of an iteration before and after, by the model of costs.
        change_s: seconds that it took, or was to take where ``is_made`` is false; without those for which the next
            iteration waits for its plan.
        moved_bytes: that all ranks together received.
        is_made: false where memory did not suffice: then everything is as it was.
    """

    step: int
    what: str
    speeds: tuple[float, ...]
    before: dict[str, Any]
    after: dict[str, Any]
    step_s: float
    expected_step_s: float
    change_s: float
    moved_bytes: int
    is_made: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; the key ``kind`` is "micro-batches"."""
        return {"kind": "micro-batches", **asdict(self)}

    def scalars(self) -> dict[str, float]:
        """Return numbers under ``microbatch/``, by name."""
        return {
            "microbatch/step_s": self.step_s,
            "microbatch/expected_step_s": self.expected_step_s,
            "microbatch/change_s": self.change_s,
            "microbatch/moved_bytes": float(self.moved_bytes),
        }


class MicroBatchBalancer:
    """Gives slow replicas fewer samples and slow stages fewer layers, and takes both back, when that pays::

        balancer = MicroBatchBalancer(trainer, planners)
        for iteration, samples in enumerate(batches):
            print(balancer.step(samples, lengths_of(samples)).loss)

    Each rank's busy seconds, without waits, are compared with what its part of the iteration should have taken by the
    costs that plans are made with. The numbers travel while the next iteration runs; after it all ranks decide alike
    (:mod:`zeroresize.policy.microbatches.straggler_decision`). What working that out takes is measured, and what
    iterations take is worked out anew so seldom that it is at most 1 % of training. Results stay those of training
    undivided.

    Its constructor and :meth:`step` are collective.

    Args:
        trainer: whose plans come from ``planners``; nobody else changes its strategy.
        planners: of the run.
        tolerance, min_saving: as of :class:`~zeroresize.policy.strategy.stragglers.decision.StragglerDecision`.
        optimizer_ratio: bytes of optimizer state for a byte of weights; 2 for Adam in the precision of the weights.
        probe: ``probe()`` gives seconds of a few products on this rank; None for products on its device.
        clock: for the busy seconds; None for that of the model's device.
        on_change: is given a :class:`ReplanRecord` after each decision that was carried out or could not be, on every
            rank.

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
        on_change: Callable[[ReplanRecord], object] | None = None,
    ) -> None:
        model, planner = trainer.model, planners.planner
        self._trainer, self._planners, self._model, self._on_change = trainer, planners, model, on_change
        self._kept = tuple(model.strategies)
        planned = PlannedModel(
            model.optimizer_strategy,
            model.num_layers,
            model.tensors,
            model.nodes,
            self._usual_lengths(),
            planner.table.longest,
            optimizer_ratio,
        )
        agreement = {
            "the planner": planner.fingerprint,
            "tolerance, min_saving or optimizer_ratio": f"{tolerance} {min_saving} {optimizer_ratio}",
            "the strategy": digest(str(model.optimizer_strategy)).hex(),
        }
        self._meter = SpeedMeter(model, agreement, probe=probe, clock=clock)
        self.close = self._meter.close
        links = measure_move_cost(model.process_group, model.device)
        self._decision = MicroBatchDecision(
            planned,
            planner.table.costs,
            planner.options,
            replan_s=REPLAN_S,
            cost=replace(links, setup_s=slowest_setup_s(model)),
            tolerance=tolerance,
            min_saving=min_saving,
        )
        self._changing: tuple[Replanning, float] | None = None  # with its seconds without the wait for the next plan

    @property
    def steps(self) -> int:
        """Return how many are over."""
        return self._meter.num_steps

    @property
    def strategy(self) -> Strategy:
        """Return the one in force."""
        return self._decision.strategy

    def step(self, samples: Sequence[Any], lengths_NA: Indices) -> IterationReport:
        """Make one iteration of the trainer; layers and samples may be shared out otherwise behind it.

        Raises:
            Exception: as :meth:`MicroBatchTrainer.step <zeroresize.microbatch.trainer.MicroBatchTrainer.step>`, as
                ``model.move_optimizer``, except that memory that does not suffice leaves everything as it is, and as
                :meth:`RunPlanners.restart <zeroresize.microbatch.run_planners.RunPlanners.restart>`.
        """
        begin = time.perf_counter()
        plan = self._trainer.fetch(samples, lengths_NA)
        self._note_change(time.perf_counter() - begin)
        work_s = self._decision.costs.work_s(plan, self.strategy, self._model.rank)
        self._meter.begin(has_part=work_s > 0.0)
        report = self._trainer.carry_out(plan, samples, lengths_NA, begin=begin)
        with self._meter.working():
            self._decision.expect(plan)
        if self._meter.end(work_s, report.seconds):
            self._decision.take_cost(*self._meter.worked)
            self._decide()
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned and is owed; plain values, the same on every rank."""
        return saved(_State(self.steps, self._meter.learned, self._decision.state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, between two iterations, on every rank alike; the strategy stays as it is.

        Raises:
            ValueError: naming what does not fit; nothing is taken over then.
        """
        learned = loaded(_State, state, "state")
        self._decision.go_on_from(learned.decision)
        self._meter.go_on_from(learned.speeds, learned.steps)

    def _usual_lengths(self) -> tuple[int, ...]:
        """[A] the mean of the next iteration's samples, once all ranks may change their strategies; collective."""
        model, lengths = self._model, np.zeros(0)
        prepared: tuple[float, float] | Exception = 0.0, 0.0
        try:
            reason = why_not_elementwise(self._trainer.optimizer, model.parameters())
            if reason is not None:
                raise ValueError(
                    f"where ranks are slow, layers move with what the optimizer keeps of them, but {reason}"
                )
            lengths = np.asarray(self._planners.planner.lengths_of(self._trainer.num_steps)).mean(axis=0)
        except Exception as error:  # the others must hear of any
            prepared = error
        meet_prepared(meet_over(model.process_group, model.device), prepared)
        return tuple(lengths.round().astype(int).tolist())

    def _note_change(self, wait_s: float) -> None:
        """What a change takes is known once the first plan of the new planners is there."""
        if self._changing is None:
            return
        replanning, seconds = self._changing
        self._changing = None
        table = self._meter.exchange.meet(seconds + wait_s, 0.0)
        self._decision.learn(replanning, max(each for each, _ in table))

    def _decide(self) -> None:
        speeds = self._meter.speeds
        with self._meter.working():
            replanning = None if speeds is None or self._changing is not None else self._decision.update(speeds)
        is_last = self._planners.is_over(self._trainer.num_steps)
        if replanning is None or speeds is None or is_last:
            return
        before, begin = self.strategy, time.perf_counter()
        received, is_made = 0, True
        try:
            if replanning.strategy != before:
                received = self._trainer.change_strategy(replanning.strategy)
        except NotEnoughMemoryError:  # on every rank, and nothing has moved
            self._decision.refuse()
            is_made = False
        self._forget_others(replanning.strategy if is_made else before)
        seconds, moved_bytes = replanning.switch_s, 0
        if is_made:
            planner = replace(
                self._planners.planner,
                boundaries=replanning.strategy.partition(self._model.num_layers).boundaries,
                options=replanning.options,
            )
            self._planners.restart(planner, self._trainer.num_steps)
            table = self._meter.exchange.meet(time.perf_counter() - begin, float(received))
            seconds, moved_bytes = max(each for each, _ in table), int(math.fsum(each for _, each in table))
            self._decision.made(replanning)
            self._changing = replanning, seconds
        record = ReplanRecord(
            self._trainer.num_steps,
            replanning.kind,
            speeds,
            before.as_dict(),
            replanning.strategy.as_dict(),
            replanning.step_s + replanning.saving_s,
            replanning.step_s,
            seconds,
            moved_bytes,
            is_made,
        )
        self._tell(record, replanning)

    def _forget_others(self, in_force: Strategy) -> None:
        """Those that came for slow ranks; what the caller gave the model stays, as it will be wanted again."""
        for strategy in self._model.strategies:
            if strategy not in (*self._kept, in_force):
                self._model.forget(strategy)

    def _tell(self, record: ReplanRecord, replanning: Replanning) -> None:
        if self._model.rank == 0:
            logger.info(
                "iteration %d: %s: %s; expected iteration %.0f -> %.0f ms, in %.2f s%s",
                record.step,
                record.what,
                replanning.strategy,
                1e3 * record.step_s,
                1e3 * record.expected_step_s,
                record.change_s,
                "" if record.is_made else ": not made, memory does not suffice",
            )
        if self._on_change is not None:
            self._on_change(record)
