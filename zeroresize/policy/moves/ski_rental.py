"""When a change pays that nobody knows how long it will be good for: a ski rental with any number of candidates.

Staying is rented, a move is bought. Each candidate is charged with what staying instead of it has cost, and it is due
when that has reached its price, of the move there and back. So staying and moving together take at most twice what the
best would in hindsight, and what alternates faster than a move pays is never followed to and fro. The best possible
without knowing the future is just that (Karlin, Manasse, Rudolph, Sleator, 1988).

A move that cannot be made, as memory does not suffice, is not tried again at once. Where an update is a few steps, as
of units and strategies, nothing is due for some updates (:meth:`SkiRental.refuse`). Layers decide once in up to
hundreds of steps, and a pause would be long: their prices double instead (:meth:`SkiRental.judge`), so that the more a
move saves the sooner it is tried. Where memory is missing for a while, that gains more than pauses would; where it is
missing for good, both cost the same.

Units that change owners (:mod:`zeroresize.policy.tensor.ownership_decision`), layers that change stages
(:mod:`zeroresize.policy.pipeline.rebalancing`) and strategies that are put in force
(:mod:`zeroresize.policy.strategy.stragglers.decision`) ask it. They say what is wanted, what it saves and what it
takes. Of re-packing a pipeline onto fewer ranks (:mod:`zeroresize.policy.pipeline.repacking_decision`) nothing is owed,
as waiting costs nothing there, but what was refused pauses, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: After a refused move nothing is due for so many updates, twice as many after each that follows, up to the most.
FIRST_PAUSE, LONGEST_PAUSE = 8, 1024
#: Each move that does not save what it was to save doubles all prices, up to so many times as much.
MOST_DOUBT = 64.0


@dataclass
class SkiRental:
    """Add up what staying has cost, update after update.

    Attributes:
        owed_s: seconds that staying instead of each candidate has cost, by candidate; those of which nothing is owed
            are not in it.
        doubt: by which factor prices are higher, as moves did not save what was expected; at least 1.
        pause: for so many updates, this one included, nothing is due.
        next_pause: how long the pause after the next refusal is, in updates.
    """

    owed_s: dict[str, float] = field(default_factory=dict)
    doubt: float = 1.0
    pause: int = 0
    next_pause: int = FIRST_PAUSE

    def owed_for(self, candidate: str) -> float:
        """Return the seconds that staying instead of this candidate has cost."""
        return self.owed_s.get(candidate, 0.0)

    def next_update(self) -> None:
        """Count an update: a pause becomes shorter."""
        self.pause = max(self.pause - 1, 0)

    def charge(self, saved_s: Mapping[str, float], num_steps: float) -> None:
        """Add what staying costs in some steps; what is owed falls to 0 at the least, where moving would have lost.

        Args:
            saved_s: by how many seconds each candidate makes a step shorter, negative where longer. Candidates that are
                not named are forgotten.
            num_steps: how many steps these are.
        """
        owed_s = {candidate: self.owed_for(candidate) + saving_s * num_steps for candidate, saving_s in saved_s.items()}
        self.owed_s = {candidate: total_s for candidate, total_s in owed_s.items() if total_s > 0.0}

    def is_due(self, candidate: str, price_s: float) -> bool:
        """Whether staying instead of the candidate has cost its price: seconds of the move there and back."""
        return not self.pause and self.owed_for(candidate) >= self.doubt * price_s

    def settle(self, candidate: str | None = None) -> None:
        """Forget what is owed, as the candidate is in force now; None where everything is to be forgotten.

        What would have been better still than the candidate is owed for the rest.
        """
        paid_s = float("inf") if candidate is None else self.owed_for(candidate)
        left_s = {key: total_s - paid_s for key, total_s in self.owed_s.items()}
        self.owed_s = {key: total_s for key, total_s in left_s.items() if total_s > 0.0}

    def succeed(self) -> None:
        """Note that a move was made: the next refusal counts as the first one again."""
        self.next_pause = FIRST_PAUSE

    def refuse(self) -> None:
        """Note that a move could not be made: nothing is owed, and nothing is due for a while."""
        self.settle()
        self.pause = self.next_pause
        self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)

    def judge(self, *, is_kept: bool) -> None:
        """Take whether the last move saves what it was to save: if not, prices double, up to :data:`MOST_DOUBT`."""
        self.doubt = 1.0 if is_kept else min(2.0 * self.doubt, MOST_DOUBT)
