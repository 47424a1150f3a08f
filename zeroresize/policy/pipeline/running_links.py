"""What links between stages take by now, of measurements that vary; pure.

How long to look back depends on the network. Where contention stays for long the newest measurement tells most, where
delays vary from step to step only their mean does. So means of several memories run side by side, and the one counts
that has told later measurements best, as for layers (:mod:`~zeroresize.policy.pipeline.running_profile`).

``S`` stages, ``E`` memories.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.pipeline.pipeline_load import Floats
from zeroresize.policy.pipeline.running_profile import FORGETTING, MEMORIES

#: [E] measurements that a mean remembers.
_MEMORIES = np.array(MEMORIES)


class RunningLinks:
    """Average one measurement of the same links after another.

    Args:
        num_bytes: of a usual message between two stages; by what it takes the means are judged.

    Raises:
        ValueError: if the bytes are negative or not finite.
    """

    def __init__(self, num_bytes: float) -> None:
        if not 0.0 <= num_bytes < np.inf:
            raise ValueError(f"num_bytes={num_bytes} is not allowed: wanted are the bytes of a message")
        self._num_bytes = num_bytes
        self._num_measured = 0
        self._means: Floats = np.zeros(0)  # [E, S − 1, 2] seconds per byte and fixed ones
        self._errors: Floats = np.zeros(len(_MEMORIES))

    def after(self, links: Sequence[MoveCost]) -> tuple[MoveCost, ...]:
        """Return [S − 1] what the links take by now, given what has just been measured.

        Args:
            links: [S − 1], as :func:`~zeroresize.measure.links.measure_neighbour_links` returns them.

        Raises:
            ValueError: if they are not as many as before.
        """
        now = np.array([[link.seconds_per_byte, link.fixed_s] for link in links]).reshape(-1, 2)
        if not self._num_measured:
            self._means = np.tile(now, (len(_MEMORIES), 1, 1))
        elif now.shape != self._means.shape[1:]:
            raise ValueError(f"{len(now)} links are not those of before, which were {self._means.shape[1]}")
        wrong_s = np.abs(((self._means - now) * np.array([self._num_bytes, 1.0])).sum(axis=2)).sum(axis=1)
        self._errors = (1.0 - FORGETTING) * self._errors + wrong_s
        self._num_measured += 1
        weights = np.maximum(1.0 / _MEMORIES, 1.0 / self._num_measured)
        self._means = self._means + weights[:, None, None] * (now - self._means)
        best = self._means[int(self._errors.argmin())]
        return tuple(MoveCost(per_byte_s, fixed_s) for per_byte_s, fixed_s in best.tolist())
