"""What it takes to put other strategies in force: pure, the same on every rank."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

#: How much the newest change says of what changes take, and by which factors no single one moves that.
_WEIGHT, _LEAST_FACTOR, _MOST_FACTOR = 0.7, 0.1, 10.0


@dataclass(frozen=True)
class ChangeCost:
    """Seconds of a change of strategies between two steps.

    Only home holds weights between steps, so a change of other strategies moves no bytes. It takes time all the same:
    ranks agree, and a strategy that the model does not have needs process groups, modules and plans.

    Attributes:
        seconds_per_byte: of what the busiest rank sends or receives as home changes.
        fixed_s: of any change.
        new_s: of each strategy that the model does not have.

    Raises:
        ValueError: for seconds that are negative or not finite.
    """

    seconds_per_byte: float = 1e-9
    fixed_s: float = 0.05
    new_s: float = 0.2

    def __post_init__(self) -> None:
        if not all(0.0 <= one < math.inf for one in astuple(self)):
            raise ValueError(f"the seconds of a change must be finite and not negative: {self}")

    def seconds(self, num_bytes: float, num_new: int) -> float:
        """Of a change with so many bytes and strategies that are new to the model."""
        return self.fixed_s + self.seconds_per_byte * num_bytes + self.new_s * num_new

    def learned(self, num_bytes: float, num_new: int, seconds: float) -> ChangeCost:
        """The same after such a change took so long; what it had no part in stays."""
        expected_s = self.seconds(num_bytes, num_new)
        if not (0.0 <= num_bytes < math.inf and 0.0 <= seconds < math.inf):
            return self
        if expected_s == 0.0:
            if num_bytes > 0.0:
                return ChangeCost(seconds / num_bytes, 0.0, self.new_s)
            return ChangeCost(self.seconds_per_byte, seconds, self.new_s)
        factor = 1.0 + _WEIGHT * (min(max(seconds / expected_s, _LEAST_FACTOR), _MOST_FACTOR) - 1.0)
        return ChangeCost(
            self.seconds_per_byte * (factor if num_bytes else 1.0),
            self.fixed_s * factor,
            self.new_s * (factor if num_new else 1.0),
        )
