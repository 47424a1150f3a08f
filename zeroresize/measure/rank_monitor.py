"""Measures one rank's steps: a timer in its balanced layers, and what each update learns from it."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zeroresize.config import BalanceConfig
from zeroresize.kernels import implementation_on
from zeroresize.layers.balanced_linear import BalancedLinear
from zeroresize.measure.calibration import measure_resizing_cost
from zeroresize.measure.clocks import clock_for
from zeroresize.measure.step_timer import LayerTimer, StepTimer
from zeroresize.measure.timed_products import compare_products, time_reference
from zeroresize.measure.waits import Where
from zeroresize.plan.group import Workshares
from zeroresize.policy.tensor.costs import ResizingCost
from zeroresize.policy.tensor.estimation.estimator import RankEstimator
from zeroresize.policy.tensor.estimation.times import RankTimes, StepTimes
from zeroresize.utils.usual import usual_of

logger = logging.getLogger(__name__)

#: A calibration stays valid while a step's work changes by at most this factor, up or down.
_LIKE = 1.5
#: Of fewer steps what lies outside of the layers tells nothing: any may have followed an evaluation.
_FEWEST_OUTSIDE = 3


@dataclass(frozen=True)
class _Conditions:
    """Describes what a calibration depends on."""

    computing: str  # the device, the dtypes that layers compute in, by which kernels, and how columns are pruned
    work: float  # tokens of a step times the sizes of the weights they meet

    @classmethod
    def of_step(cls, layers: Mapping[str, BalancedLinear], config: BalanceConfig) -> _Conditions:
        """Those of the step that has just ended."""
        seen = [layer for layer in layers.values() if layer.num_tokens > 0]
        # In mode "mig" the kept columns are neighbours, which are not gathered.
        computing = {f"γ ≤ {config.max_ratio}, {config.block} columns, gathered {config.mode != 'mig'}"}
        for layer in seen:
            device = layer.local_weight.device
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            computing.add(f"{name} {layer.compute_dtype} {implementation_on(device.type, layer.compute_dtype).name}")
        work = sum(layer.num_tokens * math.prod(layer.even_shape) for layer in seen)
        return cls("; ".join(sorted(computing)), float(work))


@dataclass
class MonitorState:
    """Holds what a monitor has learned, from which a resumed run goes on."""

    estimator: RankEstimator
    calibrated_on: _Conditions | None = None  # under which what pruning costs was measured
    num_tokens: dict[str, int] = field(default_factory=dict)  # of each layer in the last step of training, by name
    most_forwards: int = 1  # of a layer in that step
    outsides_s: list[float] = field(default_factory=list)  # outside of the layers in the last steps
    interval: list[StepTimes] = field(default_factory=list)  # the steps since the last update


class RankMonitor:
    """Times the steps of this rank's balanced layers, from update to update.

    Args:
        layers: balanced layers by name, all on one device.
        config: how to balance.
        moving_weights: share of the weights that this rank trains in which units can change hands.

    Attributes:
        state: what was learned.
        last_read: the steps whose times were read at the last :meth:`end_step`; ``last_waits`` of each, by where.
        wait_s: seconds of waiting in a usual step under the last update's last plan, NaN where none was read.
        step_s: seconds of such a step, waits included; NaN where none was read.
    """

    def __init__(
        self, layers: Mapping[str, BalancedLinear], config: BalanceConfig, moving_weights: float = 0.0
    ) -> None:
        self._layers, self._config, self._moving_weights = layers, config, moving_weights
        self.state = MonitorState(RankEstimator(ResizingCost.linear(config.max_ratio)))
        self.last_read: list[StepTimes] = []
        self.last_waits: list[dict[Where, float]] = []
        self.wait_s = self.step_s = math.nan
        self._by_layer: list[Mapping[str, float]] = []  # seconds of each layer's products in such steps
        self._shares_in_force = Workshares()
        self._has_seen_training = self._has_warned = False
        # Ranks run row-parallel layers together, since their outputs are summed; a model without any counts all layers.
        self._counted = [layer for layer in layers.values() if not layer.is_column_parallel] or list(layers.values())
        self._num_forwards_before_step = 0
        device = next(iter(layers.values())).local_weight.device if layers else torch.device("cpu")
        self._timer = StepTimer(clock_for(device))
        probes = []
        for name, layer in layers.items():
            layer.forget_forwards()
            probes.append((layer, LayerTimer(self._timer, name)))
            layer.probes.add_outermost(probes[-1][1])
        self.close = weakref.finalize(self, _detach, self._timer, probes)

    @property
    def times(self) -> RankTimes | None:
        """Times at full work as far as is known, None before the first update."""
        times = self.state.estimator.times
        outside_s = usual_of(self.state.outsides_s) if self.state.outsides_s else 0.0
        return None if times is None else dataclasses.replace(times, outside_s=outside_s)

    @property
    def cost(self) -> ResizingCost:
        """What pruning costs; proportional to FLOPs until :meth:`calibrate`."""
        return self.state.estimator.cost

    @property
    def timer_s(self) -> float:
        """Seconds that timing cost in the last step."""
        return self._timer.timer_s

    def begin_step(self, shares: Workshares, is_forced: bool) -> None:
        """Begin a step whose plan spares this rank ``shares.spared`` of its products and adds ``shares.borrowed``."""
        self._num_forwards_before_step = self.num_forwards
        for layer in self._layers.values():
            layer.forget_forwards()
        self._shares_in_force = shares
        self._timer.begin_step(shares, is_forced)

    def end_step(self) -> None:
        """End the step."""
        self.last_read, self.last_waits = self._timer.end_step(), self._timer.waits
        self.state.interval += self.last_read
        if self.is_step_of_training:
            self._has_seen_training = True
            self.state.num_tokens = {name: layer.num_tokens for name, layer in self._layers.items()}
            self.state.most_forwards = max(layer.num_forwards for layer in self._layers.values())

    @property
    def layer_times(self) -> dict[str, float]:
        """Seconds of each layer's products in a usual step under the last update's last plan; empty where none was
        read."""
        by_layer = self._by_layer
        return {
            name: statistics.median(layers.get(name, 0.0) for layers in by_layer) for name in self._layers if by_layer
        }

    @property
    def is_step_of_training(self) -> bool:
        """Whether any layer has seen tokens of a training forward in this step."""
        return any(layer.num_tokens > 0 for layer in self._layers.values())

    @property
    def num_forwards(self) -> int:
        """Training forwards of the counted layers so far, recomputations included: equal on all ranks at each of these
        layers' collectives."""
        return self._num_forwards_before_step + sum(layer.num_forwards for layer in self._counted)

    @property
    def is_calibrated(self) -> bool:
        """Whether the cost of pruning was measured under the present conditions: this device, this configuration, and
        steps like the one that has just ended."""
        then, now = self.state.calibrated_on, _Conditions.of_step(self._layers, self._config)
        if then is None or then.computing != now.computing:
            return False
        return 1 / _LIKE <= then.work / max(now.work, 1.0) <= _LIKE

    def calibrate(self) -> ResizingCost:
        """Measure and return what pruning costs on the shapes of the step that has just ended; takes about a second."""
        with torch.profiler.record_function("zeroresize::calibrate"):
            self.state.estimator = RankEstimator(measure_resizing_cost(self._layers, self._config))
        self.state.calibrated_on = _Conditions.of_step(self._layers, self._config)
        owned = self._shares_in_force.owned
        self._time_reference(owned)
        self.compare(owned)  # of which no move will tell, where the host has divided units so
        return self.cost

    def compare(self, owned: float) -> float:
        """Time products at even shares and at the present ones in turn, after units have moved.

        So the estimate of this rank's speed does not depend on whether that changed with the move. A rank that owns
        nothing times a reference product, now and at every update.

        Args:
            owned: what the rank owns now, 1 at even shares.

        Returns:
            The seconds that it took.
        """
        began = time.perf_counter()
        if owned == 0.0:
            self._time_reference(owned)
        elif owned != 1.0:
            with _optional("what this rank's products take after the move"):
                forwards = self.state.most_forwards
                of_forward = {name: -(-tokens // forwards) for name, tokens in self.state.num_tokens.items()}
                ratio = compare_products(self._layers, of_forward)
                if ratio is not None:
                    self.state.estimator.compare(owned, ratio)
        return time.perf_counter() - began

    def _time_reference(self, owned: float) -> None:
        if self.state.calibrated_on is None:  # nothing is known of what it takes beside this rank's products
            return
        with _optional("how fast this rank is while it owns nothing"):
            seconds = time_reference(self._layers, self.state.num_tokens)
            if seconds is not None:
                self.state.estimator.learn_reference(seconds, owned)

    def learn(self) -> None:
        """Learn full-work times, and what pruning costs, from the interval that ends."""
        steps, self.state.interval = self.state.interval, []
        if steps and not self._has_seen_training and not self._has_warned:
            self._has_warned = True
            is_training = any(layer.training for layer in self._layers.values())
            logger.warning(
                "nothing was measured in %d steps, as no converted layer has computed its products, though they are in "
                "training: something calls another forward than theirs, or none"
                if is_training
                else "no converted layer was in training in %d steps: layers in eval() compute in full and are not "
                "balanced",
                len(steps),
            )
        self._has_seen_training = False
        if self._shares_in_force.owned == 0.0:  # no step tells the speed of a rank without products
            self._time_reference(0.0)
        possible = [step for step in steps if step.is_possible]
        # Of those before as many stay as make three, so that an evaluation is no lateness.
        outsides_s = [*self.state.outsides_s[-_FEWEST_OUTSIDE:], *(step.outside_s for step in possible)]
        self.state.outsides_s = outsides_s[-max(len(possible), _FEWEST_OUTSIDE) :]
        by_moves = any(layer.moves_only for layer in self._layers.values())
        inside = [step.inside for step in steps]
        self.state.estimator.learn(inside, by_moves=by_moves, moving_weights=self._moving_weights)
        usual = self.state.estimator.usual_step
        is_known = bool(steps) and usual is not None and usual.shares == self._shares_in_force
        self.wait_s = usual.wait_s if is_known and usual is not None else math.nan
        whole = [step.busy_s + step.wait_s for step in possible if step.shares == self._shares_in_force]
        self.step_s = statistics.median(whole) if whole else math.nan
        self._by_layer = [step.layers for step in steps if step.layers and step.shares == self._shares_in_force]

    def go_on_from(self, state: MonitorState) -> None:
        """Go on from the :attr:`state` of another monitor of these layers."""
        self.state = state


@contextmanager
def _optional(what: str) -> Iterator[None]:
    """What is measured beside training may fail, mostly for lack of memory: the other ranks wait for this one."""
    try:
        yield
    except Exception as error:
        logger.warning("%s could not be measured this time: %s", what, str(error) or type(error).__name__)


def _detach(timer: StepTimer, probes: list[tuple[BalancedLinear, LayerTimer]]) -> None:
    timer.close()
    for layer, probe in probes:
        layer.probes.remove(probe)
