"""What balancing has lost against off, by its own estimate, so that it can stop before a job is worse for it."""

from __future__ import annotations

from dataclasses import dataclass

#: Share of the time so far that balancing may lose in all, and that gains of the past can stand for.
MOST_LOST = 0.01


@dataclass
class Account:
    """Seconds that balancing has lost against even shares, less those that it has gained.

    Attributes:
        lost_s: losses less gains; never further below zero than ``MOST_LOST`` of the time so far, so that a long good
            time does not pay for a bad one without end.
        elapsed_s: the time so far.
    """

    lost_s: float = 0.0
    elapsed_s: float = 0.0

    def take(self, lost_s: float, elapsed_s: float) -> None:
        """Add an interval, or a move.

        Args:
            lost_s: by how much longer it was than with even shares and nothing lent or pruned; negative where shorter.
            elapsed_s: how long it was.
        """
        self.elapsed_s += elapsed_s
        self.lost_s = max(self.lost_s + lost_s, -MOST_LOST * self.elapsed_s)

    @property
    def debt_s(self) -> float:
        """Seconds that were lost beyond ``MOST_LOST`` of the time so far; 0 where there is nothing beyond."""
        return max(self.lost_s - MOST_LOST * self.elapsed_s, 0.0)
