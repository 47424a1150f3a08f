"""What balancing has lost against off, by its own estimate, so that it can stop before a job is worse for it.

Units (:mod:`zeroresize.policy.tensor.ownership_decision`) keep it, as lending and pruning lose, too, and a division
that came too late loses in each step until that is noticed. Layers and strategies do without.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Share of the time that balancing may lose in all.
MOST_LOST = 0.01
#: After so many steps gains, losses and time count half: a good week is no licence to lose for another one.
HALF_LIFE = 10_000
#: Where balancing has lost more than it may, staying must have cost so many times the rest before anything moves again.
_MISTRUST = 10.0


@dataclass
class Account:
    """Keep account of the seconds that balancing has lost against off, less those that it has gained.

    Off is where units were at first.

    Attributes:
        lost_s: losses less gains.
        elapsed_s: the time in which they were made.
        num_steps: of that time.
    """

    lost_s: float = 0.0
    elapsed_s: float = 0.0
    num_steps: float = 0.0

    def take(self, lost_s: float, elapsed_s: float, num_steps: int) -> None:
        """Add an interval, or a move.

        An interval counts as having lost at most what so many steps usually take, so that one outlier does not decide.

        Args:
            lost_s: by how much longer it was than off, with nothing lent or pruned; negative where shorter.
            elapsed_s: how long it was.
            num_steps: how many steps it had.
        """
        kept = 0.5 ** (num_steps / HALF_LIFE)
        if num_steps and self.num_steps:
            lost_s = min(lost_s, self.elapsed_s / self.num_steps * num_steps)
        self.lost_s = kept * self.lost_s + lost_s
        self.elapsed_s = kept * self.elapsed_s + elapsed_s
        self.num_steps = kept * self.num_steps + num_steps

    @property
    def debt_s(self) -> float:
        """Return the seconds that were lost beyond ``MOST_LOST`` of the time; 0 where there is nothing beyond."""
        return max(self.lost_s - MOST_LOST * self.elapsed_s, 0.0)

    def debt_with(self, price_s: float, late_s: float) -> float:
        """Return the seconds beyond what may be lost if a move were made that is good for nothing.

        The first move is free.

        Args:
            price_s: of that move and the way back.
            late_s: seconds lost until it is noticed.
        """
        return max(self.lost_s + late_s + price_s - max(MOST_LOST * self.elapsed_s, price_s), 0.0)

    def mistrust_s(self, price_s: float, late_s: float = 0.0) -> float:
        """Return the seconds by which a move is dearer than its price; arguments as of :meth:`debt_with`."""
        return _MISTRUST * self.debt_with(price_s, late_s)
