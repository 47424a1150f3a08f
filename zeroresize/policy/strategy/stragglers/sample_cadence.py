"""After which steps it is worked out anew what steps take: as often as that may cost.

What steps take is worked out with a sample of the newest ones, and so are the proposals of what to do about slow ranks.
With tens of ranks that takes seconds. All ranks are given the same figures, so all work it out after the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Share of training that working out takes at most, beyond the first steps.
MAX_WORKING = 0.01
#: Steps between two samples: at least, and at most, whatever working out costs.
LEAST_STEPS, MOST_STEPS = 16, 1000


@dataclass
class SampleCadence:
    """Say after which steps a new sample is taken: after each of the first few, then once in so many.

    What was spent on working out is owed, and each step pays :data:`MAX_WORKING` of its seconds. A new sample waits
    until nothing is owed, so dear ones are rare. Proposals that changed speeds ask for do not wait, but are owed, too.

    Attributes:
        num_first: steps of a whole sample, of which each makes a new one.
        owed_s: seconds that steps have not paid for yet.
    """

    num_first: int
    owed_s: float = 0.0
    _num_steps: int = field(default=0, init=False, repr=False)
    _last: int = field(default=0, init=False, repr=False)

    def is_due(self) -> bool:
        """Count a step, and return whether a new sample is taken after it."""
        self._num_steps += 1
        waited = self._num_steps - self._last
        is_due = (
            self._num_steps <= self.num_first or waited >= MOST_STEPS or (waited >= LEAST_STEPS and self.owed_s <= 0.0)
        )
        if is_due:
            self._last = self._num_steps
        return is_due

    def learn(self, working_s: float, step_s: float) -> None:
        """Take a step: how many seconds the slowest rank has worked out since the one before, and those of the step."""
        self.owed_s = max(self.owed_s + working_s - MAX_WORKING * step_s, 0.0)

    def begin_anew(self) -> None:
        """Let the next steps be the first ones of a sample; what is owed stays."""
        self._num_steps = self._last = 0
