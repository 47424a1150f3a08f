"""How long one part of a rank's steps usually takes, and how sure that is, followed from interval to interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroresize.policy.speed.noise import JUMP, Noise
from zeroresize.utils.usual import usual_of

#: Logarithms of seconds stay within these.
_LEAST, _MOST = math.log(2e-9), math.log(0.5e6)


def bounded(level: float) -> float:
    """Return the logarithm nearest to ``level`` that seconds can have."""
    return min(max(level, _LEAST), _MOST)


@dataclass(frozen=True)
class Reading:
    """Describe what an interval's steps said."""

    surprise: float  # by how much the logarithm is more than expected
    variance: float  # of that, but for the part that the expected change of work has in it
    has_jumped: bool  # whether it is too much for noise, so that the speed has changed


@dataclass
class SpeedMeter:
    """Follow the logarithm of a part's seconds: near what the last intervals said, until it jumps."""

    level: float = math.nan  # for the work of the last interval; NaN before the first
    variance: float = 0.0  # of the level
    noise: Noise = field(default_factory=Noise)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return not math.isnan(self.level)

    def pass_interval(self) -> None:
        """Let the speed drift for an interval."""
        self.variance += self.noise.drift

    def put(self, level: float, variance: float) -> None:
        """Take a level from elsewhere, which no step has told."""
        self.level, self.variance = bounded(level), variance
        self.noise.forget_last(math.nan)

    def is_jump(self, values: Sequence[float]) -> bool:
        """Whether the logarithms of some steps of the same work differ too much for noise."""
        variance = self.variance + self.noise.of_steps(len(values))
        return (usual_of(values) - self.level) ** 2 > JUMP**2 * variance

    def take(
        self, values: Sequence[float], change: float = 0.0, change_variance: float = 0.0, *, is_alike: bool = True
    ) -> Reading:
        """Take the logarithms of some steps at one speed.

        That of the work is taken to differ by ``change`` from that before; ``is_alike`` says whether it is the same.
        """
        value = usual_of(values)
        self.noise.learn_scatter(values)
        variance = self.noise.of_steps(len(values))
        if not self.is_known:
            self.put(value, variance)
            self.noise.forget_last(value)
            return Reading(0.0, variance, has_jumped=False)
        surprise, of_level = value - self.level - change, self.variance + variance
        before = self.variance + change_variance
        has_jumped = surprise**2 > JUMP**2 * (before + variance)
        gain = 1.0 if has_jumped else before / (before + variance)
        self.level = bounded(self.level + change + gain * surprise)
        self.variance = gain * variance
        learn = self.noise.learn if is_alike and not has_jumped else self.noise.forget_last
        learn(value)
        return Reading(surprise, of_level, has_jumped)
