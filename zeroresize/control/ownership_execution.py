"""Units change hands as it was decided, or by hand; and what is told of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from zeroresize.config.keys import MOVABLE_MODES, MOVING_MODES
from zeroresize.control.assembly import Parts
from zeroresize.control.reporter import Reporter
from zeroresize.measure.links import measure_move_cost
from zeroresize.measure.timed_products import BUDGET_S
from zeroresize.plan.group import WorkloadPlan
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.resharding.agreement import CannotMoveError, NotEnoughMemoryError
from zeroresize.resharding.units.owned_units import Move, OwnedUnits


class OwnershipExecution:
    """Lets the ownership in force follow the plan's; every call that moves is collective.

    Args:
        parts: of the balancer.
        reporter: tells what moves.
    """

    def __init__(self, parts: Parts, reporter: Reporter) -> None:
        self._parts, self._reporter = parts, reporter

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
            self._reporter.warn(
                num_steps,
                "the units that were to move stay where they are, training goes on, and a move is tried again some "
                f"updates later: {error}",
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
            why = memory.why_too_much(plan.owned)
            text = f"units are not divided as in the checkpoint, by {list(plan.owned)}: by memory_limits {why}"
            self._reporter.info(num_steps, text)
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
        """Warn, once, where units may no longer move; at the end of an interval."""
        units = self._parts.units
        if units is not None and units.segments and units.why_not_movable is None and (why := units.why_not_now()):
            text = f"from now on no units change hands, and training goes on: {why}"
            self._reporter.warn(num_steps, text, once="replaced")

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

    def calibrate(self, num_steps: int) -> None:
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
                text = f"no units change hands between the ranks, and training goes on: {units.why_not_movable}"
                self._reporter.warn(num_steps, text)
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

    def _move(self, plan: WorkloadPlan, num_steps: int, cause: str | None = None) -> None:
        parts, units = self._parts, self._parts.units
        if units is None or not units.segments or plan.owned == units.shares:
            return
        check = parts.start_check if plan.owned != units.home else None
        move = self._change_hands(units, plan.owned, check.why_units_stay if check is not None else None)
        if move is not None:
            comparing_s = self._compare()
            parts.decision.moved(move.most_bytes, move.seconds, comparing_s)
            self._reporter.moved(
                num_steps,
                move,
                plan,
                parts.decision.busy_s,
                step_s=parts.monitor.step_s,
                comparing_s=comparing_s,
                cause=cause,
                is_held=parts.decision.ownership.is_held and parts.config.mode in MOVABLE_MODES,
            )

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
