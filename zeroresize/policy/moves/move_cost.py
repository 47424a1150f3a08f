"""What a move takes: seconds by its bytes, measured before the first one and learned from each."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: How much the newest move says of what moves cost, and by which factors no single move changes that.
_WEIGHT, _LEAST_FACTOR, _MOST_FACTOR = 0.7, 0.1, 10.0


@dataclass(frozen=True)
class MoveCost:
    """What a move takes. Bytes are those of the rank that sends or receives most.

    Attributes:
        seconds_per_byte: of these bytes.
        fixed_s: seconds, whatever moves.
    """

    seconds_per_byte: float = 1e-9
    fixed_s: float = 0.05

    def __post_init__(self) -> None:
        if not (0.0 <= self.seconds_per_byte < math.inf and 0.0 <= self.fixed_s < math.inf):
            raise ValueError(f"the seconds of a move must be finite and not negative: {self}")

    def seconds(self, num_bytes: float) -> float:
        """Of a move of so many bytes; 0 is no move."""
        return self.fixed_s + self.seconds_per_byte * num_bytes if num_bytes > 0.0 else 0.0

    def learned(self, num_bytes: float, seconds: float) -> MoveCost:
        """The same after a move of so many bytes took so long; what no move can have taken says nothing."""
        expected_s = self.seconds(num_bytes)
        if not (0.0 < num_bytes < math.inf and 0.0 <= seconds < math.inf):
            return self
        if expected_s == 0.0:
            return MoveCost(seconds / num_bytes, 0.0)
        factor = 1.0 + _WEIGHT * (min(max(seconds / expected_s, _LEAST_FACTOR), _MOST_FACTOR) - 1.0)
        return MoveCost(self.seconds_per_byte * factor, self.fixed_s * factor)
