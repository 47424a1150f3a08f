"""What balancers of strategies and of micro-batches share: measure a step, decide behind it, carry out, tell of it."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar
from weakref import finalize

import torch

from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.pausing import Pausable, Restraint
from zeroresize.comm.words import Call
from zeroresize.measure.clocks import Clock, clock_for
from zeroresize.measure.links import measure_move_cost
from zeroresize.measure.step_timer import StepTimer
from zeroresize.measure.timed_products import product_seconds
from zeroresize.optim.independence import why_not_elementwise
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.strategy.stragglers.candidates import ModelDivision, StrategyCosts
from zeroresize.policy.strategy.stragglers.decision import (
    REPLAN_COST,
    StragglerDecision,
    StragglerState,
    StrategyProposal,
)
from zeroresize.policy.strategy.stragglers.rank_speeds import RankSpeeds, SampleCadence
from zeroresize.resharding.agreement import NotEnoughMemoryError, agreed, meet_over
from zeroresize.status import Status, ranks_by_speed
from zeroresize.strategy.model import SwitchableModel
from zeroresize.strategy.step_trainer import StepTrainer
from zeroresize.telemetry import ChangeRecord
from zeroresize.utils.checked import Limit, real
from zeroresize.utils.codec import loaded, saved
from zeroresize.utils.texts import duration_text

logger = logging.getLogger(__name__)

#: Steps are expected to be like so many of the newest ones.
SAMPLE = 4
#: In how many seconds a model takes a further strategy, until a change has shown it.
SETUP_S = 0.2
#: A rank without a part looks how fast it is once in so many steps, and one with a part once in so many, so that it is
#: known what that says of training.
PROBE_EVERY, _PROBE_WITH_PART_EVERY = 4, 16
#: By products of weights of this size that take so many seconds, of which the fastest of so many counts.
_PROBE_SIZE, _PROBE_S, _PROBE_REPETITIONS = 256, 0.002, 3

Step = TypeVar("Step")
_Step = TypeVar("_Step", contravariant=True)


class SampledCosts(StrategyCosts, Protocol[_Step]):
    """What steps take that are like some of the newest ones."""

    @property
    def division(self) -> ModelDivision: ...

    def expect(self, newest: Sequence[_Step], /) -> None:
        """Work out anew what steps take that are like these."""


@dataclass(frozen=True)
class _State:
    """What a balancer goes on from."""

    steps: int
    speeds: RankSpeeds
    decision: StragglerState


#: What is allowed for balancers besides the kinds of values.
SHARES: dict[str, Limit] = dict.fromkeys(("tolerance", "min_saving"), real(least=0.0, below=1.0))


class StragglerBalancing(Pausable, ABC, Generic[Step]):
    """The loop of a balancer: it learns the ranks' speeds from what their parts of steps took, without waits, and
    should have taken, decides alike on all ranks, and has the change carried out.

    A rank without a part looks how fast it is by a few products. The constructor is collective.

    Args:
        kind: of its records.
        strategies: [G] of the ranges.
        costs: of steps.
        as_planned_s: as of a decision, where steps are planned ahead.
        agreement: what all ranks must have alike, by names.
        tolerance, min_saving, probe, clock, on_change: as of a balancer.

    Attributes:
        steps: how many are over.
    """

    def __init__(
        self,
        trainer: StepTrainer,
        kind: Literal["strategies", "micro-batches"],
        strategies: Sequence[Strategy],
        costs: SampledCosts[Step],
        agreement: Mapping[str, str],
        tolerance: float,
        min_saving: float,
        probe: Callable[[], float] | None,
        clock: Clock | None,
        on_change: Callable[[ChangeRecord], object] | None,
        as_planned_s: Callable[[Sequence[Strategy], Sequence[float]], float] | None = None,
    ) -> None:
        self._model = model = trainer.model
        _require_any_division(model, trainer.optimizer)
        self._kind, self._costs, self._on_change, self.steps = kind, costs, on_change, 0
        cost = replace(measure_move_cost(model.process_group, model.device), setup_s=SETUP_S)
        if as_planned_s is not None:
            cost = replace(cost, fixed_s=cost.fixed_s + REPLAN_COST.fixed_s)
        self._decision = StragglerDecision(
            strategies,
            costs.division,
            costs,
            tolerance=tolerance,
            min_saving=min_saving,
            cost=cost,
            as_planned_s=as_planned_s,
        )
        self._kept = tuple(model.strategies)
        self._newest: deque[Step] = deque(maxlen=SAMPLE)
        self._cadence = SampleCadence(SAMPLE)
        self._exchange = Exchange(CpuGroup(model.process_group, agreement))
        self._speeds, self.restraint, self._advised = RankSpeeds(len(self._exchange.ranks)), Restraint(), ""
        self._timer = StepTimer(clock or clock_for(model.device))
        self._unread_s: deque[float] = deque()  # of steps whose seconds are not read yet: what they should have taken
        # Steps without a part in a row, what the probe took in this one, and what was worked out since the last one.
        self._steps_without, self._probe_s, self._working_s = 0, 0.0, 0.0
        weight = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=model.device)
        products = partial(product_seconds, weight, least_s=_PROBE_S, repetitions=_PROBE_REPETITIONS)
        self._probe: Callable[[], float] = probe or products
        self.close: Callable[[], object] = finalize(self, _close, self._exchange, self._timer)

    @property
    def in_force(self) -> tuple[Strategy, ...]:
        """Return [G] the strategies of the ranges."""
        return self._decision.in_force

    def what_if(self) -> tuple[StrategyProposal, ...]:
        """Return what each candidate would bring now, the first being to stay; empty before speeds are known."""
        speeds = self._speeds.speeds()
        return () if speeds is None else self._decision.what_if(speeds)

    def status(self) -> Status:
        """Return how fast ranks are, and what was decided and why; the same on every rank.

        Printed it is a table, also in a notebook. Seconds are those of the model of costs; shares are not told, as each
        strategy divides otherwise: those without a part have 0.
        """
        speeds, options = self._speeds.speeds() or (), self.what_if()
        left_out = {rank for rank in range(len(speeds)) if all(rank not in each.ranks for each in self.in_force)}
        return Status(
            kind=self._kind,
            state=self.restraint.state,
            step=self.steps,
            time=time.time(),
            step_s=math.nan,
            expected_step_s=options[0].step_s if options else math.nan,
            even_step_s=math.nan,
            saved_s=math.nan,
            cost_s=0.0,
            ranks=ranks_by_speed(speeds, [0.0 if rank in left_out else math.nan for rank in range(len(speeds))]),
            decided=str(self._decision.verdict),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned and is owed; plain values, the same on every rank."""
        return saved(_State(self.steps, self._speeds, self._decision.state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, between two steps, on every rank alike.

        The trainer keeps its strategies: where they are others than they were, what was owed for changing those is
        forgotten. Of another number of ranks no speeds are taken over.

        Raises:
            ValueError: naming what does not fit; nothing is taken over then.
        """
        state_before = loaded(_State, state, "state")
        self._decision.go_on_from(state_before.decision)
        if state_before.speeds.num_ranks == self._speeds.num_ranks:
            self._speeds = state_before.speeds
        self.steps = state_before.steps
        self._exchange.collect()  # of steps before

    @abstractmethod
    def _carry_out(self, proposal: StrategyProposal, speeds: tuple[float, ...]) -> int:
        """Put a proposal in force, and return the bytes that this rank has received; collective.

        Raises:
            NotEnoughMemoryError: on every rank, and nothing has moved.
        """

    def _begin(self, *, has_part: bool) -> None:
        """Begin to measure what this rank does in a step, in which it has a part or none."""
        every, steps = (_PROBE_WITH_PART_EVERY, self.steps) if has_part else (PROBE_EVERY, self._steps_without)
        self._probe_s = self._probe() if self.restraint.state != "off" and steps % every == PROBE_EVERY - 1 else 0.0
        self._steps_without = 0 if has_part else self._steps_without + 1
        self._timer.begin_step()

    def _end(self, step: Step, work_s: float, step_s: float) -> None:
        """End a step, in which this rank should have computed for ``work_s``, and change what is to change."""
        self._newest.append(step)
        if self.restraint.state != "off" and self._cadence.is_due():
            with self._working():
                self._costs.expect(list(self._newest))
                self._decision.look_again()
        times = self._timer.end_step()
        self._unread_s.append(work_s)
        self.steps += 1
        self._exchange.where.call, self._exchange.where.num_steps = Call.STEP, self.steps
        table = self._exchange.collect()
        # On a device the seconds of a step are read one or more steps later.
        busy = [(each.busy_s, self._unread_s.popleft()) for each in times] or [(0.0, 0.0)]
        self._exchange.post([*busy[-1], self._probe_s, self._working_s, step_s, self.restraint.wish()])
        self._working_s = 0.0
        if table is not None:
            busy_R, expected_R, probe_R, working_R, step_R, wish_R = zip(*table, strict=True)
            self.restraint.agree(wish_R, self.steps, tells=self._model.rank == 0)
            self._speeds.learn(busy_R, expected_R, probe_R)
            self._cadence.learn(max(working_R), max(step_R))
            self._decide()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the seconds within as spent on working out what to do about slow ranks."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._working_s += time.perf_counter() - begin

    def _decide(self) -> None:
        speeds = self._speeds.speeds()
        with self._working():
            proposal = None if speeds is None or self.restraint.state == "off" else self._decision.update(speeds)
        if proposal is None or speeds is None:
            return
        candidate, is_advice = proposal.candidate, self.restraint.state == "advice"
        if is_advice and candidate.key == self._advised:
            return
        self._advised = candidate.key if is_advice else ""
        before, begin, received = self.in_force, time.perf_counter(), None
        with suppress(NotEnoughMemoryError):
            received = None if is_advice else self._carry_out(proposal, speeds)
        change_s, moved_bytes = proposal.switch_s, 0
        if received is None and not is_advice:
            self._decision.refuse()
        elif received is not None:
            table = self._exchange.meet(time.perf_counter() - begin, float(received))
            change_s, moved_bytes = max(seconds for seconds, _ in table), int(sum(num_bytes for _, num_bytes in table))
            self._decision.made(proposal, speeds)
        for strategy in self._model.strategies:  # that came for slow ranks and are in no range now
            if strategy not in (*self._kept, *self.in_force, self._model.optimizer_strategy):
                self._model.forget(strategy)
        record = ChangeRecord(
            kind=self._kind,
            step=self.steps,
            what=candidate.kind,
            left_out=candidate.left_out,
            speeds=speeds,
            before=tuple(strategy.as_dict() for strategy in before),
            after=tuple(strategy.as_dict() for strategy in candidate.strategies),
            step_s=proposal.step_s + proposal.saving_s,
            expected_step_s=proposal.step_s,
            change_s=change_s,
            moved_bytes=moved_bytes,
            is_made=received is not None,
            reason=str(self._decision.verdict),
        )
        if self._model.rank == 0:
            is_made = "" if record.is_made else ", only advice" if is_advice else ", not made: memory does not suffice"
            took, names = duration_text(change_s), f"{candidate.key}: {', '.join(map(str, candidate.strategies))}"
            logger.info("step %d: %s: %s; took %s%s", self.steps, names, record.reason, took, is_made)
        if record.is_made:
            self._note_change(change_s)
        if self._on_change is not None:
            self._on_change(record)

    def _note_change(self, change_s: float) -> None:
        """Take what a change took on the slowest rank."""
        self._decision.learn(change_s)


def _close(exchange: Exchange, timer: StepTimer) -> None:
    timer.close()
    exchange.close()


def _require_any_division(model: SwitchableModel, optimizer: torch.optim.Optimizer) -> None:
    """Check that any strategy of the optimizer may divide what it steps; collective."""

    def require() -> None:
        reason = why_not_elementwise(optimizer, model.parameters())
        if reason is not None:
            raise ValueError(
                f"where ranks are slow, another strategy of the optimizer may divide what it steps, but {reason}"
            )

    agreed(meet_over(model.process_group, model.device), require, what="a balancer of strategies")
