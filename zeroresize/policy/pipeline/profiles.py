"""What was measured of a pipeline's layers, what it says over several profiles, and what of it is their devices.

``L`` layers, ``S`` stages. A :class:`PipelineProfile` is one iteration. :class:`LayerMeans` averages noise over
profiles that lie some steps apart, and follows what changes. :class:`LayerCosts` tells heavy work from slow
devices, as a layer is measured only where it is, so its seconds alone do not tell. Two things do:

- **All layers of a stage, at least 3, change by one factor, while those of most other stages do not**: then its device
  has changed, not their work. That is a guess, but where the caller has said that it was the work. Where a device is
  taken to be slower or faster than others, any number of layers tells that it is as fast as others again, or nearly.
  A layer that is alone on its stage, but for some that take next to nothing, and takes much longer, while all other
  stages are as before, tells so, too.
- **A layer has moved**: then it has been measured on two devices, and tells which is faster. So a wrong guess is found
  out by the first move that it leads to.

At first all devices are taken to be equally fast.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy import FEW
from zeroresize.policy.moves.move_cost import most_bytes
from zeroresize.policy.pipeline.division import Floats, Indices, Mask
from zeroresize.policy.speed.meter import SpeedMeter
from zeroresize.policy.speed.noise import ALIKE

#: The logarithm of how many times as long a layer takes that is alone on its stage, where its device may be slow.
_MUCH_LONGER = math.log(1.5)
#: Decimals of speeds. Logarithms and exponentials differ in their last bits from processor to processor, and where
#: layers are all alike the last bit would decide which of several equally good divisions a rank finds.
_DECIMALS = 9


@dataclass(frozen=True)
class LayerProfile:
    """Describe one layer in one iteration.

    Attributes:
        forward_s, backward_s: seconds, of all micro-batches.
        weight_bytes: of parameters and buffers.
        gradient_bytes, optimizer_bytes: as they are at the end of the iteration.
        activation_bytes: kept for backward, of one micro-batch.
    """

    forward_s: float
    backward_s: float
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int

    @property
    def bytes_at_rest(self) -> int:
        """Return the bytes of weights, gradients and optimizer state: what travels with the layer."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class PipelineProfile:
    """Describe one iteration of a pipeline, known to every rank.

    Attributes:
        layers: [L].
        stage_s: wall seconds of the iteration on each stage.
        boundaries: in force in it.
        loss_s: seconds of the loss, forward and backward, on the last stage.
    """

    layers: tuple[LayerProfile, ...]
    stage_s: tuple[float, ...]
    boundaries: tuple[int, ...]
    loss_s: float = 0.0

    @property
    def layer_s(self) -> Floats:
        """[L, 2] seconds of each layer, forward and backward."""
        return np.array([[layer.forward_s, layer.backward_s] for layer in self.layers])

    @property
    def stages(self) -> Indices:
        """[L] on which stage each layer was."""
        return np.array(Partition(self.boundaries).stages)

    def bytes_of(self, transfers: Sequence[LayerTransfer]) -> float:
        """Return the bytes that the busiest stage sends or receives, by which a move is priced."""
        sent, received = ([0.0] * len(self.stage_s) for _ in range(2))
        for transfer in transfers:
            layer_bytes = float(self.layers[transfer.layer].bytes_at_rest)
            sent[transfer.source] += layer_bytes
            received[transfer.destination] += layer_bytes
        return most_bytes(sent, received)

    def with_layer_s(self, seconds: Floats) -> PipelineProfile:
        """Return the same with other seconds [L, 2] of layers, forward and backward."""
        layers = tuple(
            replace(layer, forward_s=forward_s, backward_s=backward_s)
            for layer, (forward_s, backward_s) in zip(self.layers, seconds.tolist(), strict=True)
        )
        return replace(self, layers=layers)

    @property
    def computed_s(self) -> tuple[float, ...]:
        """[S] seconds in which each stage computed its layers, and the last one the loss."""
        layer_s = [one.forward_s + one.backward_s for one in self.layers]
        stage_s = [math.fsum(layer_s[begin:end]) for begin, end in itertools.pairwise(self.boundaries)]
        return (*stage_s[:-1], stage_s[-1] + self.loss_s)

    @property
    def bubble_ratios(self) -> tuple[float, ...]:
        """[S] the share of the iteration, as long as on the slowest stage, in which each computed nothing, 0 to 1."""
        step_s = max(self.stage_s)
        return tuple(max(1.0 - own / step_s, 0.0) if step_s else 0.0 for own in self.computed_s)

    @property
    def bubble_ratio(self) -> float:
        """The mean of the stages' :attr:`bubble_ratios`."""
        return math.fsum(self.bubble_ratios) / len(self.stage_s)

    @property
    def imbalance(self) -> float:
        """(L_max − L_min) / mean L of the stages' :attr:`computed_s` (DynMo, section 2); 0 without any load."""
        mean_s = math.fsum(self.computed_s) / len(self.stage_s)
        return (max(self.computed_s) - min(self.computed_s)) / mean_s if mean_s else 0.0


class LayerMeans:
    """Follow what each layer takes by a meter of its own: noise is averaged, and what changes is known at once."""

    def __init__(self, num_layers: int) -> None:
        self._meters = [SpeedMeter() for _ in range(num_layers)]
        self._stages = [-1] * num_layers

    def after(self, profile: PipelineProfile) -> PipelineProfile:
        """Return the seconds by now, with the bytes of ``profile``; what has moved is measured anew."""
        seconds, stages = profile.layer_s, profile.stages.tolist()
        for number, (total_s, stage) in enumerate(zip(seconds.sum(axis=1).tolist(), stages, strict=True)):
            if self._stages[number] != stage:
                self._meters[number] = SpeedMeter(noise=self._meters[number].noise)
            if total_s > 0.0:
                meter = self._meters[number]
                meter.pass_interval()
                meter.take([math.log(total_s)])
                seconds[number] *= math.exp(meter.level) / total_s
        self._stages = stages
        return profile.with_layer_s(seconds)


@dataclass(frozen=True)
class LayerCosts:
    """Hold what is known of layers and devices after a profile."""

    forward_s: tuple[float, ...]  # [L] seconds of all micro-batches on a device of speed 1
    backward_s: tuple[float, ...]  # the same of the backward
    speeds: tuple[float, ...]  # [S] of the stages' devices, mean 1
    boundaries: tuple[int, ...]  # [S + 1] in force when the layers were last measured

    @classmethod
    def first(cls, profile: PipelineProfile) -> LayerCosts:
        """Return what is known after the first profile: layers cost what they took."""
        return cls.measured(profile, np.ones(len(profile.boundaries) - 1))

    @classmethod
    def measured(cls, profile: PipelineProfile, speeds: Sequence[float] | Floats) -> LayerCosts:
        """Return costs that explain the measured seconds by these speeds [S] of devices."""
        relative_S = np.round(np.asarray(speeds) / np.mean(speeds), _DECIMALS)
        forward_s, backward_s = profile.layer_s.T * relative_S[profile.stages]
        return cls(
            tuple(forward_s.tolist()), tuple(backward_s.tolist()), tuple(relative_S.tolist()), profile.boundaries
        )

    @property
    def seconds(self) -> Floats:
        """[L] seconds of each layer, forward and backward."""
        return np.array(self.forward_s) + np.array(self.backward_s)

    def on_stages(self, stages: Sequence[int], boundaries: tuple[int, ...]) -> LayerCosts:
        """Return what is known once only these stages are left, with the layers between ``boundaries`` [S + 1]."""
        speeds = np.array(self.speeds)[list(stages)]
        mean = float(speeds.mean())
        forward_s, backward_s = (tuple(one / mean for one in seconds) for seconds in (self.forward_s, self.backward_s))
        return LayerCosts(forward_s, backward_s, tuple((speeds / mean).tolist()), boundaries)

    def after(self, profile: PipelineProfile, *, is_other_work: bool = False) -> LayerCosts:
        """Return what is known after one more profile; known to be of other work, it leaves devices as before."""
        if is_other_work:
            return LayerCosts.measured(profile, self.speeds)
        stages_L, before_L = profile.stages, np.array(Partition(self.boundaries).stages)
        speeds, now_L = np.array(self.speeds), profile.layer_s.sum(axis=1)
        expected_L = self.seconds / speeds[stages_L]
        counts_L = _tell_of_device(now_L, stages_L) & _tell_of_device(expected_L, stages_L)
        longer_L = np.log(np.where(counts_L, now_L, 1.0) / np.where(counts_L, expected_L, 1.0))
        of_stages = [counts_L & (stages_L == stage) for stage in range(len(speeds))]
        is_alone_S = np.array([int(of_stage.sum()) == 1 for of_stage in of_stages])
        stayed = [longer_L[of_stage & (before_L == stages_L)] for of_stage in of_stages]
        changes_S = _changes_of_devices(stayed, is_alone_S, speeds)
        moved_L = counts_L & (stages_L != before_L)
        corrections_S = _corrections(longer_L - changes_S[stages_L], moved_L, stages_L, before_L, len(speeds))
        return LayerCosts.measured(profile, speeds * np.exp(corrections_S - changes_S))


def _changes_of_devices(longer: Sequence[Floats], is_alone_S: Mask, speeds: Floats) -> Floats:
    """[S] by which factors devices have become slower, as logarithms, by those of each stage's layers."""
    noise = math.log1p(ALIKE)
    medians_S = np.array([np.median(of_stage) if of_stage.size else 0.0 for of_stage in longer])
    have_changed_S = np.abs(medians_S) > noise
    if 2 * int(have_changed_S.sum()) > len(longer):
        return np.zeros(len(longer))
    slower_S = -np.log(speeds / np.median(speeds))  # than usual
    is_back_S = np.abs(slower_S + medians_S) < np.abs(slower_S)
    # Of a layer that is alone nothing would follow if it were heavy, and nobody would find out that its device is slow.
    is_slow_S = is_alone_S & (medians_S > _MUCH_LONGER) & (have_changed_S.sum() == 1)
    least_S = np.where(is_back_S | is_slow_S, 1, FEW)  # two layers of a stage often change alike by chance
    by_one_factor_S = np.array(
        [
            of_stage.size >= least and np.ptp(of_stage) <= 2.0 * noise
            for of_stage, least in zip(longer, least_S.tolist(), strict=True)
        ]
    )
    return np.where(have_changed_S & by_one_factor_S, medians_S, 0.0)


def _corrections(longer_L: Floats, moved_L: Mask, stages_L: Indices, before_L: Indices, num_stages: int) -> Floats:
    """[S] by which factors speeds were wrong, as logarithms, by the layers that moved; least squares, mean 0."""
    pairs = sorted(set(zip(before_L[moved_L].tolist(), stages_L[moved_L].tolist(), strict=True)))
    equations, wrong = np.zeros((len(pairs), num_stages)), np.zeros(len(pairs))
    for row, (source, destination) in enumerate(pairs):
        equations[row, [source, destination]] = -1.0, 1.0
        of_pair = float(np.median(longer_L[moved_L & (before_L == source) & (stages_L == destination)]))
        wrong[row] = -of_pair if abs(of_pair) > math.log1p(ALIKE) else 0.0
    return np.linalg.lstsq(equations, wrong, rcond=None)[0].astype(np.float64) if pairs else np.zeros(num_stages)


def _tell_of_device(seconds_L: Floats, stages_L: Indices) -> Mask:
    """[L] whether a layer takes more than noise, beside its stage's mean layer: others say nothing of its device."""
    means = np.bincount(stages_L, weights=seconds_L) / np.maximum(np.bincount(stages_L), 1)
    return (seconds_L > 0.0) & (seconds_L >= ALIKE * means[stages_L])
