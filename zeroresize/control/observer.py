"""What one rank measures of its steps, and what it notices that should not be, step after step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from zeroresize.comm.words import Call, Whereabouts
from zeroresize.control.forward_watch import ForwardWatch
from zeroresize.control.group import Group
from zeroresize.control.group_decision import RankNumbers
from zeroresize.control.setup import Layers, Setup
from zeroresize.control.slowness_watch import SlownessWatch
from zeroresize.control.start_checks import StartCheck
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.layers.segments import moving_weights
from zeroresize.measure.column_statistics import ColumnStatistic
from zeroresize.measure.rank_monitor import RankMonitor
from zeroresize.optim.optimizers import hook_steps, stepped_tensors
from zeroresize.plan.group import Workshares
from zeroresize.policy.slowness.windows import WatchedStep
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.memory import HeldBytes
from zeroresize.utils.torch_private import version_of

logger = logging.getLogger(__name__)

#: So many calls of ``balancer.step()``, between which weights changed without a step of the optimizer, are a mistake.
_FEW_STEPS = 2
#: And so many steps of the optimizer without a call.
FEW_CALLS = 10


class Observer:
    """Measures this rank's steps, counts what it holds, and compares what the ranks should have alike.

    Attributes:
        statistic: tells how important each column is; None where no mode asks.
        monitor: measures the steps.
        slowness: says who is slow; only in mode "off", where nothing else tells.
        balancing_s: seconds that balancing took in the last step; ``balancing_since_update_s`` since the last update.
    """

    def __init__(
        self,
        setup: Setup,
        group: Group,
        start_check: StartCheck | None,
        statistic: ColumnStatistic | None,
        attached: ExitStack,
    ) -> None:
        self._units = group.units
        self.statistic, self._memory, self._start_check, self._where = statistic, group.memory, start_check, group.where
        self.balancing_s = self.balancing_since_update_s = 0.0
        self._began = time.perf_counter()
        self.monitor = RankMonitor(setup.layers, setup.config, moving_weights(setup.layers, setup.model))
        attached.callback(self.monitor.close)
        self._optimizer_steps: OptimizerSteps | None = None
        self.slowness: SlownessWatch | None = None
        if group.exchange is None:
            return
        self._optimizer_steps = OptimizerSteps(setup.optimizer, group.where, setup.layers)
        attached.callback(self._optimizer_steps.close)
        if group.units is not None:  # which do not move where another optimizer steps
            group.units.checks.append(self._optimizer_steps.why_another_steps)
        groups = {id(layer.process_group): layer.process_group for layer in setup.layers.values()}.values()
        compares = setup.config.start_checks
        forward_watch = ForwardWatch(setup.layers, group.exchange, compares=compares, groups=groups)
        attached.callback(forward_watch.close)
        if setup.config.mode == "off":  # it counts from the first share that would be balanced
            device = next(iter(setup.layers.values())).local_weight.device
            self.slowness = SlownessWatch(
                group.exchange, setup.rank, setup.num_ranks, setup.config.update_every, device
            )
            attached.callback(self.slowness.close)

    def end_step(self, num_steps: int) -> None:
        """End the step; it is the one of that number."""
        if self._start_check is not None:
            self._start_check.step_is_called(num_steps)
        self.monitor.end_step()
        self._began = time.perf_counter()
        self._where.call, self._where.num_steps = Call.STEP, num_steps
        if self._optimizer_steps is not None:
            self._optimizer_steps.step_is_called()
        if self.slowness is not None:
            # Ranks of a tensor-parallel group have the same batch, and more or fewer units where these do not divide.
            is_by_host = self._units is not None and self._units.shares == self._units.home
            num_tokens = sum(self.monitor.state.num_tokens.values())
            steps = []
            for step, waits_s in zip(self.monitor.last_read, self.monitor.last_waits, strict=True):
                step = step.at_even_shares if is_by_host else step
                products_s = step.gemm_s + step.gather_fill_s
                steps.append(WatchedStep.of_times(step, products_s, 1.0, num_tokens * step.shares.owned, waits_s))
            self.slowness.end_step(steps)

    def begin_step(self, num_steps: int, shares: Workshares, *, is_forced: bool) -> None:
        """Begin the step that follows so many; it is measured under these shares."""
        if self.statistic is not None:
            self.statistic.begin_step(num_steps)
        self.monitor.begin_step(shares, is_forced)

    def end_balancing(self, *, is_update: bool, borrows: bool) -> None:
        """Note that all is done that comes between two steps, and whether this rank computes for others from now on."""
        if is_update and self._memory is not None and not borrows:  # activations of others are not its units'
            self._memory.count_next()
        self.balancing_s = time.perf_counter() - self._began + self.monitor.timer_s
        self.balancing_since_update_s = self.balancing_s + (0.0 if is_update else self.balancing_since_update_s)

    def after_update(self, num_steps: int) -> None:
        """Compare the ranks' parameters again, where that is due; collective."""
        if self._start_check is not None:
            self._start_check.after_update(num_steps)

    @property
    def numbers(self) -> RankNumbers:
        """Return what this rank tells the others at an update."""
        unknown = RankTimes(math.nan, math.nan, math.nan, self.monitor.cost, math.nan)
        held = self._memory.held() if self._memory is not None else HeldBytes(0.0, 0.0)
        return RankNumbers(math.nan, self.monitor.wait_s, held, self.monitor.times or unknown)

    @property
    def why_units_stay(self) -> str | None:
        """Tell why no unit may leave its home now; None where it may."""
        return self._start_check.why_units_stay if self._start_check is not None else None

    def is_at(self, call: Call, num_steps: int, epoch: int) -> None:
        """Note where this rank is, for the other ranks and for error texts."""
        where = self._where
        where.call, where.num_steps, where.epoch, where.num_forwards = call, num_steps, epoch, self.monitor.num_forwards


class OptimizerSteps:
    """Counts an optimizer's steps into this rank's whereabouts, which the ranks compare whenever they meet.

    Ranks that skip different steps train different models, and nothing fails; nor does anything where another optimizer
    steps than the one whose state moves. A loss scaler calls no step where gradients overflow; then weights stay as
    they are, too. Of what hides its torch optimizer nothing is counted.
    """

    def __init__(self, optimizer: Any, where: Whereabouts, layers: Layers) -> None:
        self._where, self._optimizer = where, optimizer
        self.close: Callable[[], object] = lambda: None
        self._layer: BalancedLinear | None = None  # whose weight it steps, which stands for all
        self._num_seen, self._version, self._num_unseen = where.num_optimizer_steps, 0, 0
        self._has_warned = False
        with suppress(ValueError):  # a wrapper that hides its optimizer
            self.close = hook_steps(optimizer, after=self._after_step)
            weights = {name: layer.weight for name, layer in layers.items() if layer.weight.requires_grad}
            name = next(iter(stepped_tensors(optimizer, weights)), None)
            self._layer = None if name is None else layers[name]
            self._version = self._version_now()

    def step_is_called(self) -> None:
        """Note that ``balancer.step()`` is called, and whether weights changed without the optimizer."""
        version = self._version_now()
        if self._num_seen != self._where.num_optimizer_steps:
            self._num_unseen = 0
        elif version != self._version:
            self._num_unseen += 1
        self._num_seen, self._version = self._where.num_optimizer_steps, version

    def why_another_steps(self) -> str | None:
        """Tell why the optimizer seems to have been replaced; None if it does not."""
        if self._num_unseen < _FEW_STEPS:
            return None
        return (
            f"in the last {self._num_unseen} steps weights changed, but not by the {type(self._optimizer).__name__} "
            "that the Balancer was given: close() the Balancer and make a new one with the optimizer that steps"
        )

    def _version_now(self) -> int:
        return 0 if self._layer is None else version_of(self._layer.local_weight)

    def _after_step(self) -> None:
        self._where.num_optimizer_steps += 1
        if self._where.num_optimizer_steps - self._num_seen >= FEW_CALLS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "balancer.step() was not called in the last %d optimizer steps: nothing is balanced without it. Call "
                "it once after every optimizer step, on every rank",
                FEW_CALLS,
            )
