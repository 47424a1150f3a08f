"""Balancer: measure → decide → plan → apply, once per optimizer step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.words import Call
from zeroresize.config import BalanceConfig
from zeroresize.control import balancer_state, records
from zeroresize.control.assembly import build
from zeroresize.control.ownership_execution import OwnershipExecution
from zeroresize.control.reporter import Reporter
from zeroresize.measure.calibration import calibrate_group
from zeroresize.plan.group import WorkloadPlan
from zeroresize.policy.slowness.windows import WatchedStep
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.telemetry import UpdateRecord

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Balancer:
    """Balances the converted layers of a model over its tensor-parallel group.

    Call :meth:`step` once after every ``optimizer.step()``, on every rank. A plan changes there, or by a call of
    :meth:`pin`, :meth:`release`, :meth:`epoch_end` or :meth:`load_state_dict`, so never between a forward and its
    backward, within gradient accumulation, or before a recomputation. For ``torch.distributed.checkpoint`` it is a
    Stateful.

    Args:
        model: holds parallel layers, on its device: made by ``parallelize_module`` with this package's styles, by
            ``from_linear``, or by a host. ``zeroresize.convert`` is called for a model that was not converted.
        optimizer: the optimizer that steps its parameters. Units move only if it treats every element by itself, as
            AdamW does: see :func:`zeroresize.mark_elementwise`.
        config: how to balance; None for the defaults. What depends on its mode or its seed is done here, once, before
            the first step: dropout between layers whose units may move is keyed by the unit, and units are divided by
            ``config.shares`` and ``config.memory_limits`` unless ``convert`` was told otherwise.
        process_group: the tensor-parallel group, or a one-dimensional ``DeviceMesh`` of it; None for that of the
            model's layers. Making the balancer is collective over it. In a group of one rank it does nothing.
        data_parallel_group: the ranks that hold the same shards as this one, and must own the same units: needed for
            units to move where there are ranks outside of ``process_group``, and no DistributedDataParallel around the
            layers tells. Where units may move, all methods that are collective are so over all replicas.
        on_update: called with an :class:`~zeroresize.telemetry.UpdateRecord` at every update, on every rank.

    Attributes:
        config, on_update: are the arguments; ``on_update`` may be changed at any time.
        lineage: tells which columns are pruned now, by ``lineage.pruned(layer_name, "x" | "w")``.

    Raises:
        ValueError: if the model has no layer that can be balanced, or layers of several groups, or of another one than
            ``process_group``; if it has another balancer, ``config`` does not fit the group, ``optimizer`` steps none
            of the layers' weights, or the ranks do not agree on the configuration; if ``data_parallel_group`` lacks
            this rank, or does not make whole replicas of the group. Unless ``start_checks`` is off also if
            ``optimizer`` does not step some of them that want gradients, or DistributedDataParallel averages over the
            group; the first training forward raises it if parameters that are no shards differ between the ranks.
            Where units are away by ``shares``, also for an optimizer with which they could not move; and where what a
            rank would hold exceeds ``config.memory_limits``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        config: BalanceConfig | None = None,
        *,
        process_group: ProcessGroup | DeviceMesh | None = None,
        data_parallel_group: ProcessGroup | DeviceMesh | None = None,
        on_update: Callable[[UpdateRecord], None] | None = None,
    ) -> None:
        config = BalanceConfig() if config is None else config
        self.config, self.on_update = config, on_update
        self._parts = build(model, optimizer, config, process_group, data_parallel_group)
        self.lineage = self._parts.lineage
        self._num_steps = 0
        self._has_calibrated = self._is_closed = self._is_at_home = False
        self._balancing_s = self._balancing_since_update_s = 0.0
        self._reporter = Reporter(config.tolerance, tells=self._parts.tells)
        self._moves = OwnershipExecution(self._parts, self._reporter)
        try:
            self._change_plan()
        except BaseException:
            self.close()
            raise
        self._is_at(Call.TRAINING)

    def step(self) -> None:
        """Record that one optimizer step is done and, every ``update_every`` steps, exchange and decide.

        Raises:
            RuntimeError: if the ranks of the group hold different plans, as after a ``pin`` on only some of them, or
                did not call this or :meth:`epoch_end` equally often; if ranks do not come; or after :meth:`close`.
        """
        self._require_open()
        self._require_no_visit("step()")
        parts = self._parts
        if parts.num_ranks == 1:
            return
        if parts.start_check is not None:
            parts.start_check.step_is_called(self._num_steps + 1)
        parts.monitor.end_step()  # measure
        began = time.perf_counter()
        self._num_steps += 1
        is_update = self._num_steps % self.config.update_every == 0
        self._count_step()
        if parts.slowness is not None:
            read = parts.monitor.last_read
            # Ranks of a tensor-parallel group have the same batch.
            steps = [WatchedStep.of_times(step, step.gemm_s + step.gather_fill_s, work=1.0) for step in read]
            parts.slowness.end_step(steps)
        self._calibrate()
        if is_update:
            parts.monitor.learn()
            self._reporter.measured(self._num_steps, parts.monitor.step_s)
            self._moves.tell_what_was_replaced(self._num_steps)
            self._decide()  # a plan
            if parts.start_check is not None:
                parts.start_check.after_update(self._num_steps)
        else:
            parts.decision.next_step()
        if self.config.iters_per_epoch and self._num_steps % self.config.iters_per_epoch == 0:
            self._end_epoch()
        self._moves.follow(self.plan, self._num_steps)  # apply
        parts.plan_execution.install(self.plan, parts.decision.calibration_plan)
        parts.plan_execution.send_weights()
        if is_update and self.on_update is not None:
            self.on_update(records.update_record(parts, self._num_steps, self._balancing_since_update_s))
        if is_update and parts.memory is not None:
            parts.memory.begin_interval(borrows=self.plan.ranks[parts.rank].borrowed > 0.0)
        if parts.units is not None:
            parts.units.guard_new_state()
            if is_update:
                parts.units.forget_moves()
        self._balancing_s = time.perf_counter() - began + parts.monitor.timer_s
        self._balancing_since_update_s = self._balancing_s + (0.0 if is_update else self._balancing_since_update_s)
        parts.where.call = Call.TRAINING
        self._begin_step()

    def epoch_end(self) -> None:
        """End an epoch: choose columns anew. :meth:`step` calls it where ``iters_per_epoch`` is set.

        In modes that migrate it is collective: who computes for whom must be agreed on before anybody sends anything.

        Raises:
            ValueError: in modes that migrate, if the ranks of the group hold different plans.
            RuntimeError: in modes that migrate, if not all ranks come, or some have made another call. In the others
                the next update tells.
        """
        if self._parts.lender is not None and not self._is_closed:
            self._is_at(Call.EPOCH_END)
            self._parts.decision.require_agreement(self._agreed)
        self._end_epoch()
        self._change_plan()
        self._parts.where.call = Call.TRAINING

    def pruned_steps(self) -> dict[str, NDArray[np.int64]]:
        """Count in how many steps so far this rank pruned each column: [K] for every layer."""
        return {name: steps.copy() for name, steps in self._parts.selector.pruned_steps.items()}

    def what_if(self) -> dict[str, dict[str, Any]]:
        """Return what each mode would do with the group now, by mode, as if it had been in force since the first step.

        Modes that move units lend or prune until the slowness has cost as much as a move: what they tell is that they
        have settled once ``owned`` of a slow rank is other than 1.

        ``predicted_step_s`` (seconds of a step), ``gain`` (the share of the step that it saves; both NaN before the
        first decision), and of every rank, in lists: ``pruned``, ``lent``, ``owned`` (1 is an even
        share), and ``ratios``, what is left out of an even share by the three together. The same
        on every rank.
        """
        if self.config.mode != "off":
            raise ValueError(
                f"what_if() with mode={self.config.mode!r} is not allowed: only in mode 'off' all ranks compute "
                "everything, so that what the other modes would do is known"
            )
        return records.what_if(self._parts)

    def layer_times(self) -> dict[str, float]:
        """Return the seconds that this rank's products of each layer took in a usual step, by layer name.

        Forward and backward together, as measured in the interval that the last update ended, under its last plan: what
        is spared is not in it, what the rank computes for others is. Waits in collectives are not, nor evaluation.
        Empty before the first update, where no product of its steps could be read (on a GPU with ``update_every=1``
        that happens), and in a group of one.
        """
        return self._parts.monitor.layer_times

    @property
    def plan(self) -> WorkloadPlan:
        """The plan that is decided; a :meth:`pin`, or a calibration step, may stand above it."""
        return self._parts.decision.plan

    @property
    def is_calibrating(self) -> bool:
        """Whether the next step is a calibration step: all ranks compute all of their products, to be measured."""
        return self._parts.decision.calibration_plan is not None

    @property
    def bytes_migrated(self) -> int:
        """Bytes of migration so far; each transfer counts on one rank, that which receives it or adds to it."""
        return self._parts.lender.bytes_moved if self._parts.lender is not None else 0

    def move(self, shares: Sequence[float] | None) -> None:
        """Divide the units of all segments by ``shares``, whatever is measured; None lets measurements decide again.

        Units are neurons between feed-forward layers, and attention heads. Weights and optimizer state change hands at
        once, and cost nothing afterwards. Call alike on every rank, between optimizer steps; collective.

        Args:
            shares: of every rank of the group, in any unit, such as ``(2, 1, 1)``; 0 for none. Ranks own units as near
                to that as whole units allow.

        Raises:
            ValueError: for shares that are negative, all zero, or not one a rank; in a mode that prunes or lends only,
                where units stay as ``shares`` divide them at the start; where they would not fit into
                ``config.memory_limits``; or where no unit may change hands, saying why.
            RuntimeError: if the ranks do not agree, one lacks the memory, or has died; nothing has changed then.
        """
        self._require_open()
        self._require_no_visit("move()")
        self._is_at(Call.MOVING)
        self._moves.by_hand(shares, self._num_steps)
        self._change_plan()
        self._is_at(Call.TRAINING)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Let every rank own what its host gave it, for as long as this lasts: for the host's checkpoints.

        Call alike on every rank, between optimizer steps; collective: units travel home, and back again, also after an
        error within that all ranks have. Nothing travels where they are at home.

        Raises:
            ValueError: where it does not fit into ``config.memory_limits``.
            RuntimeError: as :meth:`move` does.
        """
        parts = self._parts
        if parts.units is None or self._is_at_home:
            yield
            return
        if not parts.units.is_home:
            self._require_open()
        self._is_at(Call.MOVING)
        self._is_at_home = True
        try:
            with self._moves.at_home():
                yield
        finally:
            self._is_at_home = False
            self._change_plan()
            self._is_at(Call.TRAINING)

    def pin(self, rank: int, ratio: float) -> None:
        """Force ``rank`` (within the group) to prune a share ``ratio`` of its columns from the next iteration on.

        Call alike on every rank, between optimizer steps. Holds until :meth:`release`, whatever is measured.

        Raises:
            ValueError: for a rank outside the group, a ratio outside [0, 1), or a mode that does not only prune.
        """
        self._parts.plan_execution.pin(rank, ratio)
        self._change_plan()

    def release(self, rank: int | None = None) -> None:
        """Take back :meth:`pin` for ``rank``, or for all ranks; the plan decided from measurements holds again.

        In modes that migrate nothing can be pinned, so no plan changes, and nothing is sent.
        """
        self._parts.plan_execution.release(rank)
        self._change_plan()

    def metrics(self) -> dict[str, float]:
        """Return this rank's numbers for any logger, names beginning with ``balance/``. Times are in seconds.

        Of the plan, as in :class:`~zeroresize.telemetry.UpdateRecord`: ``ratio`` (γ, pruned and lent together),
        ``relieved`` (what this rank does not compute of an even share), ``group_pruned`` (share of the group's products
        that nobody computes, which ``config.budget`` bounds), ``predicted_step_s``, ``bound_s``, ``products_bound_s``
        and ``moving_rest`` (T*, with and without what moves along with units, and ρ), ``is_straggler`` (0 or 1), and in
        mode "off" ``would/<mode>/…``. Measured: ``busy_s`` and ``gemm_s`` (as they would be at full work),
        ``least_busy_s`` (busy time at the cheapest pruning ratio, by the measured cost: the floor of ZERO). Of the last
        step as it was executed: ``pruned_share``, ``lent_share``, ``borrowed_share`` (of this rank's products; other
        than the plan's after a calibration step or a new plan), ``owned_share`` (a multiple of an even share), and
        ``balancing_s`` (what balancing cost). Memory: ``statistic_bytes`` for the priority's statistic,
        ``migration_bytes`` for lent and borrowed slices, and with ``config.memory_limits`` ``memory_bytes``: what this
        rank holds in training of weights, gradients, optimizer state and activations, as it was counted last. In mode
        "off" also ``watch/…``, as :meth:`zeroresize.watch.Watch.metrics` tells.
        """
        return records.metrics(self._parts, self._num_steps, self._balancing_s)

    def state_dict(self) -> dict[str, Any]:
        """Return what a run needs to go on, under two keys that name the group's ranks.

        One part is the same on every rank of the group; the other, with this rank in its key, is its own and holds
        tensors (for ``priority="variation"`` a copy of the layers' weights).
        """
        return balancer_state.state_of(self._parts, self._num_steps)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; the plan that was in force when it was saved is in force again.

        A statistic of another kind than this configuration's, or of units that this rank does not own, is not taken
        over: it starts anew. What is known of columns follows their units to whoever owns them now.

        Raises:
            ValueError: if it was saved for other layers or another group of ranks, or something of it is missing or of
                another kind, naming that; nothing has changed then. In modes that migrate or move, in "off", and where
                units may be away by ``shares``, it is collective: also if the ranks were given different states.
        """
        self._require_no_visit("load_state_dict()")
        parts = self._parts
        is_collective = (
            parts.lender is not None
            or parts.exchange_of_replicas is not parts.exchange
            or (parts.units is not None and parts.units.why_not_movable is None and parts.may_be_away)
        )
        self._is_at(Call.LOADING)
        try:
            state = balancer_state.loaded_state(parts, state_dict, is_collective=is_collective)
        except ValueError:
            self._is_at(Call.TRAINING)  # as before: nothing has changed
            raise
        self._num_steps = balancer_state.load_state(parts, state, gathers=is_collective and not self._is_closed)
        self._has_calibrated = False
        if is_collective:  # what moves, or is lent, at once by one plan cannot be received by another
            self._parts.decision.require_agreement(self._agreed)
        if not self._is_closed:
            self._moves.follow_loaded(self.plan, self._num_steps)
        balancer_state.load_what_is_of_units(parts, state)
        self._change_plan()
        self._is_at(Call.TRAINING)

    def close(self, *, at_home: bool = False) -> None:
        """Stop measuring and exchanging; the layers compute in full from now on, with the units that they have.

        Dropout modules that were keyed by the unit are put back, but where units are away: there masks must stay alike
        on all owners.

        Args:
            at_home: whether units go home before, for good; collective then, as :meth:`move`.

        Raises:
            RuntimeError: if what was lent cannot be taken back, as another rank has died; all is closed then too. With
                ``at_home`` also if units cannot go home; nothing is closed then.
        """
        if at_home and not self._is_closed:
            self._require_no_visit("close(at_home=True)")
            self._is_at(Call.MOVING)
            self._moves.go_home()
        self._is_closed = True
        self._parts.close()

    def _require_no_visit(self, call: str) -> None:
        if self._is_at_home:
            raise RuntimeError(f"{call} was called within at_home(): call it outside of it")

    def _require_open(self) -> None:
        if self._is_closed:
            raise RuntimeError(
                "this balancer is closed: make a new one to go on balancing, or to bring units home that are away"
            )

    def _change_plan(self) -> None:
        """Carry out what is decided, outside of :meth:`step`: the iteration begins anew. Nothing once closed.

        What is lent goes out with the next training forward, since a model may be loaded before it.
        """
        if self._is_closed:
            return
        self._parts.plan_execution.install(self.plan, self._parts.decision.calibration_plan)
        self._begin_step()

    def _begin_step(self) -> None:
        """Begin a step: what is measured from now on is measured under the plan that is installed now."""
        parts = self._parts
        if parts.num_ranks == 1:
            return
        if parts.statistic is not None:
            parts.statistic.begin_step(self._num_steps)
        parts.plan_execution.begin_step()
        parts.monitor.begin_step(parts.plan_execution.shares_of_step, parts.plan_execution.is_forced)

    def _count_step(self) -> None:
        """One more step is over, wherever that counts."""
        self._parts.where.call, self._parts.where.num_steps = Call.STEP, self._num_steps
        if self._parts.forward_watch is not None:
            self._parts.forward_watch.step_is_called()
        if self._parts.optimizer_steps is not None:
            self._parts.optimizer_steps.step_is_called()
        self._parts.plan_execution.end_step()

    def _calibrate(self) -> None:
        """Measure what pruning and migrating cost, after the first step of training."""
        parts = self._parts
        if parts.exchange is not None and not self._has_calibrated and parts.monitor.is_step_of_training:
            self._has_calibrated = True
            self._is_at(Call.STEP)
            everybody = (parts.exchange_of_replicas if parts.decides_for_replicas else None) or parts.exchange
            migration = calibrate_group(
                parts.layers,
                parts.process_group,
                self.config,
                parts.monitor,
                parts.decision.migration,
                parts.exchange.meet,
            )
            if migration is not None and everybody is not parts.exchange:  # replicas have measured their own
                costs_of_replicas = everybody.gather(dataclasses.astuple(migration))
                migration = MigrationCost(*(max(column) for column in zip(*costs_of_replicas, strict=True)))
            parts.decision.migration = migration
            self._moves.calibrate(self._num_steps)

    def _decide(self) -> None:
        """A new plan, from what all ranks measured until the last update; this rank's numbers go out for the next."""
        self._is_at(Call.STEP)
        measured, before = self._parts.monitor, self.plan
        held = self._parts.memory.held() if self._parts.memory is not None else None
        self._parts.decision.update(measured.times, measured.cost, measured.wait_s, self._agreed, held)
        self._reporter.decided(self._num_steps, before, self._parts.decision, self._parts.units)

    def _end_epoch(self) -> None:
        """Order the columns anew, by what the epoch told of them."""
        selector, statistic = self._parts.selector, self._parts.statistic
        self._parts.columns.set_aside = None  # of the epoch that ends
        if statistic is None or not selector.state.steps_of_epoch:
            selector.end_epoch({}, incremental=False)
        else:
            selector.end_epoch(statistic.take(), incremental=statistic.incremental, adds_up=statistic.adds_up)

    def _is_at(self, call: Call) -> None:
        """Note where this rank is, for the other ranks and for error texts."""
        where = self._parts.where
        where.call, where.num_steps, where.epoch = call, self._num_steps, self._parts.selector.state.epoch
        where.num_forwards = self._parts.monitor.num_forwards

    @property
    def _agreed(self) -> object:
        """What every rank of the group must have alike, besides what is decided."""
        return self._num_steps, *self._parts.plan_execution.agreed
