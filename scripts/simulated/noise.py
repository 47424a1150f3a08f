"""How ranks' times vary from step to step, for simulations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: Parts of a step that vary each by itself: what is no product, multiplications, gathers and fills.
_NUM_PARTS = 3
#: Of its usual time no part takes less.
_LEAST_FACTOR = 0.1


@dataclass(frozen=True)
class Noise:
    """Describe normal noise of every part of every rank's step, and bursts.

    A burst makes all of a machine's ranks slow at once.

    Attributes:
        deviation: relative standard deviation of the normal noise.
        correlation: of the normal noise from one step to the next, 0 (white) ≤ ρ < 1.
        burst_rate: share of the steps in which a burst begins on a machine that has none, 0 to 1.
        burst_steps: how many steps it lasts.
        burst_factors: the least and the most times as long that a rank takes meanwhile, drawn evenly for each burst.
        ranks_per_machine: how many neighbours have a burst in common; 1 is each its own.
    """

    deviation: float = 0.0
    correlation: float = 0.0
    burst_rate: float = 0.0
    burst_steps: int = 10
    burst_factors: tuple[float, float] = (1.3, 2.0)
    ranks_per_machine: int = 1


class NoiseSource:
    """Draw one run's noise; equal seeds give equal noise.

    Args:
        noise: of what kind.
        num_ranks: how many ranks have it.
        seed: of what is drawn.
    """

    def __init__(self, noise: Noise, num_ranks: int, seed: int) -> None:
        self._noise, self._shape = noise, (num_ranks, _NUM_PARTS)
        self._generator = np.random.default_rng(seed)
        self._burst_generator = np.random.default_rng((seed, 1))
        self._normal = self._generator.standard_normal(self._shape)
        self._machine = np.arange(num_ranks) // noise.ranks_per_machine
        self._steps_left = np.zeros(self._machine[-1] + 1, dtype=np.int64)
        self._burst_factor = np.ones(len(self._steps_left))

    def next_step(self) -> NDArray[np.float64]:
        """Return [ranks, parts] how many times as long as usual each part takes in the next step."""
        factors = np.maximum(1.0 + self._noise.deviation * self._normal, _LEAST_FACTOR)
        fresh = self._generator.standard_normal(self._shape)
        correlation = self._noise.correlation
        self._normal = correlation * self._normal + math.sqrt(1.0 - correlation**2) * fresh
        return factors * self._next_bursts()[self._machine, None]

    def _next_bursts(self) -> NDArray[np.float64]:
        """[machines] how many times as long as usual the next step takes."""
        begins, strength = self._burst_generator.random((2, len(self._steps_left)))
        is_new = (self._steps_left == 0) & (begins < self._noise.burst_rate)
        least, most = self._noise.burst_factors
        self._burst_factor[is_new] = (least + (most - least) * strength)[is_new]
        self._steps_left[is_new] = self._noise.burst_steps
        is_on = self._steps_left > 0
        self._steps_left[is_on] -= 1
        return np.where(is_on, self._burst_factor, 1.0)
