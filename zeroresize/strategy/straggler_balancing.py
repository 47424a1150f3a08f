"""What balancers of strategies and of micro-batches share: measure a step, decide behind it, carry out, tell of it."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import finalize

import torch

from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.words import Call
from zeroresize.measure.clocks import Clock, clock_for
from zeroresize.measure.links import measure_move_cost
from zeroresize.measure.step_timer import StepTimer
from zeroresize.measure.timed_products import product_seconds
from zeroresize.optim.independence import why_not_elementwise
from zeroresize.plan.strategy import Strategy
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.strategy.stragglers.decision import StragglerDecision, StragglerState, StrategyProposal
from zeroresize.policy.strategy.stragglers.rank_speeds import RankSpeeds, SampleCadence
from zeroresize.resharding.agreement import NotEnoughMemoryError, agreed, meet_over
from zeroresize.strategy.model import SwitchableModel
from zeroresize.utils.codec import loaded, saved

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


@dataclass(frozen=True)
class ChangeRecord:
    """Tells what was changed for slow ranks, and what it took; plain numbers, the same on every rank.

    Attributes:
        kind: what is balanced: "strategies" or "micro-batches".
        step: how many steps were over.
        what: what was done, such as "shares", "leave out" or "replan".
        left_out: ranks that have no part any more.
        speeds: of all ranks, as they were believed to be.
        before, after: the strategies of the ranges, as plain values.
        step_s, expected_step_s: seconds of a step before and after, by the model of costs.
        change_s: seconds that the change took, or was to take where ``is_made`` is false; without those for which the
            next step waits for its plan, where steps are planned ahead.
        moved_bytes: that all ranks together received.
        is_made: false where memory did not suffice: then everything is as it was.
    """

    kind: str
    step: int
    what: str
    left_out: tuple[int, ...]
    speeds: tuple[float, ...]
    before: tuple[dict[str, Any], ...]
    after: tuple[dict[str, Any], ...]
    step_s: float
    expected_step_s: float
    change_s: float
    moved_bytes: int
    is_made: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """Return numbers under ``strategy/`` or ``microbatch/``, by name."""
        numbers = {name: getattr(self, name) for name in ("step_s", "expected_step_s", "change_s", "moved_bytes")}
        prefix = "strategy" if self.kind == "strategies" else "microbatch"
        return {f"{prefix}/{name}": float(value) for name, value in {"left_out": len(self.left_out), **numbers}.items()}


@dataclass(frozen=True)
class _State:
    """What a balancer goes on from."""

    steps: int
    speeds: RankSpeeds
    decision: StragglerState


class StragglerBalancing(ABC, Generic[Step]):
    """The loop of a balancer, which says what a step is expected to take, and how a change is carried out.

    Args:
        kind: of its records.
        agreement: what all ranks must have alike, by names.
        probe, clock, on_change: as of a balancer.
    """

    def __init__(
        self,
        model: SwitchableModel,
        kind: str,
        decision: StragglerDecision,
        agreement: Mapping[str, str],
        *,
        probe: Callable[[], float] | None,
        clock: Clock | None,
        on_change: Callable[[ChangeRecord], object] | None,
    ) -> None:
        self._model, self._kind, self._decision, self._on_change = model, kind, decision, on_change
        self._kept = tuple(model.strategies)
        self._newest: deque[Step] = deque(maxlen=SAMPLE)
        self._cadence = SampleCadence(SAMPLE)
        self._meter = MeasuredSpeeds(model, agreement, probe, clock)
        self.close = self._meter.close

    @property
    def steps(self) -> int:
        """Return how many are over."""
        return self._meter.num_steps

    @property
    def in_force(self) -> tuple[Strategy, ...]:
        """Return [G] the strategies of the ranges."""
        return self._decision.in_force

    def what_if(self) -> tuple[StrategyProposal, ...]:
        """Return what each candidate would bring now, the first being to stay; empty before speeds are known."""
        speeds = self._meter.learned.speeds()
        return () if speeds is None else self._decision.what_if(speeds)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned and is owed; plain values, the same on every rank."""
        return saved(_State(self.steps, self._meter.learned, self._decision.state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, between two steps, on every rank alike.

        The trainer keeps its strategies: where they are others than they were, what was owed for changing those is
        forgotten. Of another number of ranks no speeds are taken over.

        Raises:
            ValueError: naming what does not fit; nothing is taken over then.
        """
        state_before = loaded(_State, state, "state")
        self._decision.go_on_from(state_before.decision)
        if state_before.speeds.num_ranks == self._meter.learned.num_ranks:
            self._meter.learned = state_before.speeds
        self._meter.num_steps = state_before.steps
        self._meter.exchange.collect()  # of steps before

    @abstractmethod
    def _expect(self, newest: list[Step]) -> None:
        """Work out anew what steps take that are like these."""

    @abstractmethod
    def _carry_out(self, proposal: StrategyProposal, speeds: tuple[float, ...]) -> int:
        """Put a proposal in force, and return the bytes that this rank has received; collective.

        Raises:
            NotEnoughMemoryError: on every rank, and nothing has moved.
        """

    def _after(self, step: Step, work_s: float, step_s: float) -> None:
        """End a step, in which this rank should have computed for ``work_s``, and change what is to change."""
        self._newest.append(step)
        if self._cadence.is_due():
            with self._meter.working():
                self._expect(list(self._newest))
                self._decision.look_again()
        if self._meter.end(work_s, step_s):
            self._cadence.learn(*self._meter.worked)
            self._decide()

    def _decide(self) -> None:
        speeds = self._meter.learned.speeds()
        with self._meter.working():
            proposal = None if speeds is None else self._decision.update(speeds)
        if proposal is None or speeds is None:
            return
        before, begin, received = self.in_force, time.perf_counter(), None
        with suppress(NotEnoughMemoryError):
            received = self._carry_out(proposal, speeds)
        change_s, moved_bytes = proposal.switch_s, 0
        if received is None:
            self._decision.refuse()
        else:
            table = self._meter.exchange.meet(time.perf_counter() - begin, float(received))
            change_s, moved_bytes = max(seconds for seconds, _ in table), int(sum(num_bytes for _, num_bytes in table))
            self._decision.made(proposal, speeds)
        for strategy in self._model.strategies:  # that came for slow ranks and are in no range now
            if strategy not in (*self._kept, *self.in_force, self._model.optimizer_strategy):
                self._model.forget(strategy)
        candidate = proposal.candidate
        record = ChangeRecord(
            self._kind,
            self.steps,
            candidate.kind,
            candidate.left_out,
            speeds,
            tuple(strategy.as_dict() for strategy in before),
            tuple(strategy.as_dict() for strategy in candidate.strategies),
            proposal.step_s + proposal.saving_s,
            proposal.step_s,
            change_s,
            moved_bytes,
            received is not None,
        )
        if self._model.rank == 0:
            is_made = "" if record.is_made else ", and was not made, as memory does not suffice"
            names = f"{candidate.key}: {', '.join(map(str, candidate.strategies))}"
            logger.info("step %d: %s: %s; took %.2f s%s", self.steps, names, self._decision.verdict, change_s, is_made)
        if record.is_made:
            self._note_change(change_s)
        if self._on_change is not None:
            self._on_change(record)

    def _note_change(self, change_s: float) -> None:
        """Take what a change took on the slowest rank."""
        self._decision.learn(change_s)


class MeasuredSpeeds:
    """Learns the ranks' speeds from what their parts of steps took, waits left out, and should have taken.

    A rank without a part looks how fast it is by a few products. Its constructor and :meth:`end` are collective.

    Attributes:
        num_steps: how many are over.
        learned: the speeds, the same on every rank.
        exchange: between the ranks; others may meet over it between steps.
        worked: of the last step known of all ranks, the most seconds that a rank has worked out what to do, since the
            step before, and the most that the step took; the same on all ranks.
    """

    def __init__(
        self,
        model: SwitchableModel,
        agreement: Mapping[str, str],
        probe: Callable[[], float] | None,
        clock: Clock | None,
    ) -> None:
        self.num_steps, self.worked = 0, (0.0, 0.0)
        self.exchange = Exchange(CpuGroup(model.process_group, agreement))
        self.learned = RankSpeeds(len(self.exchange.ranks))
        self._work_s: deque[float] = deque()  # of steps whose seconds are not read yet
        self._steps_without, self._probe_s, self._working_s = 0, 0.0, 0.0  # steps without a part in a row
        self._timer = StepTimer(clock or clock_for(model.device))
        weight = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=model.device)
        products = partial(product_seconds, weight, least_s=_PROBE_S, repetitions=_PROBE_REPETITIONS)
        self._probe: Callable[[], float] = probe or products
        self.close: Callable[[], object] = finalize(self, _close, self.exchange, self._timer)

    def begin(self, *, has_part: bool) -> None:
        """Begin to measure what this rank does in a step, in which it has a part or none."""
        every, steps = (_PROBE_WITH_PART_EVERY, self.num_steps) if has_part else (PROBE_EVERY, self._steps_without)
        self._probe_s = self._probe() if steps % every == PROBE_EVERY - 1 else 0.0
        self._steps_without = 0 if has_part else self._steps_without + 1
        self._timer.begin_step()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the seconds within as spent on working out what to do about slow ranks."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._working_s += time.perf_counter() - begin

    def end(self, work_s: float, step_s: float) -> bool:
        """End the step, and return whether the speeds have been learned anew, alike on all ranks; collective.

        Args:
            work_s: what this rank should have taken; 0 without a part.
            step_s: what the step took, all in all.
        """
        times = self._timer.end_step()
        self._work_s.append(work_s)
        self.num_steps += 1
        self.exchange.where.call, self.exchange.where.num_steps = Call.STEP, self.num_steps
        table = self.exchange.collect()
        # On a device the seconds of a step are read one or more steps later.
        busy = [(each.busy_s, self._work_s.popleft()) for each in times]
        self.exchange.post([*(busy[-1] if busy else (0.0, 0.0)), self._probe_s, self._working_s, step_s])
        self._working_s = 0.0
        if table is not None:
            busy_R, expected_R, probe_R, working_R, step_R = zip(*table, strict=True)
            self.learned.learn(busy_R, expected_R, probe_R)
            self.worked = max(working_R), max(step_R)
        return table is not None


def _close(exchange: Exchange, timer: StepTimer) -> None:
    timer.close()
    exchange.close()


def measured_switch_cost(model: SwitchableModel) -> MoveCost:
    """Return what a change of strategies takes, by the links; collective."""
    return replace(measure_move_cost(model.process_group, model.device), setup_s=SETUP_S)


def require_any_division(model: SwitchableModel, optimizer: torch.optim.Optimizer) -> None:
    """Check that any strategy of the optimizer may divide what it steps; collective."""

    def require() -> None:
        reason = why_not_elementwise(optimizer, model.parameters())
        if reason is not None:
            raise ValueError(
                f"where ranks are slow, another strategy of the optimizer may divide what it steps, but {reason}"
            )

    agreed(meet_over(model.process_group, model.device), require)
