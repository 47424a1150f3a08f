"""What a move takes: seconds by its bytes, measured before the first one and learned from each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

#: How much the newest move says of what moves cost, and by which factors no single move changes that.
_WEIGHT, _MOST_FACTOR = 0.7, 10.0


@dataclass(frozen=True)
class MoveCost:
    """Describe what a move takes. Bytes are those of the rank that sends or receives most (:func:`most_bytes`).

    Attributes:
        seconds_per_byte: of these bytes.
        fixed_s: seconds, whatever moves: ranks agree, allocate and install, also where no bytes travel.
        setup_s: seconds for each thing that must be made before, such as the process groups and modules of a strategy
            that a model does not have.

    Raises:
        ValueError: for seconds that are negative or not finite.
    """

    seconds_per_byte: float = 1e-9
    fixed_s: float = 0.05
    setup_s: float = 0.0

    def __post_init__(self) -> None:
        if not all(0.0 <= seconds < math.inf for seconds in astuple(self)):
            raise ValueError(f"the seconds of a move must be finite and not negative: {self}")

    def seconds(self, num_bytes: float, num_setups: int = 0) -> float:
        """Return the seconds of a move of so many bytes, at least one, for which so many things are made."""
        return self.fixed_s + self.seconds_per_byte * num_bytes + self.setup_s * num_setups

    def there_and_back(self, num_bytes: float, num_setups: int = 0) -> float:
        """Return the seconds of the move and of the one that undoes it: the price at which a move pays."""
        return 2.0 * self.seconds(num_bytes, num_setups)

    def learned(self, num_bytes: float, seconds: float, num_setups: int = 0) -> MoveCost:
        """Return the cost corrected by a move that took so long; what had no part in the move stays.

        What no move can have taken, and bytes that none can have, say nothing.
        """
        if not (0.0 <= num_bytes < math.inf and 0.0 <= seconds < math.inf):
            return self
        expected_s = self.seconds(num_bytes, num_setups)
        if expected_s == 0.0:
            of_bytes = (seconds / num_bytes, 0.0) if num_bytes else (self.seconds_per_byte, seconds)
            return MoveCost(*of_bytes, self.setup_s)
        factor = 1.0 + _WEIGHT * (min(max(seconds / expected_s, 1.0 / _MOST_FACTOR), _MOST_FACTOR) - 1.0)
        return MoveCost(
            self.seconds_per_byte * (factor if num_bytes else 1.0),
            self.fixed_s * factor,
            self.setup_s * (factor if num_setups else 1.0),
        )


def most_bytes(sent: Iterable[float], received: Iterable[float]) -> float:
    """Return the bytes by which a move is priced and learned from: the most that some rank sends, or receives.

    Links carry both ways at once, and are measured so: every rank sends as much as it receives. Bytes sent and received
    are therefore not added up. Where ranks share one memory, as on one host, that takes a move of one way only for up
    to twice as dear as it is; their sum would take every move of both ways for that.
    """
    return max((*sent, *received), default=0.0)
