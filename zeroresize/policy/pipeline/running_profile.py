"""What layers take by now, of profiles of every step: single interruptions do not count, and noise is averaged.

How long to look back depends on the work. Where it jumps, the newest profiles tell most; where it only varies about a
mean, as routed tokens do, a long mean does. So means of several memories run side by side, and the one counts that has
told the seconds of later profiles best.

``L`` layers, ``E`` memories.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from zeroresize.policy.pipeline.pipeline_load import Floats, Indices
from zeroresize.policy.pipeline.profiles import PipelineProfile

#: [E] profiles that a mean remembers, the longest first: of equals it is taken.
MEMORIES = (64.0, 16.0, 4.0, 1.0)
#: A mean is judged by the profile so many behind it: layers that it moved would have made some steps by then.
_AHEAD = 6
#: Share of a mean's errors that is forgotten with each profile.
FORGETTING = 1.0 / 16.0
#: Profiles of a layer of which the middle one counts: an interrupted one is not it.
NUM_RECENT = 3


def typical_of(recent: Floats, num_L: Indices) -> Floats:
    """Return [L, 2] the usual seconds of layers: the shorter ones of two profiles, the middle ones of three.

    Args:
        recent: [3, L, 2] of the last profiles, the newest first; infinite where there is none.
        num_L: [L] how many there are of each layer, at least 1.
    """
    middle = np.minimum(num_L, NUM_RECENT) - 1 >> 1
    typical: Floats = np.take_along_axis(np.sort(recent, axis=0), middle[None, :, None], axis=0)[0]
    return typical


class RunningProfile:
    """Average one profile after another. What is known of a layer is forgotten when it moves."""

    def __init__(self, num_layers: int) -> None:
        self._stages_L: Indices = np.full(num_layers, -1)
        self._num_L: Indices = np.zeros(num_layers, dtype=np.int64)
        self._recent: Floats = np.full((NUM_RECENT, num_layers, 2), np.inf)
        self._means: Floats = np.zeros((len(MEMORIES), num_layers, 2))
        self._errors: Floats = np.zeros(len(MEMORIES))
        self._predictions: deque[Floats] = deque(maxlen=_AHEAD)  # [E, L] forward and backward

    def after(self, profile: PipelineProfile) -> PipelineProfile | None:
        """Return the running seconds, with the bytes of ``profile``; None while there are too few of a layer."""
        now, stages_L = profile.layer_s, profile.stages
        stays_L = stages_L == self._stages_L
        self._stages_L = stages_L
        self._num_L = np.where(stays_L, self._num_L, 0) + 1
        self._recent = np.concatenate((now[None], np.where(stays_L[:, None], self._recent[:-1], np.inf)))
        self._judge(now)
        typical = typical_of(self._recent, self._num_L)
        weights = np.maximum(1.0 / np.array(MEMORIES)[:, None], 1.0 / self._num_L)[..., None]
        self._means = self._means + weights * (typical - self._means)
        self._predictions.append(self._means.sum(axis=2))
        if self._num_L.min() < NUM_RECENT:
            return None
        return profile.with_layer_s(self._means[int(self._errors.argmin())])

    def _judge(self, now: Floats) -> None:
        """Add what the means of earlier profiles have told wrongly; of no layer more than the mean layer takes."""
        can_tell_L = self._num_L > _AHEAD
        if len(self._predictions) < _AHEAD or not can_tell_L.any():
            return
        now_L = now.sum(axis=1)
        wrong = np.minimum(np.abs(self._predictions[0] - now_L), now_L.mean())
        self._errors = (1.0 - FORGETTING) * self._errors + wrong[:, can_tell_L].mean(axis=1)
