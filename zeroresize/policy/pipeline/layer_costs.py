"""What layers cost and how fast stages' devices are, told apart by how measured seconds change.

``L`` layers, ``S`` stages. A layer is measured only where it is, so its seconds alone do not tell heavy work from a
slow device. Two things do:

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

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.pipeline_load import Floats, Indices, Mask
from zeroresize.policy.pipeline.profiles import PipelineProfile

#: Seconds that differ by less than this share say nothing of devices: layers cost as much more or less.
NOISE = 0.1
#: Fewer layers of a stage say nothing of its device: two of them often change alike by chance.
_LEAST_TELLING = 3
#: The logarithm of how many times as long a layer takes that is alone on its stage, where its device may be slow.
_MUCH_LONGER = math.log(1.5)
#: Layers that take less than this share of their stage's mean layer say nothing of its device.
_LEAST_SHARE = 0.1
#: Decimals of speeds. Logarithms and exponentials differ in their last bits from processor to processor, and where
#: layers are all alike the last bit would decide which of several equally good divisions a rank finds.
_DECIMALS = 9


@dataclass(frozen=True)
class LayerCosts:
    """Hold what is known after a profile.

    Attributes:
        forward_s, backward_s: [L] seconds of all micro-batches on a device of speed 1.
        speeds: [S] of the stages' devices, mean 1.
        boundaries: [S + 1] in force when the layers were last measured.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    speeds: tuple[float, ...]
    boundaries: tuple[int, ...]

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
            tuple(forward_s.tolist()),
            tuple(backward_s.tolist()),
            tuple(relative_S.tolist()),
            profile.boundaries,
        )

    @property
    def seconds(self) -> Floats:
        """Return [L] seconds of each layer, forward and backward."""
        return np.array(self.forward_s) + np.array(self.backward_s)

    def on_stages(self, stages: Sequence[int], boundaries: tuple[int, ...]) -> LayerCosts:
        """Return what is known once only these stages are left, with the layers between ``boundaries`` [S + 1]."""
        speeds = np.array(self.speeds)[list(stages)]
        mean = float(speeds.mean())
        forward_s, backward_s = (tuple(one / mean for one in seconds) for seconds in (self.forward_s, self.backward_s))
        return LayerCosts(forward_s, backward_s, tuple((speeds / mean).tolist()), boundaries)

    def after(self, profile: PipelineProfile, *, is_other_work: bool = False) -> LayerCosts:
        """Return what is known after one more profile, of the same layers and stages.

        Args:
            is_other_work: whether layers are known to have other work than before, so that devices are as they were.
        """
        if is_other_work:
            return LayerCosts.measured(profile, self.speeds)
        stages_L, before_L = profile.stages, np.array(Partition(self.boundaries).stages)
        now_L = profile.layer_s.sum(axis=1)
        speeds = np.array(self.speeds)
        expected_L = self.seconds / speeds[stages_L]
        counts_L = _tell_of_device(now_L, stages_L) & _tell_of_device(expected_L, stages_L)
        # By which factor each layer takes longer than expected, as a logarithm.
        longer_L = np.log(np.where(counts_L, now_L, 1.0) / np.where(counts_L, expected_L, 1.0))
        stayed = counts_L & (before_L == stages_L)
        stages = range(len(speeds))
        is_alone_S = np.array([int((counts_L & (stages_L == stage)).sum()) == 1 for stage in stages])
        changes_S = _changes_of_devices(
            [longer_L[stayed & (stages_L == stage)] for stage in stages], is_alone_S, speeds
        )
        corrections_S = _corrections(longer_L - changes_S[stages_L], counts_L, stages_L, before_L, len(speeds))
        return LayerCosts.measured(profile, speeds * np.exp(corrections_S - changes_S))


def _changes_of_devices(longer: Sequence[Floats], is_alone_S: Mask, speeds: Floats) -> Floats:
    """[S] by which factors devices have become slower, as logarithms, by those of each stage's layers."""
    noise = math.log1p(NOISE)
    medians_S = np.array([np.median(of_stage) if of_stage.size else 0.0 for of_stage in longer])
    have_changed_S = np.abs(medians_S) > noise
    if 2 * int(have_changed_S.sum()) > len(longer):
        return np.zeros(len(longer))
    slower_S = -np.log(speeds / np.median(speeds))  # than usual
    is_back_S = np.abs(slower_S + medians_S) < np.abs(slower_S)
    # Of a layer that is alone nothing would follow if it were heavy, and nobody would find out that its device is slow.
    is_slow_S = is_alone_S & (medians_S > _MUCH_LONGER) & (have_changed_S.sum() == 1)
    least_S = np.where(is_back_S | is_slow_S, 1, _LEAST_TELLING)
    by_one_factor_S = np.array(
        [
            of_stage.size >= least and np.ptp(of_stage) <= 2.0 * noise
            for of_stage, least in zip(longer, least_S.tolist(), strict=True)
        ]
    )
    return np.where(have_changed_S & by_one_factor_S, medians_S, 0.0)


def _corrections(longer_L: Floats, counts_L: Mask, stages_L: Indices, before_L: Indices, num_stages: int) -> Floats:
    """[S] by which factors speeds were wrong, as logarithms, by the layers that moved; least squares, mean 0."""
    moved = counts_L & (stages_L != before_L)
    pairs = sorted({(int(one), int(other)) for one, other in zip(before_L[moved], stages_L[moved], strict=True)})
    if not pairs:
        return np.zeros(num_stages)
    equations, wrong = np.zeros((len(pairs), num_stages)), np.zeros(len(pairs))
    for row, (source, destination) in enumerate(pairs):
        equations[row, [source, destination]] = -1.0, 1.0
        of_pair = longer_L[moved & (before_L == source) & (stages_L == destination)]
        wrong[row] = -_beyond_noise(float(np.median(of_pair)))
    return np.linalg.lstsq(equations, wrong, rcond=None)[0].astype(np.float64)


def _tell_of_device(seconds_L: Floats, stages_L: Indices) -> Mask:
    """[L] whether a layer takes long enough."""
    counts = np.maximum(np.bincount(stages_L), 1)
    means = np.bincount(stages_L, weights=seconds_L) / counts
    return (seconds_L > 0.0) & (seconds_L >= _LEAST_SHARE * means[stages_L])


def _beyond_noise(longer: float) -> float:
    return longer if abs(longer) > math.log1p(NOISE) else 0.0
