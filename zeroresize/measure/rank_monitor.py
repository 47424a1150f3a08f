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
from zeroresize.measure.calibrate_resizing import ProductSplit, measure_resizing_cost
from zeroresize.measure.clocks import clock_for
from zeroresize.measure.compare_products import Reference, choose_reference, compare_products, time_reference
from zeroresize.measure.step_timer import LayerTimer, StepTimer
from zeroresize.plan.group import Shares
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
    """Describes what a calibration depends on.

    Attributes:
        device: its name, the dtypes that layers compute in, and by which kernels.
        work: tokens of a step times the sizes of the weights they meet.
        max_ratio, block: of the configuration: up to which ratio, and by which columns, pruning was measured.
        is_gathered: whether columns were gathered; in mode "mig" the kept columns are neighbours, which are a view.
    """

    device: str
    work: float
    max_ratio: float
    block: int
    is_gathered: bool

    @classmethod
    def of_step(cls, layers: Mapping[str, BalancedLinear], config: BalanceConfig) -> _Conditions:
        """Return the conditions of the step that has just ended."""
        seen = [layer for layer in layers.values() if layer.num_tokens > 0]
        names = {
            torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            for device in {layer.local_weight.device for layer in seen}
        }
        dtypes = {str(layer.compute_dtype) for layer in seen}
        kernels = {implementation_on(layer.local_weight.device.type, layer.compute_dtype).name for layer in seen}
        work = sum(layer.num_tokens * math.prod(layer.even_shape) for layer in seen)
        device = " ".join(sorted(names) + sorted(dtypes) + sorted(kernels))
        return cls(device, float(work), config.max_ratio, config.block, config.mode != "mig")

    def is_like(self, other: _Conditions) -> bool:
        is_like = 1 / _LIKE <= self.work / max(other.work, 1.0) <= _LIKE
        return is_like and dataclasses.replace(self, work=other.work) == other


@dataclass
class MonitorState:
    """Holds what a monitor has learned, from which a resumed run goes on.

    Attributes:
        estimator: of the rank's times.
        calibrated_on: under which conditions what pruning costs was measured; None before.
        split: of fused products; None before the calibration.
        num_tokens: of each layer in the last step of training, by name.
        most_forwards: of a layer in that step.
        reference: the product by which a rank that owns nothing is measured; None before the calibration.
        outsides_s: seconds outside of the layers in the last steps.
        interval: the steps since the last update.
    """

    estimator: RankEstimator
    calibrated_on: _Conditions | None = None
    split: ProductSplit | None = None
    num_tokens: dict[str, int] = field(default_factory=dict)
    most_forwards: int = 1
    reference: Reference | None = None
    outsides_s: list[float] = field(default_factory=list)
    interval: list[StepTimes] = field(default_factory=list)


class RankMonitor:
    """Times the steps of this rank's balanced layers, from update to update.

    Args:
        layers: balanced layers by name, all on one device.
        config: how to balance.

    Attributes:
        state: what was learned.
    """

    def __init__(self, layers: Mapping[str, BalancedLinear], config: BalanceConfig) -> None:
        self._layers, self._config = layers, config
        self.state = MonitorState(RankEstimator(ResizingCost.linear(config.max_ratio)))
        self._last_read: list[StepTimes] = []
        self._shares_in_force = Shares()
        self._wait_s = math.nan
        self._has_seen_training = self._has_warned = False
        # Ranks run row-parallel layers together, since their outputs are summed; a model without any counts all layers.
        self._counted = [layer for layer in layers.values() if not layer.is_column_parallel] or list(layers.values())
        self._num_forwards_before_step = 0
        device = next(iter(layers.values())).local_weight.device if layers else torch.device("cpu")
        self._timer = StepTimer(clock_for(device))
        self._layer_times: dict[str, float] = {}
        self._step_s = math.nan
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
        return None if times is None else dataclasses.replace(times, outside_s=self._outside_s)

    @property
    def wait_s(self) -> float:
        """Seconds of waiting in a usual step under the last update's last plan, NaN where none was read."""
        return self._wait_s

    @property
    def step_s(self) -> float:
        """Seconds of a usual step under the last update's last plan, waits included; NaN where none was read."""
        return self._step_s

    @property
    def cost(self) -> ResizingCost:
        """What pruning costs; proportional to FLOPs until :meth:`calibrate`."""
        return self.state.estimator.cost

    @property
    def layer_times(self) -> dict[str, float]:
        """Seconds of each layer's products in a usual step under the last update's last plan, by name; empty where
        none was read."""
        return dict(self._layer_times)

    @property
    def timer_s(self) -> float:
        """Seconds that timing cost in the last step."""
        return self._timer.timer_s

    def begin_step(self, shares: Shares, is_forced: bool) -> None:
        """Begin a step whose plan spares this rank ``shares.spared`` of its products and adds ``shares.borrowed``."""
        self._num_forwards_before_step = self.num_forwards
        for layer in self._layers.values():
            layer.forget_forwards()
        self._shares_in_force = shares
        self._timer.begin_step(shares, is_forced)

    def end_step(self) -> None:
        """End the step."""
        self._last_read = self._timer.end_step()
        self.state.interval += self._last_read
        if self.is_step_of_training:
            self._has_seen_training = True
            self.state.num_tokens = {name: layer.num_tokens for name, layer in self._layers.items()}
            self.state.most_forwards = max(layer.num_forwards for layer in self._layers.values())

    @property
    def last_read(self) -> list[StepTimes]:
        """The steps whose times were read at the last :meth:`end_step`."""
        return self._last_read

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
        now = _Conditions.of_step(self._layers, self._config)
        return self.state.calibrated_on is not None and self.state.calibrated_on.is_like(now)

    def calibrate(self) -> ResizingCost:
        """Measure and return what pruning costs on the shapes of the step that has just ended; takes about a second."""
        cost, split = measure_resizing_cost(self._layers, self._config)
        self.state.estimator = RankEstimator(cost)
        self._take_split(split)
        self.state.calibrated_on = _Conditions.of_step(self._layers, self._config)
        with self._optional(
            "how fast this rank is while it owns nothing cannot be measured, as no product could be chosen for that"
        ):
            self.state.reference = choose_reference(self._layers, self.state.num_tokens)
        self._time_reference(self._shares_in_force.owned)
        logger.debug(
            "calibration of pruning: at γ = %.2f multiplications take %.2f of their time, gathers and fills %.1f ms",
            cost.max_ratio,
            cost.gemm_share[-1],
            1e3 * cost.gather_fill_s[-1],
        )
        return cost

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
            with self._optional(
                "after the move this rank's products could not be timed, so its speed is known only after some updates"
            ):
                state = self.state
                of_forward = {name: -(-tokens // state.most_forwards) for name, tokens in state.num_tokens.items()}
                ratio = compare_products(self._layers, of_forward)
                if ratio is not None:
                    self.state.estimator.compare(owned, ratio)
        return time.perf_counter() - began

    def _time_reference(self, owned: float) -> None:
        layer = self._layers.get(self.state.reference.layer) if self.state.reference is not None else None
        if self.state.reference is not None and layer is not None:
            with self._optional("how fast this rank is while it owns nothing could not be measured this time"):
                self.state.estimator.learn_reference(time_reference(layer, self.state.reference), owned)

    @contextmanager
    def _optional(self, lacking: str) -> Iterator[None]:
        """What is measured beside training may fail, mostly for lack of memory: the other ranks wait for this one."""
        try:
            yield
        except Exception as error:
            logger.warning("%s: %s", lacking, str(error) or type(error).__name__)

    def learn(self) -> None:
        """Learn full-work times, and what pruning costs, from the interval that ends."""
        if self.state.interval and not self._has_seen_training and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "no converted layer was in training in %d steps: layers in eval() compute in full and are not balanced",
                len(self.state.interval),
            )
        if self._shares_in_force.owned == 0.0:  # no step tells the speed of a rank without products
            self._time_reference(0.0)
        self._learn_outside()
        self.state.estimator.learn([step.inside for step in self.state.interval])
        usual = self.state.estimator.usual_step
        self._wait_s = math.nan
        under_last_plan = [step for step in self.state.interval if step.shares == self._shares_in_force]
        whole = [step.busy_s + step.wait_s for step in under_last_plan if step.is_possible]
        self._step_s = statistics.median(whole) if whole else math.nan
        if self.state.interval and usual is not None and usual.shares == self._shares_in_force:
            self._wait_s = usual.wait_s
        by_layer = [step.layers for step in under_last_plan if step.layers]
        self._layer_times = {
            name: statistics.median(layers.get(name, 0.0) for layers in by_layer) for name in self._layers if by_layer
        }
        self.state.interval, self._has_seen_training = [], False

    @property
    def _outside_s(self) -> float:
        return usual_of(self.state.outsides_s) if self.state.outsides_s else 0.0

    def _learn_outside(self) -> None:
        """Keep the interval's steps, and of those before as many as make three: an evaluation is no lateness."""
        measured = [step.outside_s for step in self.state.interval if step.is_possible]
        outsides_s = [*self.state.outsides_s[-_FEWEST_OUTSIDE:], *measured]
        self.state.outsides_s = outsides_s[-max(len(measured), _FEWEST_OUTSIDE) :]

    def _take_split(self, split: ProductSplit) -> None:
        self.state.split = split
        self._timer.gemm_part = split.gemm_part

    def go_on_from(self, state: MonitorState) -> None:
        """Go on from the :attr:`state` of another monitor of these layers."""
        split = state.split or self.state.split
        self.state = state
        if split is not None:
            self._take_split(split)


def _detach(timer: StepTimer, probes: list[tuple[BalancedLinear, LayerTimer]]) -> None:
    timer.close()
    for layer, probe in probes:
        layer.probes.remove(probe)
