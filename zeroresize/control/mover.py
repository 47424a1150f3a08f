"""What is decided is carried out: units change hands, layers get their plans, columns follow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from zeroresize.config.keys import MOVABLE_MODES, MOVING_MODES, PRUNING_MODES
from zeroresize.control.column_moves import ColumnMoves
from zeroresize.control.group import Group
from zeroresize.control.group_decision import GroupDecision
from zeroresize.control.observer import Observer
from zeroresize.control.plan_execution import PlanExecution
from zeroresize.control.reporter import Reporter
from zeroresize.control.setup import Setup
from zeroresize.layers.segments import segments_of_layers, work_of_layers
from zeroresize.measure.calibration import calibrate_group, measure_copies
from zeroresize.measure.links import measure_move_cost
from zeroresize.measure.timed_products import BUDGET_S
from zeroresize.migration.lender import Lender
from zeroresize.plan.ownership import COPY_GAIN, CopyCosts
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.columns.selector import ColumnSelector
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.resharding.agreement import CannotMoveError, NotEnoughMemoryError, gather_reasons, make_alike
from zeroresize.resharding.units.owned_units import Move


class Mover:
    """Lets the ownership in force follow the plan's, and the layers' plans; every call that moves is collective.

    Attributes:
        selector: chooses the columns that make up a share.
        columns: lets what is known of columns follow their units.
        plans: puts a plan in force in the layers.
        lender: carries out loans; None where nothing migrates.
        units: of the group.
        needs_calibration: whether what pruning and moving cost is to be measured after the next step.
    """

    def __init__(
        self,
        setup: Setup,
        group: Group,
        observer: Observer,
        decider: GroupDecision,
        reporter: Reporter,
        lender: Lender | None,
    ) -> None:
        self._setup, self._group, self._observer, self._decider = setup, group, observer, decider
        self._reporter, self._config, self.units, self.lender = reporter, setup.config, group.units, lender
        config, layers, rank, num_ranks = setup.config, setup.layers, setup.rank, setup.num_ranks
        num_columns = {name: layer.home_shape[1] for name, layer in layers.items()}
        self.selector = ColumnSelector(config, rank, num_columns, work_of_layers(layers), segments_of_layers(layers))
        knows_columns = setup.may_be_away and config.mode in PRUNING_MODES
        exchange = group.exchange if knows_columns else None
        self.columns = ColumnMoves(self.selector, observer.statistic, layers, rank, exchange)
        self.columns.follow(gathers=False)
        self.plans = PlanExecution(config, rank, num_ranks, layers, self.selector, lender, group.exchange, group.units)
        self.needs_calibration = True

    def calibrate(self, num_steps: int) -> None:
        """Measure what pruning, lending and moving cost, once training has begun; collective, also over replicas."""
        group, decider, monitor = self._group, self._decider, self._observer.monitor
        if not self.needs_calibration or group.exchange is None or not monitor.is_step_of_training:
            return
        self.needs_calibration = False
        config, layers, meet = self._config, self._setup.layers, group.exchange.meet
        of_pruning = monitor.is_calibrated, monitor.calibrate
        migration = calibrate_group(layers, self._setup.process_group, config, *of_pruning, decider.migration, meet)
        decides_for_replicas = config.mode in MOVABLE_MODES and group.everybody is not group.exchange
        if migration is not None and decides_for_replicas and group.everybody is not None:  # which measured their own
            costs_of_replicas = group.everybody.gather(dataclasses.astuple(migration))
            migration = MigrationCost(*(max(column) for column in zip(*costs_of_replicas, strict=True)))
        decider.migration = migration
        if config.may_move or config.mode == "off":
            self._calibrate_moves(num_steps)

    def install(self) -> None:
        """Put the plan in force in the layers, from the next iteration on; collective where loans are new."""
        self.plans.install(self._decider.plan, self._decider.calibration_plan)

    def after_step(self, num_steps: int, *, is_update: bool) -> None:
        """Carry out what is decided between two steps; only updates divide units in another way."""
        if is_update:
            self.follow(num_steps)
        self.install()
        if self.lender is not None:
            self.lender.send_weights()
        if self.units is not None:
            self.units.guard_new_state()

    def end_epoch(self) -> None:
        """Order the columns anew, by what the epoch told of them."""
        statistic = self._observer.statistic
        self.columns.set_aside = None  # of the epoch that ends
        if statistic is None or not self.selector.state.steps_of_epoch:
            self.selector.end_epoch({}, incremental=False)
        else:
            self.selector.end_epoch(statistic.take(), incremental=statistic.incremental, adds_up=statistic.adds_up)

    def follow(self, num_steps: int, cause: str | None = None) -> None:
        """Let units change hands where the plan divides them in another way than they are.

        Where something cannot move, or does not fit, nobody moves: a warning says so, and it is tried again later.

        Args:
            num_steps: after so many steps.
            cause: of the division, for the log, where it does not follow from measurements.

        Raises:
            RuntimeError: if the ranks do not agree, or one has died; nothing has changed here.
        """
        try:
            self._move(num_steps, cause)
        except (CannotMoveError, NotEnoughMemoryError) as error:
            self._reporter.warn(
                num_steps,
                "the units that were to move stay where they are, training goes on, and a move is tried again some "
                f"updates later: {error}",
            )
            self._refuse()

    def follow_loaded(self, num_steps: int) -> None:
        """Let units change hands as a loaded state has it; they stay where this run keeps them as they were given."""
        units, decider, shares = self.units, self._decider, self._decider.plan.owned
        if decider.controller.ownership.copy_costs is not None:
            self._expect_copies(decider.controller.ownership.copy_costs)
        if units is None or shares == units.shares:
            return
        memory = decider.memory
        if self._config.mode not in MOVABLE_MODES and (
            not self._setup.may_be_away or shares == units.home or units.why_not_movable is not None
        ):
            if units.shares == units.home:
                self._refuse()
            else:
                decider.hold_owned(units.shares)
        elif memory is not None and memory.excess_by(shares) > memory.excess_by(units.shares):
            text = f"units are not divided as in the checkpoint, by {list(shares)}: by memory_limits "
            self._reporter.info(num_steps, f"{text}{memory.why_too_much(shares)}")
            self._refuse()
        else:
            self.follow(num_steps, "as in the checkpoint")

    @contextmanager
    def at_home(self, num_steps: int) -> Iterator[None]:
        """Bring all units home for as long as the block lasts; collective. They go back after an error, too.

        Where they may not go back any more, as after an adapter was added, they stay, and a warning says so.
        The statistic of columns goes on from where it was if the same units come back.
        """
        units, columns = self.units, self.columns
        if units is None or units.shares == units.home:
            yield
            return
        away = units.shares
        self._require_memory(units.home, "at_home()", is_visit=True)
        # Before the first step there is nothing to go on from, and weights may be loaded within.
        columns.set_aside = columns.seen if self.selector.state.steps_of_epoch else None
        try:
            self._change_hands(units.home)
            try:
                yield
            except Exception:
                with suppress(RuntimeError):  # the error within says more
                    self._change_hands(away)
                raise
            try:
                self._change_hands(away)
            except CannotMoveError as error:
                self._reporter.warn(num_steps, f"the units stay at home, and training goes on: {error}")
                self._refuse()
        finally:
            seen, columns.set_aside = columns.set_aside, None
            if seen is not None:
                columns.see_on(seen)

    def go_home(self) -> None:
        """Bring all units home for good, whatever is decided; collective."""
        if self.units is not None and self.units.shares != self.units.home:
            self._require_memory(self.units.home, "close(at_home=True)", is_visit=True)
            self._change_hands(self.units.home)

    def tell_what_was_replaced(self, num_steps: int) -> None:
        """Warn, once, where units may no longer move; at the end of an interval."""
        units = self.units
        if units is not None and units.segments and units.why_not_movable is None and (why := units.why_not_now()):
            text = f"from now on no units change hands, and training goes on: {why}"
            self._reporter.warn(num_steps, text, once="replaced")

    def by_hand(self, shares: Sequence[float] | None, num_steps: int) -> None:
        """Divide the units as :meth:`zeroresize.balancer.Balancer.move` has it; collective."""
        units, decider = self.units, self._decider
        if units is None:
            return
        if self._config.mode not in MOVABLE_MODES:
            raise ValueError(
                f"move() with mode={self._config.mode!r} is not allowed: units may move in the modes "
                f"{', '.join(map(repr, MOVING_MODES))} and 'off'; in the others they stay as shares= divides them at "
                "the start"
            )
        held = make_alike(
            units.meet,
            lambda: None if shares is None else units.checked(shares),
            lambda held: held,
            "move()",
            "the shares of move()",
        )
        if held is not None:
            self._require_memory(held, f"move({list(held)})")
        decider.hold_owned(held)
        try:
            self._move(num_steps, "by hand")
        except BaseException:
            self._refuse()
            raise

    def _calibrate_moves(self, num_steps: int) -> None:
        """Measure what a move takes; where a rank cannot tell, nobody moves."""
        units, everybody = self.units, self._group.everybody
        if units is None or everybody is None or units.why_not_movable is not None:
            return
        measured = measure_move_cost(self._setup.process_group, self._setup.device)
        why, num_bytes = None, math.nan
        try:
            num_bytes = float(units.bytes_of_units)
        except Exception as error:
            why = str(error) or type(error).__name__
        rows = everybody.gather([measured.seconds_per_byte, measured.fixed_s, num_bytes])
        if any(math.isnan(row[-1]) for row in rows):
            (units.why_not_movable,) = gather_reasons(units.meet, why)
            text = f"no units change hands between the ranks, and training goes on: {units.why_not_movable}"
            self._reporter.warn(num_steps, text)
            self._decider.hold_owned(units.shares)
            return
        per_byte_s, fixed_s, num_bytes = (max(column) for column in zip(*rows, strict=True))
        if units.may_be_apart and units.is_home:
            segment = max(units.sharing, key=lambda segment: sum(layer.even_shape.numel() for layer in segment.modules))
            are_whole = self._config.mode in PRUNING_MODES or any(layer.is_compiled for layer in segment.modules)
            num_sequences = min(layer.num_sequences for layer in segment.modules)
            here = [*measure_copies(segment, self._setup.process_group), -num_sequences, are_whole]
            *costs, fewest, whole = map(max, zip(*everybody.gather(here), strict=True))
            any_block, each_block, any_whole, each_whole, each_part = costs
            with_gains = any_block, COPY_GAIN + each_block, COPY_GAIN + any_whole, each_whole, each_part
            self._expect_copies(CopyCosts(*with_gains, -int(fewest), bool(whole)))
        self._decider.expect_moves(MoveCost(per_byte_s, fixed_s), num_bytes, BUDGET_S)

    def _expect_copies(self, costs: CopyCosts) -> None:
        """Let decisions count what copies of rows that units share cost, as all ranks have measured."""
        if self.units is not None and self.units.may_be_apart:
            self.units.expect_copies(costs)
            self._decider.expect_segments(self.units.works, costs)

    def _require_memory(self, shares: Sequence[float], call: str, *, is_visit: bool = False) -> None:
        """Raise a ValueError on all ranks if one holds more than it may by these shares, and than it does now.

        On a visit nothing is trained meanwhile, so that there are no activations.
        """
        watch = self._group.memory
        memory = watch.at_rest if is_visit and watch is not None else self._decider.memory
        if memory is None or self.units is None:
            return
        if memory.excess_by(shares) > memory.excess_by(self.units.shares):
            why = memory.why_too_much(shares)
            raise ValueError(f"{call} is not allowed by memory_limits: {why}; nothing has changed")

    def _refuse(self) -> None:
        assert self.units is not None
        self._decider.refuse_move(self.units.shares)

    def _move(self, num_steps: int, cause: str | None) -> None:
        units, decider, shares = self.units, self._decider, self._decider.plan.owned
        if units is None or not units.segments or shares == units.shares:
            return
        is_away = shares != units.home
        why_not = (self._observer.why_units_stay or units.why_not_measured()) if is_away else None
        move = self._change_hands(shares, why_not or units.why_copied())
        if move is None:
            return
        comparing_s = 0.0
        if self._group.everybody is not None and not units.is_home:  # all time products, at even shares and at these
            took_s = self._observer.monitor.compare(units.owned)
            comparing_s = max(seconds for seconds, *_ in self._group.everybody.meet(took_s))
        decider.controller.ownership.learn(move.most_bytes, move.seconds, comparing_s)
        is_held = decider.controller.ownership.is_held and self._config.mode in MOVABLE_MODES
        step_s = self._observer.monitor.step_s
        self._reporter.moved(num_steps, move, decider, step_s, comparing_s, cause=cause, is_held=is_held)

    def _change_hands(self, shares: Sequence[float], why_not: str | None = None) -> Move | None:
        """Divide the units by ``shares``, unless this rank refuses; what is known of columns follows; collective."""
        units = self.units
        if units is None or tuple(shares) == units.shares:
            return None
        before = [segment.owned for segment in units.segments]
        self.plans.take_back()
        try:
            move = units.move(shares, why_not)
        except BaseException:
            self.columns.follow(gathers=False)  # also where the error tells that units have moved
            raise
        if before == [segment.owned for segment in units.segments]:
            return move
        self.columns.restart_statistic()
        if self._group.memory is not None:
            self._group.memory.moved()
        try:
            self.columns.follow()
        except RuntimeError as error:
            raise RuntimeError(
                f"the units have moved, they are divided by {list(units.shares)} now; then: {error}"
            ) from error
        return move
