"""Balancer: measure → decide → plan → apply, once per optimizer step."""

from __future__ import annotations

import logging
import math
import statistics
import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from zeroresize.collectives import NumbersGroup, group_rank, group_ranks, group_size, require_group, same_ranks
from zeroresize.config import PRUNING_MODES, BalanceConfig
from zeroresize.convert import balanced_layers
from zeroresize.exchange import Exchange
from zeroresize.functional import LastGradients
from zeroresize.installation import PlanInstaller
from zeroresize.lineage import LineageTable
from zeroresize.linear import BalancedLinear
from zeroresize.plan import WorkloadPlan
from zeroresize.policy.controller import Controller
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.ratio import RankTimes, full_work
from zeroresize.pretest import measure_resizing_cost
from zeroresize.timing import StepTimer, StepTimes, clock_for

logger = logging.getLogger(__name__)


class Balancer:
    """Balances the converted layers of a model over its tensor-parallel group.

    Call :meth:`step` once after every ``optimizer.step()``, on every rank. A plan changes only there, so never between
    a forward and its backward, within gradient accumulation, or before a recomputation. It is a
    ``torch.distributed.checkpoint`` Stateful; its state is the same on every rank of the group.

    Args:
        model: what ``zeroresize.convert`` returned, on its device.
        optimizer: the optimizer that steps its parameters.
        process_group: the tensor-parallel group; making the balancer is collective over it.
        config: the configuration that ``convert`` was given.

    Attributes:
        plan: the :class:`~zeroresize.plan.WorkloadPlan` in force.
        lineage: which columns are pruned now, ``lineage.pruned(layer_name, "x" | "w")``.

    Raises:
        ValueError: if ``process_group`` is None or not the layers' own, the model has not been converted or has
            another balancer, or the ranks do not agree on the configuration.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        process_group: ProcessGroup,
        config: BalanceConfig,
    ) -> None:
        self.config = config
        self.optimizer = optimizer
        self._rank = group_rank(require_group(process_group))
        self._num_ranks = group_size(process_group)
        self._layers = balanced_layers(model)
        self._state_key = "group " + "-".join(map(str, group_ranks(process_group)))
        if self._num_ranks > 1:
            self._check_layers(process_group)
        self.lineage = LineageTable(self._columns_of_layers())
        self._installer = PlanInstaller(self._layers, self.lineage, config, self._rank)
        self._controller = Controller(config, self._num_ranks)
        self._exchange = self._meet(process_group) if self._num_ranks > 1 else None
        self._received: list[list[float]] | None = None
        self._cost = ResizingCost.linear(config.max_ratio)
        self._times: RankTimes | None = None
        self._is_pretested = False
        self._timer = self._attach_timer()
        self._interval: list[StepTimes] = []
        self._num_steps = 0
        self._epoch = 0
        self._pins: dict[int, float] = {}
        self._step_overhead_s = 0.0
        self._use(self._controller.initial_plan())

    def step(self) -> None:
        """One optimizer step is done: record it and, every ``update_every`` steps, exchange and decide."""
        if self._exchange is None:
            return
        times = self._timer.end_step()
        began = time.perf_counter()
        if times is not None:
            self._interval.append(times)
        self._num_steps += 1
        if not self._is_pretested:
            self._pretest()
        if self._num_steps % self.config.update_every == 0:
            self._update(self._exchange)
        if self.config.iters_per_epoch and self._num_steps % self.config.iters_per_epoch == 0:
            self.epoch_end()
        self._step_overhead_s = time.perf_counter() - began
        self._begin_step()

    def epoch_end(self) -> None:
        """An epoch is over: columns are drawn anew. Called by :meth:`step` where ``iters_per_epoch`` is set."""
        self._epoch += 1
        self._install()

    def sync_gradients(self) -> None:
        """Bring lent gradients home; call before clipping. Returns at once: no mode that exists lends work."""

    def pin(self, rank: int, ratio: float) -> None:
        """Force ``rank`` (within the group) to prune a share ``ratio`` of its columns from the next iteration on.

        Call alike on every rank, between optimizer steps. Holds until :meth:`release`, whatever is measured.

        Raises:
            ValueError: for a rank outside the group, a ratio outside [0, 1), or ``mode="off"``.
        """
        self._require_rank(rank)
        if self.config.mode not in PRUNING_MODES:
            raise ValueError(f"pin needs a mode that prunes ({list(PRUNING_MODES)}), this balancer's is 'off'")
        self._pins[rank] = self.config.replace(ratio=ratio, ranks=(rank,)).forced_ratio or 0.0
        self._install()

    def release(self, rank: int | None = None) -> None:
        """Take back :meth:`pin` for ``rank``, or for all ranks; the plan decided from measurements holds again."""
        if rank is None:
            self._pins.clear()
        else:
            self._require_rank(rank)
            self._pins.pop(rank, None)
        self._install()

    def metrics(self) -> dict[str, float]:
        """This rank's numbers for any logger, names beginning with ``balance/``.

        ``ratio`` (γ wanted), ``pruned_share``, ``lent_share`` and ``borrowed_share`` (of this rank's product FLOPs),
        ``busy_s`` and ``products_s`` (seconds an iteration, at full work; NaN before the first update),
        ``least_busy_s`` (the same at the cheapest pruning ratio, by the measured cost: the floor of ZERO),
        ``is_straggler`` (0 or 1), ``overhead_s`` (seconds balancing cost in the last step).
        """
        return {
            "balance/ratio": self._installer.ratio,
            "balance/pruned_share": self._installer.pruned_share,
            "balance/lent_share": 0.0,
            "balance/borrowed_share": 0.0,
            "balance/busy_s": self._times.busy_s if self._times else math.nan,
            "balance/products_s": self._times.gemm_s if self._times else math.nan,
            "balance/least_busy_s": self._times.least_busy_s if self._times else math.nan,
            "balance/is_straggler": float(self.plan.ranks[self._rank].is_straggler),
            "balance/overhead_s": self._step_overhead_s + self._timer.overhead_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on, as plain values under a key that names the group's ranks."""
        self._collect()
        state = {
            "num_steps": self._num_steps,
            "epoch": self._epoch,
            "controller": self._controller.state_dict(),
            "received": self._received,
            "pins": [self._pins.get(rank) for rank in range(self._num_ranks)],
            "layers": self._columns_of_layers(),
        }
        return {self._state_key: state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; the plan that was in force when it was saved is in force again.

        Raises:
            ValueError: if it was saved for other layers or another group of ranks.
        """
        if self._state_key not in state_dict:
            raise ValueError(f"no balancer state of {self._state_key!r}: there is {sorted(state_dict)}")
        state = state_dict[self._state_key]
        layers = self._columns_of_layers()
        if state["layers"] != layers:
            differing = sorted(set(layers.items()) ^ set(state["layers"].items()))
            raise ValueError(f"the balancer's state is of another model: (layer, columns) differ: {differing[:6]}")
        self._controller.load_state_dict(state["controller"])
        self._num_steps = state["num_steps"]
        self._epoch = state["epoch"]
        self._received = state["received"]
        pins = enumerate(state["pins"]) if self.config.mode in PRUNING_MODES else ()
        self._pins = {rank: ratio for rank, ratio in pins if ratio is not None}
        self._interval = []
        self._use(self._controller.current_plan())

    def close(self) -> None:
        """Stop measuring and exchanging; the layers compute in full from now on."""
        self._installer.clear()
        self._detach()
        if self._exchange is not None:
            self._exchange.close()

    def _check_layers(self, process_group: ProcessGroup) -> None:
        if not self._layers:
            raise ValueError("the model has no converted layers: call zeroresize.convert(model, ...) first")
        for name, layer in self._layers.items():
            if not same_ranks(layer.process_group, process_group):
                raise ValueError(f"layer {name} belongs to another process group: pass the one that convert was given")
            if layer.probes.holds(StepTimer):
                raise ValueError("the model has another balancer: close() that one first")
            layer.last = LastGradients() if self.config.imputation == "same" else None

    def _meet(self, process_group: ProcessGroup) -> Exchange:
        """Join the other ranks for exchanging numbers, once all agree on what they will do."""
        agreement = {key: repr(value) for key, value in self.config.to_dict().items()}
        agreement["converted layers"] = ", ".join(self._layers)
        return Exchange(NumbersGroup(process_group, agreement))

    def _attach_timer(self) -> StepTimer:
        layers = list(self._layers.values())
        timer = StepTimer(clock_for(layers[0].weight.device if layers else torch.device("cpu")))
        for layer in layers:
            layer.probes.add_outermost(timer)
        self._detach = weakref.finalize(self, _detach, timer, layers)
        return timer

    def _columns_of_layers(self) -> dict[str, int]:
        return {name: layer.num_columns for name, layer in self._layers.items()}

    def _begin_step(self) -> None:
        """What is measured from now on is measured under the plan that is installed now."""
        if self._exchange is not None:
            self._timer.begin_step(self._installer.pruned_share)

    def _pretest(self) -> None:
        self._is_pretested = True
        if self.config.mode in PRUNING_MODES:
            self._cost = measure_resizing_cost(self._layers.values(), self.config.max_ratio)
            logger.debug("cost of pruning on rank %d: %s", self._rank, self._cost)

    def _update(self, exchange: Exchange) -> None:
        """Decide from what was exchanged at the last update, and send what was measured since."""
        self._collect()
        if self._received is not None:
            self._use(self._controller.update([_as_rank_times(numbers) for numbers in self._received]))
            self._received = None
        self._learn_from_interval()
        exchange.post(_as_numbers(self._times, self._cost))

    def _collect(self) -> None:
        received = self._exchange.collect() if self._exchange is not None else None
        if received is not None:
            self._received = received

    def _learn_from_interval(self) -> None:
        """This rank's full-work times from the medians of the interval that ends."""
        steps = [times for times in self._interval if times.plan_key == self._interval[-1].plan_key]
        self._interval = []
        if not steps:
            return
        now = _median(steps)
        self._times = full_work(
            busy_s=now.busy_s,
            gemm_s=now.gemm_s,
            overhead_s=now.overhead_s,
            ratio=now.plan_key,
            cost=self._cost,
            last_scale=self._times.overhead_scale if self._times is not None else 1.0,
        )

    def _use(self, plan: WorkloadPlan) -> None:
        self.plan = plan
        self._install()

    def _install(self) -> None:
        ratio = self._pins.get(self._rank, self.plan.ranks[self._rank].ratio)
        self._installer.install(ratio, self._epoch)
        self._begin_step()

    def _require_rank(self, rank: int) -> None:
        if not 0 <= rank < self._num_ranks:
            raise ValueError(f"rank={rank} is outside the process group: allowed are 0 to {self._num_ranks - 1}")


def _median(steps: list[StepTimes]) -> StepTimes:
    """A step's usual times: a median forgives a hiccup, an evaluation or a checkpoint within the interval."""
    return StepTimes(
        busy_s=statistics.median(times.busy_s for times in steps),
        gemm_s=statistics.median(times.gemm_s for times in steps),
        overhead_s=statistics.median(times.overhead_s for times in steps),
        plan_key=steps[-1].plan_key,
    )


def _detach(timer: StepTimer, layers: list[BalancedLinear]) -> None:
    timer.close()
    for layer in layers:
        layer.probes.remove(timer)


def _as_numbers(times: RankTimes | None, cost: ResizingCost) -> list[float]:
    if times is None:
        own = [math.nan, math.nan, math.nan, 0.0]
    else:
        own = [times.rest_s, times.gemm_s, times.overhead_scale, times.measured_at]
    return [*own, *cost.ratios, *cost.gemm_share, *cost.overhead_s]


def _as_rank_times(numbers: list[float]) -> RankTimes:
    rest_s, gemm_s, overhead_scale, measured_at, *points = numbers
    third = len(points) // 3
    cost = ResizingCost(*(tuple(points[i * third : (i + 1) * third]) for i in range(3)))
    return RankTimes(rest_s, gemm_s, overhead_scale, cost, measured_at)
