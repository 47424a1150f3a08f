"""Balancer: measure → decide → plan → apply, once per optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.pausing import Pausable
from zeroresize.comm.words import Call
from zeroresize.config import BalanceConfig
from zeroresize.control import balancer_state, records
from zeroresize.control.assembly import build
from zeroresize.control.plan_execution import LineageTable
from zeroresize.control.setup import tell_other_ranks
from zeroresize.plan.group import WorkloadPlan
from zeroresize.status import Status
from zeroresize.telemetry import UpdateRecord
from zeroresize.utils.checked import checked


@checked(tell=lambda given, error: tell_other_ranks(given["model"], given["process_group"], error))
class Balancer(Pausable):
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
        on_status: called with :meth:`status` at every update, and by :meth:`close`, on rank 0 of the group, such as a
            :class:`~zeroresize.telemetry.JsonLinesTelemetry`, which ``zeroresize live`` reads.

    Attributes:
        config, on_update, on_status: are the arguments; the last two may be changed at any time.
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
        on_status: Callable[[Status], object] | None = None,
    ) -> None:
        config = BalanceConfig() if config is None else config
        self.config, self.on_update, self.on_status = config, on_update, on_status
        self._parts = build(model, optimizer, config, process_group, data_parallel_group)
        self.restraint = self._parts.decider.restraint
        self.lineage = LineageTable(self._parts.setup.layers)
        self._num_steps = 0
        self._is_closed = self._is_at_home = False
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
        parts, num_steps = self._parts, self._num_steps + 1
        if self._is_alone:
            self._num_steps = num_steps
            return
        observer, decider, mover, reporter = parts.observer, parts.decider, parts.mover, parts.reporter
        is_update = num_steps % self.config.update_every == 0
        observer.end_step(num_steps)
        self._num_steps = num_steps
        mover.plans.end_step()
        self._is_at(Call.STEP)
        mover.calibrate(num_steps)
        if is_update:
            observer.monitor.learn()
            reporter.measured(num_steps, observer.monitor.step_s)
            mover.tell_what_was_replaced(num_steps)
            before = decider.decided
            decider.update(observer.numbers, self._agreed)
            reporter.decided(num_steps, before, decider, parts.group.units)
            observer.after_update(num_steps)
        else:
            decider.next_step()
        if self.config.iters_per_epoch and num_steps % self.config.iters_per_epoch == 0:
            mover.end_epoch()
        mover.after_step(num_steps, is_update=is_update)
        if is_update and self.on_update is not None:
            self.on_update(records.update_record(parts, num_steps))
        if is_update and parts.group.units is not None:
            decider.saved_s -= math.fsum(move.seconds for move in parts.group.units.moves)
            parts.group.units.forget_moves()
        if is_update:
            self._tell_status()
        observer.end_balancing(is_update=is_update, borrows=self.plan.ranks[parts.setup.rank].borrowed > 0.0)
        parts.group.where.call = Call.TRAINING
        self._begin_step()

    def epoch_end(self) -> None:
        """End an epoch: choose columns anew. :meth:`step` calls it where ``iters_per_epoch`` is set.

        In modes that migrate it is collective: who computes for whom must be agreed on before anybody sends anything.

        Raises:
            RuntimeError: in modes that migrate, if the ranks of the group hold different plans, not all ranks come, or
                some have made another call. In the others the next update tells.
        """
        if self._parts.mover.lender is not None and not self._is_closed:
            self._is_at(Call.EPOCH_END)
            self._parts.decider.require_agreement(self._parts.observer.numbers, self._agreed)
        self._parts.mover.end_epoch()
        self._change_plan()
        self._parts.group.where.call = Call.TRAINING

    def pruned_steps(self) -> dict[str, NDArray[np.int64]]:
        """Count in how many steps so far this rank pruned each column: [K] for every layer."""
        return {name: steps.copy() for name, steps in self._parts.mover.selector.pruned_steps.items()}

    def what_if(self) -> dict[str, dict[str, Any]]:
        """Return what each mode would do with the group now, by mode, as if it had been in force since the first step.

        While ``pause(advice=True)`` holds it is what this mode would do. Modes that move units lend or prune until the
        slowness has cost as much as a move: that they have settled tells ``owned`` of a slow rank, other than 1 then.

        ``predicted_step_s`` (seconds of a step), ``gain`` (share of the step saved in balanced layers, where the metric
        ``watch/share_saved`` divides all that is computed; both NaN before the first decision), ``verdict`` (why units
        would move or stay, or why nobody is spared), and of every rank: ``pruned``, ``lent``, ``owned`` (1 is an even
        share), and ``ratios``, what the three leave out of an even share. The same on every rank.
        """
        if self.config.mode != "off" and self.restraint.state != "advice":
            raise ValueError(
                f"what_if() with mode={self.config.mode!r} is not allowed: only in mode 'off' and while "
                "pause(advice=True) holds it is known what modes would do that are not in force"
            )
        return records.what_if(self._parts)

    def status(self) -> Status:
        """Return who is slow, how units are divided, what that has saved and why; the same on every rank.

        Printed it is a table, also in a notebook. What ranks take is that of the last update, and empty in a group of
        one.
        """
        return records.status(self._parts, self._num_steps, "ended" if self._is_closed else self.restraint.state)

    def layer_times(self) -> dict[str, float]:
        """Return the seconds that this rank's products of each layer took in a usual step, by layer name.

        Forward and backward together, as measured in the interval that the last update ended, under its last plan: what
        is spared is not in it, what the rank computes for others is. Waits in collectives are not, nor evaluation.
        Empty before the first update, where no product of its steps could be read (on a GPU with ``update_every=1``
        that happens), and in a group of one.
        """
        return self._parts.observer.monitor.layer_times

    @property
    def plan(self) -> WorkloadPlan:
        """The plan that is decided and not paused; a :meth:`pin`, or a calibration step, may stand above it."""
        return self._parts.decider.plan

    @property
    def is_calibrating(self) -> bool:
        """Whether the next step is a calibration step: all ranks compute all of their products, to be measured."""
        return self._parts.decider.calibration_plan is not None

    @property
    def bytes_migrated(self) -> int:
        """Bytes of migration so far; each transfer counts on one rank, that which receives it or adds to it."""
        lender = self._parts.mover.lender
        return lender.bytes_moved if lender is not None else 0

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
        self._parts.mover.by_hand(shares, self._num_steps)
        self._change_plan()
        self._is_at(Call.TRAINING)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Let every rank own what its host gave it, for as long as this lasts: for the host's checkpoints.

        Call alike on every rank, between optimizer steps; collective: units travel home, and back again, also after an
        error within that all ranks have. Nothing travels where they are at home. Units that may not move back, as an
        adapter was added within or before, stay at home, and a warning says so.

        Raises:
            ValueError: where it does not fit into ``config.memory_limits``.
            RuntimeError: as :meth:`move` does.
        """
        units = self._parts.group.units
        if units is None or self._is_at_home:
            yield
            return
        if not units.is_home:
            self._require_open()
        self._is_at(Call.MOVING)
        self._is_at_home = True
        try:
            with self._parts.mover.at_home(self._num_steps):
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
        self._parts.mover.plans.pin(rank, ratio)
        self._change_plan()

    def release(self, rank: int | None = None) -> None:
        """Take back :meth:`pin` for ``rank``, or for all ranks; the plan decided from measurements holds again.

        In modes that migrate nothing can be pinned, so no plan changes, and nothing is sent.
        """
        self._parts.mover.plans.release(rank)
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
        "off" also ``watch/…``, as :meth:`zeroresize.watching.Watch.metrics` tells.
        """
        return records.metrics(self._parts, self._num_steps)

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
                units may be away by ``shares``, it is collective.
            RuntimeError: where it is collective, if the ranks were given different states.
        """
        self._require_no_visit("load_state_dict()")
        parts = self._parts
        group, units = parts.group, parts.group.units
        is_collective = (
            parts.mover.lender is not None
            or group.everybody is not group.exchange
            or (units is not None and units.why_not_movable is None and parts.setup.may_be_away)
        )
        self._is_at(Call.LOADING)
        try:
            state = balancer_state.loaded_state(parts, state_dict, is_collective=is_collective)
        except ValueError:
            self._is_at(Call.TRAINING)  # as before: nothing has changed
            raise
        self._num_steps = balancer_state.load_state(parts, state, gathers=is_collective and not self._is_closed)
        parts.mover.needs_calibration = True
        if is_collective:  # what moves, or is lent, at once by one plan cannot be received by another
            self._parts.decider.require_agreement(self._parts.observer.numbers, self._agreed)
        if not self._is_closed:
            self._parts.mover.follow_loaded(self._num_steps)
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
            self._parts.mover.go_home()
        was_open, self._is_closed = not self._is_closed, True
        self._parts.attached.close()
        if was_open and self._num_steps:
            self._tell_status()

    def _tell_status(self) -> None:
        if self.on_status is not None and self._parts.setup.rank == 0:
            self.on_status(self.status())

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
        self._parts.mover.install()
        self._begin_step()

    def _begin_step(self) -> None:
        """Begin a step: what is measured from now on is measured under the plan that is installed now."""
        if not self._is_alone:
            plans = self._parts.mover.plans
            plans.begin_step()
            self._parts.observer.begin_step(self._num_steps, plans.shares_of_step, is_forced=plans.is_forced)

    @property
    def _is_alone(self) -> bool:
        return self._parts.setup.num_ranks == 1

    def _is_at(self, call: Call) -> None:
        """Note where this rank is, for the other ranks and for error texts."""
        self._parts.observer.is_at(call, self._num_steps, self._parts.mover.selector.state.epoch)

    @property
    def _agreed(self) -> object:
        """What every rank of the group must have alike, besides what is decided."""
        return self._num_steps, *self._parts.mover.plans.agreed
