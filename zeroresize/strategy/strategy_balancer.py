"""Keeps a training with strategies fast while ranks are slow: measures, decides, changes strategies.

``G`` ranges of lengths, ``R`` ranks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from zeroresize.measure.clocks import Clock
from zeroresize.measure.links import measure_move_cost
from zeroresize.optim.independence import why_not_elementwise
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.moves.least_saving import MIN_SAVING
from zeroresize.policy.strategy.costs.cost_model import CostModel
from zeroresize.policy.strategy.stragglers.costs import StragglerCosts
from zeroresize.policy.strategy.stragglers.decision import (
    TOLERANCE,
    StragglerDecision,
    StragglerState,
    StrategyProposal,
)
from zeroresize.policy.strategy.stragglers.rank_speeds import RankSpeeds
from zeroresize.policy.strategy.stragglers.sample_cadence import SampleCadence
from zeroresize.resharding.agreement import NotEnoughMemoryError, meet_over, meet_prepared
from zeroresize.strategy.setup_cost import slowest_setup_s
from zeroresize.strategy.speed_meter import SpeedMeter
from zeroresize.strategy.step_report import StepReport
from zeroresize.strategy.straggler_record import StragglerRecord
from zeroresize.strategy.trainer import StrategyTrainer
from zeroresize.utils.codec import loaded, saved
from zeroresize.utils.fingerprint import digest

logger = logging.getLogger(__name__)

#: Steps are expected to be like so many of the newest ones.
_SAMPLE = 4


@dataclass(frozen=True)
class _State:
    """What a balancer goes on from."""

    steps: int
    speeds: RankSpeeds
    decision: StragglerState


class StrategyBalancer:
    """Changes a trainer's strategies where ranks are slow, and back, when that saves more than the switch takes::

        balancer = StrategyBalancer(trainer, cost)
        for sequences in batches:
            print(balancer.step(sequences).loss)

    Each rank's busy seconds, without waits, are compared with what its part of the step should have taken. The numbers
    travel while the next step runs; after it all ranks decide alike
    (:mod:`zeroresize.policy.strategy.stragglers.decision`). What working that out takes is measured, and what steps
    take is worked out anew so seldom that it is at most 1 % of training; nothing is while no rank is slow.

    A rank that was left out takes part in :meth:`step`, has nothing to train, and looks how fast it is by a few
    products, so that it comes back when it is fast again. Strategies that come for slow ranks are given to the model,
    and forgotten when no range has them. Results stay those of training under one strategy.

    Its constructor and :meth:`step` are collective.

    Args:
        trainer: the strategy of its model's optimizer must be the strategy of a range. Nobody else changes its ranges.
        cost: of the model and the cluster; only its seconds relative to each other, its links and sizes count. What
            changes of strategies take is measured over the links and by the strategies that the model has set up, and
            learned from each.
        limit_bytes: memory of a rank for weights, gradients, optimizer state and activations.
        tolerance, min_saving: as of :class:`~zeroresize.policy.strategy.stragglers.decision.StragglerDecision`.
        probe: ``probe()`` gives seconds of a few products on this rank; None for products on its device.
        clock: for the busy seconds; None for that of the model's device.
        on_change: is given a :class:`~zeroresize.strategy.straggler_record.StragglerRecord` after each
            decision that was carried out or could not be, on every rank.

    Raises:
        ValueError: for values that are not allowed, and where the optimizer's strategy is the strategy of no range; on
            all ranks, if they differ in the values; for an optimizer that sees whole matrices, as Muon does, since
            another strategy of the optimizer may divide them: the other ranks may raise a RuntimeError then.
        RuntimeError: if a rank does not come.
    """

    def __init__(
        self,
        trainer: StrategyTrainer,
        cost: CostModel,
        *,
        limit_bytes: float = math.inf,
        tolerance: float = TOLERANCE,
        min_saving: float = MIN_SAVING,
        probe: Callable[[], float] | None = None,
        clock: Clock | None = None,
        on_change: Callable[[StragglerRecord], object] | None = None,
    ) -> None:
        model, strategies = trainer.model, [one.strategy for one in trainer.ranges]
        if model.optimizer_strategy not in strategies:
            raise ValueError(
                f"the optimizer's strategy {model.optimizer_strategy} is the strategy of no range: "
                f"{', '.join(map(str, strategies))}"
            )
        self._require_any_optimizer_strategy(trainer)
        self._trainer, self._model, self._optimizer_strategy = (
            trainer,
            model,
            strategies.index(model.optimizer_strategy),
        )
        self._costs = StragglerCosts(
            cost, trainer.ranges, optimizer_strategy=self._optimizer_strategy, limit_bytes=limit_bytes
        )
        self._decision = StragglerDecision(
            strategies, self._costs.division, self._costs, tolerance=tolerance, min_saving=min_saving
        )
        self._sample: deque[list[int]] = deque(maxlen=_SAMPLE)
        self._cadence = SampleCadence(_SAMPLE)
        self._on_change = on_change
        self._kept = tuple(model.strategies)
        agreement = {f"cost.{one.name}": digest(repr(getattr(cost, one.name))).hex() for one in fields(cost)} | {
            "the ranges": " | ".join(f"{one}, max_tokens {one.max_tokens}" for one in trainer.ranges),
            "limit_bytes, tolerance or min_saving": f"{limit_bytes} {tolerance} {min_saving}",
        }
        self._meter = SpeedMeter(model, agreement, probe=probe, clock=clock)
        links = measure_move_cost(model.process_group, model.device)
        self._decision.cost = replace(links, setup_s=slowest_setup_s(model))
        self.close = self._meter.close

    @staticmethod
    def _require_any_optimizer_strategy(trainer: StrategyTrainer) -> None:
        """Collective."""
        model = trainer.model
        prepared: tuple[float, float] | Exception = 0.0, 0.0
        reason = why_not_elementwise(trainer.optimizer, model.parameters())
        if reason is not None:
            prepared = ValueError(
                f"where ranks are slow, another strategy of the optimizer may divide what it steps, but {reason}"
            )
        meet_prepared(meet_over(model.process_group, model.device), prepared)

    @property
    def steps(self) -> int:
        """Return how many are over."""
        return self._meter.num_steps

    @property
    def in_force(self) -> tuple[Strategy, ...]:
        """Return [G] the strategies of the ranges."""
        return self._decision.in_force

    def step(self, sequences: Sequence[Tensor]) -> StepReport:
        """Make one step of the trainer; the strategies of the ranges and the optimizer may be others behind it.

        Raises:
            Exception: as :meth:`StrategyTrainer.step <zeroresize.strategy.trainer.StrategyTrainer.step>`, and as
                ``model.move_optimizer``, except that memory that does not suffice leaves everything as it is.
        """
        lengths = [len(one) - 1 for one in sequences]
        has_part = any(one.position_of(self._model.rank) is not None for one in self.in_force)
        self._meter.begin(has_part=has_part)
        report = self._trainer.step(sequences)
        work_s = self._costs.rank_s(self.in_force, lengths, self._model.rank)
        self._sample.append(lengths)
        if self._cadence.is_due():
            with self._meter.working():
                self._costs.expect(list(self._sample))
                self._decision.look_again()
        if self._meter.end(work_s, report.seconds):
            self._cadence.learn(*self._meter.worked)
            self._decide()
        return report

    def what_if(self) -> tuple[StrategyProposal, ...]:
        """Return what each candidate would bring now, the first being to stay; empty before speeds are known."""
        speeds = self._meter.speeds
        return () if speeds is None else self._decision.what_if(speeds)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned and is owed; plain values, the same on every rank."""
        return saved(_State(self.steps, self._meter.learned, self._decision.state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, between two steps, on every rank alike.

        The trainer keeps its strategies: where they are others than they were, what was owed for changing those is
        forgotten.

        Raises:
            ValueError: naming what does not fit; nothing is taken over then.
        """
        learned = loaded(_State, state, "state")
        self._decision.go_on_from(learned.decision)
        self._meter.go_on_from(learned.speeds, learned.steps)

    def _decide(self) -> None:
        speeds = self._meter.speeds
        with self._meter.working():
            proposal = None if speeds is None else self._decision.update(speeds)
        if proposal is None or speeds is None:
            return
        before = self.in_force
        switch_s, moved_bytes, is_made = self._carry_out(proposal)
        record = StragglerRecord.of(
            self.steps, proposal, before, speeds, switch_s=switch_s, moved_bytes=moved_bytes, is_made=is_made
        )
        if self._model.rank == 0:
            logger.info(
                "step %d: %s%s: %s; expected step %.0f -> %.0f ms, switch %.2f s%s",
                self.steps,
                proposal.candidate.kind,
                f" {list(proposal.candidate.left_out)}" if proposal.candidate.left_out else "",
                ", ".join(map(str, proposal.candidate.strategies)),
                1e3 * record.step_s,
                1e3 * record.expected_step_s,
                switch_s,
                "" if is_made else ": not made, memory does not suffice",
            )
        if self._on_change is not None:
            self._on_change(record)

    def _carry_out(self, proposal: StrategyProposal) -> tuple[float, int, bool]:
        """(seconds, bytes that all ranks received, whether it was made)"""
        wanted = proposal.candidate.strategies
        begin = time.perf_counter()
        try:
            received = self._trainer.change_strategies(wanted, wanted[self._optimizer_strategy])
        except NotEnoughMemoryError:  # on every rank, and nothing has moved
            self._decision.refuse()
            self._forget_others()
            return proposal.switch_s, 0, False
        table = self._meter.exchange.meet(time.perf_counter() - begin, float(received))
        seconds = max(own for own, _ in table)
        self._decision.made(proposal, seconds)
        self._forget_others()
        return seconds, int(sum(own for _, own in table)), True

    def _forget_others(self) -> None:
        """Those that came for slow ranks and are in no range now."""
        for strategy in self._model.strategies:
            if strategy not in (*self._kept, *self.in_force, self._model.optimizer_strategy):
                self._model.forget(strategy)
