"""How long collectives make even the slowest rank wait, with loans and without, learned from training."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.times import MOST_SECONDS

#: What differs by less than this share of a step is noise: ranks that are equally busy wait for each other's jitter.
_NOISE = 0.03
#: Of the newest interval.
_WEIGHT = 0.7
#: By more than this factor, or its inverse, no single interval changes what the calibration told of migrating.
_MOST_FACTOR = 2.0
#: Nor do all of them together.
_MOST_SCALE = 20.0
#: While nothing is lent what was learned is forgotten by this share an update: it may have been a bad hour.
_FORGETTING = 0.01


@dataclass(frozen=True)
class CollectiveTimes:
    """Describe what a group saw of its collectives in the last interval.

    Attributes:
        wait_s: seconds a step that the rank which waited least waited; NaN where nothing was measured. Negative or
            endless ones count as such.
        lent: what each rank lent in those steps, in units of a rank's products at even shares.
        migration: Φ1 by the calibration; None where nobody can lend.
    """

    wait_s: float
    lent: tuple[float, ...]
    migration: MigrationCost | None = None


@dataclass
class CommunicationEstimate:
    """Estimate the seconds that a step takes beyond its slowest rank's work."""

    plain_s: float = math.nan  # seconds without loans, NaN before they were seen
    scale: float = 1.0  # what loans cost, relative to the calibration
    _calibrated: MigrationCost | None = None

    @property
    def migration(self) -> MigrationCost | None:
        """Return Φ1 as far as is known; None where nobody can lend."""
        return self._calibrated.scaled(self.scale) if self._calibrated is not None else None

    def learn(self, seen: CollectiveTimes, busy_s: float) -> None:
        """Take an interval's times.

        Args:
            busy_s: of a normal rank in a step, the measure of noise; NaN before it is known.
        """
        self._calibrated = seen.migration
        if not 0.0 <= seen.wait_s <= MOST_SECONDS:  # NaN, or what a clock that was set tells
            return
        predicted_s = self.migration.seconds(seen.lent) if self.migration is not None else 0.0
        if not any(seen.lent):
            is_first = math.isnan(self.plain_s)
            self.plain_s = seen.wait_s if is_first else _WEIGHT * seen.wait_s + (1.0 - _WEIGHT) * self.plain_s
            self.scale += _FORGETTING * (1.0 - self.scale)
        elif predicted_s > 0.0 and not math.isnan(self.plain_s) and not math.isnan(busy_s):
            error_s = seen.wait_s - self.plain_s - predicted_s
            beyond_noise_s = math.copysign(max(abs(error_s) - _NOISE * busy_s, 0.0), error_s)
            factor = min(max(1.0 + beyond_noise_s / predicted_s, 1.0 / _MOST_FACTOR), _MOST_FACTOR)
            self.scale = min(max(self.scale * (1.0 + _WEIGHT * (factor - 1.0)), 1.0 / _MOST_SCALE), _MOST_SCALE)

    @property
    def without_loans_s(self) -> float:
        """Return :attr:`plain_s`, 0 before it was seen."""
        return 0.0 if math.isnan(self.plain_s) else self.plain_s
