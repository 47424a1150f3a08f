"""Balancer: measure → decide → plan → apply, once per optimizer step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_ranks, group_size, require_group
from zeroresize.comm.whereabouts import Call, Whereabouts
from zeroresize.config import BalanceConfig
from zeroresize.config_keys import PINNABLE_MODES
from zeroresize.control import assembly, balancer_state
from zeroresize.control.group_decision import GroupDecision
from zeroresize.control.lineage import LineageTable
from zeroresize.control.plan_installer import PlanInstaller
from zeroresize.control.planner import Planner
from zeroresize.convert import balanced_layers
from zeroresize.layers.functional import LastGradients
from zeroresize.measure.calibration import calibrate_group
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.plan.group import WorkloadPlan
from zeroresize.policy.columns.selector import Relief
from zeroresize.policy.rules.sharing import borrowed_shares
from zeroresize.telemetry import UpdateRecord

logger = logging.getLogger(__name__)

_RECORDED_METRICS = (
    "ratio",
    "busy_s",
    "products_s",
    "predicted_step_s",
    "is_straggler",
)


class Balancer:
    """Balances the converted layers of a model over its tensor-parallel group.

    Call :meth:`step` once after every ``optimizer.step()``, on every rank. A plan changes there, or by a call of
    :meth:`pin`, :meth:`release`, :meth:`epoch_end` or :meth:`load_state_dict`, so never between a forward and its
    backward, within gradient accumulation, or before a recomputation. For ``torch.distributed.checkpoint`` it is a
    Stateful.

    Args:
        model: what ``zeroresize.convert`` returned, on its device.
        optimizer: the optimizer that steps its parameters.
        process_group: the tensor-parallel group; making the balancer is collective over it.
        config: the configuration that ``convert`` was given; for another one convert again first.
        on_update: called with an :class:`~zeroresize.telemetry.UpdateRecord` at every update, on every rank.

    Attributes:
        config, on_update: as above; ``on_update`` may be changed at any time.
        lineage: which columns are pruned now, ``lineage.pruned(layer_name, "x" | "w")``.

    Raises:
        ValueError: if ``process_group`` is None or not the layers' own, the model has not been converted, or with
            another configuration, or has another balancer, ``optimizer`` steps none of the layers' weights, or the
            ranks do not agree on the configuration. Unless ``start_checks`` is off also if it does not step some of
            them that want gradients, or DistributedDataParallel averages over the group; the first training forward
            raises it if parameters that are no shards differ between the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        process_group: ProcessGroup,
        config: BalanceConfig,
        on_update: Callable[[UpdateRecord], None] | None = None,
    ) -> None:
        self.config = config
        self.optimizer = optimizer
        self.on_update = on_update
        self._group = require_group(process_group)
        self._rank = group_rank(process_group)
        self._num_ranks = group_size(process_group)
        self._layers = balanced_layers(model)
        assembly.check_weights(self._layers, config)
        self._state_key = "group " + "-".join(map(str, group_ranks(process_group)))
        assembly.check_layers(model, self._layers, optimizer, process_group, config)
        assembly.clear_layers(self._layers, config)
        self.lineage = LineageTable(self._layers)
        self._selector = assembly.build_selector(config, self._layers, self._rank)
        exchange = assembly.meet(config, self._layers, process_group)
        self._start_check = assembly.build_start_check(config, model, self._layers, process_group, exchange)
        # The freezer is first, so that the statistic sees weights that were put back.
        self._freezer = assembly.build_freezer(config, self._layers, optimizer, process_group)
        self._statistic = assembly.build_statistic(config, self._layers, optimizer)
        self._installer = PlanInstaller(self._layers, self._selector, config.imputation)
        self._lender = assembly.build_lender(config, self._layers, process_group)
        self._decision: Planner = GroupDecision(config, self._num_ranks, exchange)
        self._monitor = RankMonitor(self._layers, config)
        self._forward_watch = assembly.build_forward_watch(config, self._layers, exchange)
        self._exchange = exchange
        self._where = exchange.where if exchange is not None else Whereabouts()
        self._num_steps = 0
        self._pins: dict[int, float] = {}
        self._is_at_full_work = self._has_calibrated = self._is_closed = False
        self._balancing_s = self._balancing_since_update_s = 0.0
        self._shares_of_step = self._shares_in_force
        self._shares_of_last_step: dict[str, float] | None = None
        self._change_plan()
        self._where.call = Call.TRAINING

    def step(self) -> None:
        """One optimizer step is done: record it and, every ``update_every`` steps, exchange and decide.

        Raises:
            RuntimeError: if the ranks of the group hold different plans, as after a ``pin`` on only some of them, or
                did not call this or :meth:`epoch_end` equally often; if ranks do not come; or after :meth:`close`.
        """
        if self._is_closed:
            raise RuntimeError("this balancer is closed: make a new one to go on balancing")
        if self._num_ranks == 1:
            return
        self._monitor.end_step()
        began = time.perf_counter()
        self._shares_of_last_step = self._shares_of_step
        self._num_steps += 1
        self._where.call, self._where.num_steps = Call.STEP, self._num_steps
        if self._forward_watch is not None:
            self._forward_watch.step_is_called()
        self._selector.count_step(self._installer.in_force)
        self._calibrate()
        self._is_at_full_work = False
        is_update = self._num_steps % self.config.update_every == 0
        if is_update:
            self._update()
        if self.config.iters_per_epoch and self._num_steps % self.config.iters_per_epoch == 0:
            self._end_epoch()
        self._install()
        if self._lender is not None:
            self._lender.send_weights()
        if is_update and self.on_update is not None:
            self.on_update(self._record())
        self._balancing_s = time.perf_counter() - began + self._monitor.timer_s
        self._balancing_since_update_s = self._balancing_s + (0.0 if is_update else self._balancing_since_update_s)
        self._where.call = Call.TRAINING
        self._begin_step()

    def epoch_end(self) -> None:
        """An epoch is over: columns are chosen anew. Called by :meth:`step` where ``iters_per_epoch`` is set.

        In modes that migrate it is collective: who computes for whom must be agreed on before anybody sends anything.

        Raises:
            ValueError: in modes that migrate, if the ranks of the group hold different plans.
            RuntimeError: in modes that migrate, if not all ranks come, or some have made another call. In the others
                the next update tells.
        """
        if self._lender is not None and not self._is_closed:
            self._note(Call.EPOCH_END)
            self._decision.require_agreement(self._agreed)
        self._end_epoch()
        self._change_plan()
        self._where.call = Call.TRAINING

    def pruned_steps(self) -> dict[str, NDArray[np.int64]]:
        """In how many steps so far this rank pruned each column: [K] for every layer."""
        return {name: steps.copy() for name, steps in self._selector.pruned_steps.items()}

    def what_if(self) -> dict[str, dict[str, Any]]:
        """In mode "off": what each mode would do with the group now, by mode; empty in other modes.

        ``predicted_step_s`` (seconds of a step), ``gain`` (the share of the step that it saves; both NaN before the
        first decision), and of every rank, in lists: ``pruned``, ``lent``, and ``ratios``, the two together. The same
        on every rank.
        """
        full_s = self.plan.predicted_step_s
        return {
            mode: {
                "predicted_step_s": plan.predicted_step_s,
                "gain": 1.0 - plan.predicted_step_s / full_s,
                "ratios": [rank.pruned + rank.lent for rank in plan.ranks],
                "pruned": [rank.pruned for rank in plan.ranks],
                "lent": [rank.lent for rank in plan.ranks],
            }
            for mode, plan in self._decision.what_if_plans.items()
        }

    def layer_times(self) -> dict[str, float]:
        """Seconds that this rank's products of each layer took in a usual step, by layer name.

        Forward and backward together, as measured in the interval that the last update ended, under its last plan: what
        is spared is not in it, what the rank computes for others is. Waits in collectives are not, nor evaluation.
        Empty before the first update, where no product of its steps could be read (on a GPU with ``update_every=1``
        that happens), and in a group of one.
        """
        return self._monitor.layer_times

    def sync_gradients(self) -> None:
        """Bring lent gradients home: they are whole when backward returns, so there is nothing left to do."""

    @property
    def bytes_migrated(self) -> int:
        """Bytes of migration so far; each transfer counts on one rank, that which receives it or adds to it."""
        return self._lender.bytes_moved if self._lender is not None else 0

    def pin(self, rank: int, ratio: float) -> None:
        """Force ``rank`` (within the group) to prune a share ``ratio`` of its columns from the next iteration on.

        Call alike on every rank, between optimizer steps. Holds until :meth:`release`, whatever is measured.

        Raises:
            ValueError: for a rank outside the group, a ratio outside [0, 1), or a mode that does not only prune.
        """
        self._require_rank(rank)
        self._pins[rank] = self.config.pinned(ratio, rank).forced_ratio or 0.0
        self._change_plan()

    def release(self, rank: int | None = None) -> None:
        """Take back :meth:`pin` for ``rank``, or for all ranks; the plan decided from measurements holds again.

        In modes that migrate nothing can be pinned, so no plan changes, and nothing is sent.
        """
        if rank is None:
            self._pins.clear()
        else:
            self._require_rank(rank)
            self._pins.pop(rank, None)
        self._change_plan()

    def metrics(self) -> dict[str, float]:
        """This rank's numbers for any logger, names beginning with ``balance/``.

        Of :class:`~zeroresize.telemetry.UpdateRecord`, as they are now: ``ratio``, ``busy_s`` and ``products_s`` (as
        they would be at full work), ``predicted_step_s``, ``is_straggler`` (0 or 1), and in mode "off"
        ``would/<mode>/…``. Of the last step: ``pruned_share``, ``lent_share``, ``borrowed_share``, which differ from
        the plan's after a step at full work or a new plan. Besides: ``least_busy_s`` (busy time at the cheapest pruning
        ratio, by the measured cost: the floor of ZERO), ``step_balancing_s`` (seconds balancing cost in the last step),
        ``statistic_bytes`` and ``migration_bytes`` (memory for the priority's statistic, and for lent and borrowed
        slices).
        """
        record, times = self._record(), self._monitor.times
        numbers = {name: float(getattr(record, name)) for name in _RECORDED_METRICS} | {
            **(self._shares_of_last_step or self._shares_of_step),
            "least_busy_s": times.least_busy_s if times else math.nan,
            "step_balancing_s": self._balancing_s,
            "statistic_bytes": float(self._statistic.bytes_held if self._statistic is not None else 0),
            "migration_bytes": float(self._lender.bytes_held if self._lender is not None else 0),
        }
        numbers |= {f"would/{mode}/{name}": value for mode, own in record.would.items() for name, value in own.items()}
        return {f"balance/{name}": value for name, value in numbers.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on, under two keys that name the group's ranks.

        One part is the same on every rank of the group; the other, with this rank in its key, is its own and holds
        tensors (for ``priority="variation"`` a copy of the layers' weights).
        """
        state = {
            "num_steps": self._num_steps,
            "decision": self._decision.state_dict(),
            "is_at_full_work": self._is_at_full_work,
            "pins": [self._pins.get(rank) for rank in range(self._num_ranks)],
            "layers": self._columns_of_layers(),
        }
        own = {
            "selector": self._selector.state_dict(),
            "measurement": self._monitor.state_dict(),
            # A tuple is one entry of a checkpoint, which another kind of statistic finds too and leaves alone.
            "statistic": (self._name_of_statistic, self._statistic.state_dict() if self._statistic is not None else {}),
            "last_gradients": ({name: dict(vars(layer.last)) for name, layer in self._layers.items() if layer.last},),
        }
        return {self._state_key: state, self._own_state_key: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; the plan that was in force when it was saved is in force again.

        A statistic of another kind than this configuration's is not taken over: it starts anew.

        Raises:
            ValueError: if it was saved for other layers or another group of ranks, or something of it is missing or of
                another kind, naming that; nothing has changed then. In modes that migrate, where it is collective, also
                if the ranks were given different states.
        """
        self._note(Call.LOADING)
        problem = None
        try:
            self._require_loadable(state_dict)
        except ValueError as error:
            problem = error
        if self._lender is not None:  # nobody may wait for a rank that has none to load
            self._decision.require_loadable(problem)
        if problem is not None:
            self._note(Call.TRAINING)  # as before: nothing has changed
            raise problem
        state, own = state_dict[self._state_key], state_dict[self._own_state_key]
        self._decision.load_state_dict(state["decision"])
        self._take_back()  # the same ratio and epoch may mean other columns
        self._selector.load_state_dict(own["selector"])
        name_of_statistic, seen = own["statistic"]
        if self._statistic is not None:
            if name_of_statistic == self._name_of_statistic:
                self._statistic.load_state_dict(seen)
            else:
                self._statistic.take()  # what it saw until now was of other weights
        (last_gradients,) = own["last_gradients"]
        for name, layer in self._layers.items():
            if layer.last is not None and name in last_gradients:
                known = {key: last_gradients[name][key] for key in vars(layer.last)}
                layer.last = LastGradients(**known).to(layer.local_weight.device)
        self._num_steps = state["num_steps"]
        pins = enumerate(state["pins"]) if self.config.mode in PINNABLE_MODES else ()
        self._pins = {rank: ratio for rank, ratio in pins if ratio is not None}
        self._monitor.load_state_dict(own["measurement"])
        self._is_at_full_work = state["is_at_full_work"]
        self._has_calibrated = False
        self._shares_of_last_step = None
        if self._lender is not None:  # what is lent at once by one plan cannot be borrowed by another
            self._decision.require_agreement(self._agreed)
        self._change_plan()
        self._note(Call.TRAINING)

    def _require_loadable(self, state_dict: Any) -> None:
        """Raises ValueError where :meth:`load_state_dict` could not take it over."""
        keys = self._state_key, self._own_state_key
        balancer_state.require_parts(state_dict, *keys)
        shared, own = (state_dict[key] for key in keys)
        try:
            balancer_state.require_shared(
                shared,
                keys[0],
                columns=self._columns_of_layers(),
                decision=self._decision,
                num_ranks=self._num_ranks,
            )
            balancer_state.require_own(
                own,
                keys[1],
                layers=self._layers,
                selector=self._selector,
                monitor=self._monitor,
                statistic=self._statistic,
                name_of_statistic=self._name_of_statistic,
            )
        except ValueError as error:
            raise ValueError(f"the balancer's state cannot be loaded: {error}") from error

    def close(self) -> None:
        """Stop measuring and exchanging; the layers compute in full from now on.

        Raises:
            RuntimeError: if what was lent cannot be taken back, as another rank has died; all is closed then too.
        """
        self._is_closed = True
        for layer in self._layers.values():
            layer.last, layer.needs_eager_autograd = None, False
        with ExitStack() as ending:  # each of them, whatever becomes of the others; the last one first
            for attached in (
                self._start_check,
                self._freezer,
                self._statistic,
                self._decision,
                self._monitor,
                self._forward_watch,
                self._lender,
            ):
                if attached is not None:
                    ending.callback(attached.close)
            self._installer.clear()

    def _take_back(self) -> None:
        """Every layer computes all of its own columns."""
        self._installer.clear()
        if self._lender is not None:
            self._lender.take_back()

    @property
    def plan(self) -> WorkloadPlan:
        """The plan that is decided; a :meth:`pin`, or a step at full work, may stand above it."""
        return self._decision.plan

    @property
    def _own_state_key(self) -> str:
        return f"{self._state_key} rank {self._rank}"

    @property
    def _name_of_statistic(self) -> str | None:
        if self._statistic is None:
            return None
        return f"{self.config.priority} {self.config.snapshot}"

    def _columns_of_layers(self) -> dict[str, int]:
        return {name: layer.num_columns for name, layer in self._layers.items()}

    def _change_plan(self) -> None:
        """Carry out what is decided, outside of :meth:`step`: the iteration begins anew. Nothing once closed.

        What is lent goes out with the next training forward, since a model may be loaded before it.
        """
        if self._is_closed:
            return
        self._install()
        self._begin_step()

    def _begin_step(self) -> None:
        """What is measured from now on is measured under the plan that is installed now."""
        if self._num_ranks == 1:
            return
        if self._statistic is not None:
            self._statistic.begin_step(self._num_steps)
        shares = self._shares_of_step = self._shares_in_force
        self._monitor.begin_step(
            shares["pruned_share"] + shares["lent_share"],
            shares["borrowed_share"],
            self._installer.in_force.is_forced,
        )

    def _calibrate(self) -> None:
        """What pruning and migrating cost, after the first step of training."""
        if self._exchange is not None and not self._has_calibrated and self._monitor.is_step_of_training:
            self._has_calibrated = True
            self._note(Call.STEP)
            self._decision.migration = calibrate_group(
                self._layers, self._group, self.config, self._monitor, self._decision.migration, self._exchange.meet
            )

    def _update(self) -> None:
        """Measure and decide."""
        self._note(Call.STEP)
        self._monitor.learn()
        measured = self._monitor
        before = self.plan.relieved
        self._decision.update(measured.times, measured.cost, measured.wait_s, self._agreed)
        self._is_at_full_work = self.plan.begins_at_full_work
        if self._rank == 0 and self.plan.relieved != before:
            logger.info("step %d: %s", self._num_steps, self.plan.told)

    def _note(self, call: Call) -> None:
        """Where this rank is, for the other ranks and for what errors tell."""
        self._where.call, self._where.num_steps, self._where.epoch = call, self._num_steps, self._selector.epoch
        self._where.num_forwards = self._monitor.num_forwards

    def _end_epoch(self) -> None:
        if self._statistic is None or not self._selector.steps_of_epoch:
            self._selector.end_epoch({}, incremental=False)
        else:
            self._selector.end_epoch(self._statistic.take(), incremental=self._statistic.incremental)

    def _record(self) -> UpdateRecord:
        times = self._monitor.times
        return UpdateRecord(
            update=self._num_steps // self.config.update_every,
            step=self._num_steps,
            epoch=self._selector.epoch,
            rank=self._rank,
            busy_s=times.busy_s if times else math.nan,
            products_s=times.gemm_s if times else math.nan,
            is_straggler=self.plan.ranks[self._rank].is_straggler,
            ratio=self._installer.relief.pruned + self._installer.relief.lent,
            pruned_share=self._installer.pruned_share,
            lent_share=self._installer.lent_share,
            borrowed_share=self._borrowed_share,
            lent_to={
                str(receiver): self._installer.lent_share * part
                for loan in self.plan.loans
                if loan.owner == self._rank
                for receiver, part in zip(loan.receivers, loan.parts, strict=True)
            },
            layer_shares=self._installer.layer_shares,
            predicted_step_s=self.plan.predicted_step_s,
            begins_at_full_work=self._is_at_full_work,
            balancing_s=self._balancing_since_update_s,
            would={
                mode: {
                    "predicted_step_s": told["predicted_step_s"],
                    "gain": told["gain"],
                    "most_ratio": max(told["ratios"]),
                }
                for mode, told in self.what_if().items()
            },
        )

    def _install(self) -> None:
        """Carry out what is decided, from the next iteration on."""
        own = self.plan.ranks[self._rank]
        if self._rank in self._pins:
            self._installer.install(Relief(self._pins[self._rank], is_forced=True))
        else:
            self._installer.install(Relief(own.pruned, own.lent, is_forced=self.config.forced_ratio is not None))
            if self._is_at_full_work:
                self._installer.suspend()
        if self._lender is not None:
            loans = () if self._is_at_full_work else self.plan.loans
            if self._exchange is not None and self._lender.would_be_new(loans, self._selector.epoch):
                self._exchange.meet()  # a rank that is a step ahead would send the others what they do not await
            self._lender.install(loans, self._installer.lent_columns(), epoch=self._selector.epoch)

    @property
    def _agreed(self) -> object:
        """What every rank of the group must have alike, besides what is decided."""
        return self._num_steps, self._selector.epoch, sorted(self._pins.items()), self._is_at_full_work

    @property
    def _shares_in_force(self) -> dict[str, float]:
        """What this rank drops, leaves to others and computes for others in the iteration under way."""
        pruned_share, lent_share = self._installer.shares_in_force
        borrowed_share = 0.0 if self._is_at_full_work else self._borrowed_share
        return {"pruned_share": pruned_share, "lent_share": lent_share, "borrowed_share": borrowed_share}

    @property
    def _borrowed_share(self) -> float:
        return borrowed_shares(self.plan.loans, self._num_ranks)[self._rank]

    def _require_rank(self, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self._num_ranks:
            raise ValueError(f"rank={rank!r} is outside the process group: allowed are 0 to {self._num_ranks - 1}")
