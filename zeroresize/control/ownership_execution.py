"""Units change hands as it was decided, or by hand; and what is told of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist

from zeroresize.config.keys import MOVABLE_MODES, MOVING_MODES
from zeroresize.control.move_log import MoveLog
from zeroresize.control.parts import Parts
from zeroresize.control.stay_log import StayLog
from zeroresize.measure.links import measure_move_cost
from zeroresize.measure.timed_products import BUDGET_S
from zeroresize.plan.group import WorkloadPlan
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.resharding.agreement import CannotMoveError, NotEnoughMemoryError
from zeroresize.resharding.units.owned_units import Move, OwnedUnits

logger = logging.getLogger(__name__)


class OwnershipExecution:
    """Lets the ownership in force follow the plan's; every call that moves is collective.

    Args:
        parts: of the balancer.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._log, self._has_warned, self._has_warned_of_memory = parts, MoveLog(), False, False
        self._stay_log = StayLog()
        # The ranks agree on what is told, and so do replicas: it is told once.
        everybody = parts.exchange_of_replicas
        self._tells = parts.rank == 0 and (everybody is None or everybody.ranks[0] == dist.get_rank())

    def will_decide(self) -> None:
        """Note that a decision is about to replace the present plan."""
        self._log.planned(self._parts.decision.plan)

    def follow(self, plan: WorkloadPlan, num_steps: int, cause: str | None = None) -> None:
        """Let units change hands where ``plan`` divides them in another way than they are.

        Where something cannot move, or does not fit, nobody moves: a warning says so, and it is tried again later.

        Args:
            plan: what is decided.
            num_steps: after so many steps.
            cause: of the division, for the log, where it does not follow from measurements.

        Raises:
            RuntimeError: if the ranks do not agree, or one has died; nothing has changed here.
        """
        try:
            self._move(plan, num_steps, cause)
        except (CannotMoveError, NotEnoughMemoryError) as error:
            if self._tells:
                logger.warning(
                    "step %d: the units that were to move stay where they are, training goes on, and a move is tried "
                    "again some updates later: %s",
                    num_steps,
                    error,
                )
            self._refuse()

    def follow_loaded(self, plan: WorkloadPlan, num_steps: int) -> None:
        """Let units change hands as a loaded state has it; they stay where this run keeps them as they were given.

        Raises:
            RuntimeError: as :meth:`follow`.
        """
        parts, units = self._parts, self._parts.units
        if units is None or plan.owned == units.shares:
            return
        is_of_start = parts.config.mode not in MOVABLE_MODES
        if is_of_start and (not parts.may_be_away or plan.owned == units.home or units.why_not_movable is not None):
            if units.shares == units.home:
                self._refuse()
            else:
                parts.decision.hold_owned(units.shares)
            return
        memory = parts.decision.memory
        if memory is not None and memory.excess_by(plan.owned) > memory.excess_by(units.shares):
            if self._tells:
                logger.info(
                    "units are not divided as in the checkpoint, by %s: by memory_limits %s",
                    list(plan.owned),
                    memory.why_too_much(plan.owned),
                )
            self._refuse()
            return
        self.follow(plan, num_steps, "as in the checkpoint")

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Bring all units home for as long as the block lasts; collective. They go back after an error, too.

        The statistic of columns goes on from where it was if the same units come back.
        """
        units, columns = self._parts.units, self._parts.columns
        if units is None or units.shares == units.home:
            yield
            return
        away = units.shares
        self._require_memory(units.home, "at_home()", is_visit=True)
        # Before the first step there is nothing to go on from, and weights may be loaded within.
        columns.set_aside = columns.seen if self._parts.selector.state.steps_of_epoch else None
        try:
            self._change_hands(units, units.home)
            try:
                yield
            except Exception:
                with suppress(RuntimeError):  # the error within says more
                    self._change_hands(units, away)
                raise
            self._change_hands(units, away)
        finally:
            seen, columns.set_aside = columns.set_aside, None
            if seen is not None:
                columns.see_on(seen)

    def go_home(self) -> None:
        """Bring all units home for good, whatever is decided; collective."""
        units = self._parts.units
        if units is not None and units.shares != units.home:
            self._require_memory(units.home, "close(at_home=True)", is_visit=True)
            self._change_hands(units, units.home)

    def tell_what_was_replaced(self, num_steps: int) -> None:
        """Warn, once and on rank 0, where units may no longer move; at the end of an interval."""
        units = self._parts.units
        if self._has_warned or units is None or not units.segments or units.why_not_movable is not None:
            return
        if (why := units.why_not_now()) is not None:
            self._has_warned = True
            if self._parts.rank == 0:
                logger.warning("step %d: from now on no units change hands, and training goes on: %s", num_steps, why)

    def by_hand(self, shares: Sequence[float] | None, num_steps: int) -> None:
        """Divide the units as :meth:`zeroresize.balancer.Balancer.move` has it; collective."""
        parts, units = self._parts, self._parts.units
        if units is None:
            return
        if parts.config.mode not in MOVABLE_MODES:
            raise ValueError(
                f"move() with mode={parts.config.mode!r} is not allowed: units may move in the modes "
                f"{', '.join(map(repr, MOVING_MODES))} and 'off'; in the others they stay as shares= divides them at "
                "the start"
            )
        held = units.checked(shares) if shares is not None else None
        if held is not None:
            self._require_memory(held, f"move({list(held)})")
        parts.decision.hold_owned(held)
        try:
            self._move(parts.decision.plan, num_steps, "by hand")
        except BaseException:
            self._refuse()
            raise

    def calibrate(self) -> None:
        """Measure what a move takes, where one may be decided; collective over the group, and over its replicas."""
        parts, units = self._parts, self._parts.units
        everybody = parts.exchange_of_replicas or parts.exchange
        if units is None or everybody is None or units.why_not_movable is not None:
            return
        if parts.config.may_move or parts.config.mode == "off":
            measured = measure_move_cost(parts.process_group, parts.device)
            why, num_bytes = None, math.nan
            try:
                num_bytes = float(units.bytes_of_units)
            except Exception as error:
                why = str(error) or type(error).__name__
            rows = everybody.gather([measured.seconds_per_byte, measured.fixed_s, num_bytes])
            if any(math.isnan(own) for *_, own in rows):
                units.why_not_movable = units.gather_reasons(why)
                if parts.rank == 0:
                    logger.warning(
                        "no units change hands between the ranks, and training goes on: %s", units.why_not_movable
                    )
                parts.decision.hold_owned(units.shares)
                return
            per_byte_s, fixed_s, num_bytes = (max(column) for column in zip(*rows, strict=True))
            parts.decision.expect_moves(MoveCost(per_byte_s, fixed_s), num_bytes, BUDGET_S)

    def _require_memory(self, shares: Sequence[float], call: str, *, is_visit: bool = False) -> None:
        """Check that by these shares no rank holds more than it may, or not so much more than now.

        Args:
            is_visit: whether nothing is trained meanwhile, so that there are no activations.

        Raises:
            ValueError: if one does; alike on every rank.
        """
        parts = self._parts
        memory = parts.memory.at_rest if is_visit and parts.memory is not None else parts.decision.memory
        if memory is None or parts.units is None:
            return
        if memory.excess_by(shares) > memory.excess_by(parts.units.shares):
            why = memory.why_too_much(shares)
            raise ValueError(f"{call} is not allowed by memory_limits: {why}; nothing has changed")

    def _refuse(self) -> None:
        units = self._parts.units
        assert units is not None
        self._parts.decision.refuse_move(units.shares)

    def tell_why_they_stay(self, num_steps: int) -> None:
        """Log, more and more rarely, why units of a slow rank stay; after a decision."""
        parts, units = self._parts, self._parts.units
        if units is None or not units.segments or units.why_not_movable is not None or not parts.config.may_move:
            return
        line = self._stay_log.line(parts.decision.plan, parts.decision.busy_s, parts.decision.ownership)
        if line is not None and self._tells:
            logger.info("step %d: %s", num_steps, line)

    def tell_what_does_not_fit(self, num_steps: int) -> None:
        """Warn, once and on rank 0, where a rank holds more than it may and its units stay; after a decision."""
        parts, units, memory = self._parts, self._parts.units, self._parts.decision.memory
        if self._has_warned_of_memory or units is None or memory is None or parts.decision.plan.owned != units.shares:
            return
        if (why := memory.why_too_much(units.shares)) is None:
            return
        self._has_warned_of_memory = True
        if units.why_not_movable is not None:
            reason = f"no unit can change hands: {units.why_not_movable}"
        elif not parts.config.may_move:
            reason = "nothing moves units in this configuration: give shares that fit"
        elif parts.decision.ownership.is_held:
            reason = "they are held as move() has divided them"
        elif memory.why_too_much(memory.evenly_filled) is not None:
            reason = "the ranks' memory together does not suffice for more even a division"
        else:
            reason = "they move as soon as they can"
        if self._tells:
            logger.warning("step %d: by memory_limits %s, and units stay: %s", num_steps, why, reason)

    def tell_what_came_of_it(self, num_steps: int) -> None:
        """Log how long steps have been since the last move; at the end of an interval."""
        line = self._log.came_of(self._parts.monitor.step_s, num_steps + self._parts.config.update_every)
        if line is not None and self._tells:
            logger.info("step %d: %s", num_steps, line)

    def _move(self, plan: WorkloadPlan, num_steps: int, cause: str | None = None) -> None:
        parts, units = self._parts, self._parts.units
        if units is None or not units.segments or plan.owned == units.shares:
            verdict = self._log.verdict(parts.decision.is_another_division_wanted)
            if verdict is not None and self._tells:
                logger.info("step %d: %s", num_steps, verdict)
            return
        check = parts.start_check if plan.owned != units.home else None
        move = self._change_hands(units, plan.owned, check.why_units_stay if check is not None else None)
        if move is not None:
            comparing_s = self._compare()
            parts.decision.moved(move.most_bytes, move.seconds, comparing_s)
            if self._tells:
                line = self._log.line(
                    move,
                    plan,
                    parts.decision.busy_s,
                    num_steps=num_steps,
                    step_s=parts.monitor.step_s,
                    comparing_s=comparing_s,
                    cause=cause,
                    is_held=parts.decision.ownership.is_held and parts.config.mode in MOVABLE_MODES,
                )
                logger.info("step %d: %s", num_steps, line)

    def _change_hands(self, units: OwnedUnits, shares: Sequence[float], why_not: str | None = None) -> Move | None:
        """Divide the units by ``shares``; what is known of columns, and their statistic, follows; collective.

        Args:
            why_not: why this rank refuses; None if it does not.
        """
        if tuple(shares) == units.shares:
            return None
        parts, before = self._parts, [segment.owned for segment in units.segments]
        parts.plan_execution.take_back()
        try:
            move = units.move(shares, why_not)
        except BaseException:
            parts.columns.follow(gathers=False)  # also where the error tells that units have moved
            raise
        if before == [segment.owned for segment in units.segments]:
            return move
        parts.columns.restart_statistic()
        if parts.memory is not None:
            parts.memory.moved()
        try:
            parts.columns.follow()
        except RuntimeError as error:
            raise RuntimeError(
                f"the units have moved, they are divided by {list(units.shares)} now; then: {error}"
            ) from error
        return move

    def _compare(self) -> float:
        """Let all ranks time products at even shares and at those in force; the most seconds that one of them took."""
        parts, units = self._parts, self._parts.units
        everybody = parts.exchange_of_replicas or parts.exchange
        if units is None or everybody is None or units.is_home:
            return 0.0
        return max(seconds for seconds, *_ in everybody.meet(parts.monitor.compare(units.owned)))
