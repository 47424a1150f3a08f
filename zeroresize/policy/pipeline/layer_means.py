"""What layers take, of profiles that lie some steps apart: noise is averaged, and what changes for good is followed.

A layer's mean goes on until two of its last three profiles differ from it by more than noise: then it begins anew with
what they say. A single interruption is not among two.

``L`` layers.
"""

from __future__ import annotations

import math

import numpy as np

from zeroresize.policy.pipeline.pipeline_load import Floats, Indices, Mask
from zeroresize.policy.pipeline.profiles import PipelineProfile

#: Seconds that differ by less than this share from their mean are noise, however small noise has been.
LEAST_SURPRISE = 0.1
#: So many times as far as noise usually differs from a mean is none.
_BEYOND_NOISE = 4.0
#: Profiles that a mean remembers, so that what drifts is followed.
_MEMORY = 6
#: Profiles of a layer of which the middle one counts: an interrupted one is not it.
_NUM_RECENT = 3


class LayerMeans:
    """Average one profile after another."""

    def __init__(self, num_layers: int) -> None:
        self._stages_L: Indices = np.full(num_layers, -1)
        self._num_L: Indices = np.zeros(num_layers, dtype=np.int64)
        self._recent: Floats = np.full((_NUM_RECENT, num_layers, 2), np.inf)
        self._means: Floats = np.zeros((num_layers, 2))
        self._noise = 0.0  # mean distance of logarithms from their means

    def surprised(self, profile: PipelineProfile) -> PipelineProfile:
        """Return what is known before ``profile``, but for layers of which it says something else: these as it says."""
        now = profile.layer_s
        differs_L = (self._num_L == 0) | (self._stages_L != profile.stages) | self._is_surprise(now)
        return profile.with_layer_s(np.where(differs_L[:, None], now, self._means))

    def after(self, profile: PipelineProfile) -> PipelineProfile:
        """Return the mean seconds, with the bytes of ``profile``; what has moved is measured anew."""
        now = profile.layer_s
        moved_L, self._stages_L = self._stages_L != profile.stages, profile.stages
        self._num_L = np.where(moved_L, 0, self._num_L)
        self._recent[:, moved_L] = np.inf
        is_known_L = self._num_L > 1
        if is_known_L.any():
            distances = np.minimum(np.abs(self._differences(now)[is_known_L]), self._most)
            distance = float(np.median(distances))
            self._noise += (distance - self._noise) / min(int(self._num_L.max()), _MEMORY)
        self._num_L = self._num_L + 1
        self._recent = np.concatenate((now[None], self._recent[:-1]))
        typical = _typical(self._recent, self._num_L)
        begins_anew_L = (self._num_L < _NUM_RECENT) | self._is_surprise(typical)
        weights_L = np.where(begins_anew_L, 1.0, 1.0 / np.minimum(self._num_L, _MEMORY))
        self._means = self._means + weights_L[:, None] * (typical - self._means)
        self._num_L = np.where(begins_anew_L, np.minimum(self._num_L, _NUM_RECENT - 1), self._num_L)
        return profile.with_layer_s(self._means)

    def _is_surprise(self, seconds: Floats) -> Mask:
        """[L] whether seconds [L, 2] differ from their mean by more than noise."""
        return np.abs(self._differences(seconds)) > self._most

    @property
    def _most(self) -> float:
        """By which logarithms differ from their mean where it is noise."""
        return max(math.log1p(LEAST_SURPRISE), _BEYOND_NOISE * self._noise)

    def _differences(self, seconds: Floats) -> Floats:
        """[L] logarithms of how many times as long as their mean these seconds are; 0 where one of them is 0."""
        totals, means = seconds.sum(axis=1), self._means.sum(axis=1)
        counts = (totals > 0.0) & (means > 0.0)
        return np.log(np.where(counts, totals, 1.0) / np.where(counts, means, 1.0))


def _typical(recent: Floats, num_L: Indices) -> Floats:
    """[L, 2] of the last profiles [3, L, 2], the newest first: the shorter ones of two, the middle ones of three."""
    middle = np.minimum(num_L, _NUM_RECENT) - 1 >> 1
    typical: Floats = np.take_along_axis(np.sort(recent, axis=0), middle[None, :, None], axis=0)[0]
    return typical
