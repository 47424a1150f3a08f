"""When a step is made at full work, since only there is seen what pruning hides."""

from __future__ import annotations

from dataclasses import dataclass

#: Share of the training time that these steps may add while somebody prunes or lends.
BUDGET = 0.01
#: So many usual steps' time they may take ahead of that budget, where a ratio is new.
_CREDIT = 20
#: An interval that begins at full work has some steps under its plan to compare it with (on a device, read one late).
_FEWEST_STEPS = 4


@dataclass
class FullWorkSteps:
    """The time that is there for them.

    Attributes:
        saved_s: seconds, never more than one of them takes: what cheap ones leave is not there for dear ones later.
    """

    saved_s: float = 0.0

    def is_due(self, num_steps: int, step_s: float, full_step_s: float, *, is_new: bool) -> bool:
        """Whether the interval that follows begins with one, asked once an interval.

        From time to time, as the budget allows; on credit where a ratio is new, or the next decision would take an
        error of what it costs for a change of speed.

        Args:
            num_steps: of an interval; one of few steps has no room for it.
            step_s, full_step_s: seconds of a step under the plan, and at full work.
            is_new: whether a rank is spared much more or less than before.
        """
        if num_steps < _FEWEST_STEPS:
            return False
        price_s = max(full_step_s - step_s, 0.0)
        self.saved_s = min(self.saved_s + BUDGET * num_steps * step_s, price_s)
        credit_s = _CREDIT * step_s if is_new else 0.0
        if self.saved_s + credit_s < price_s:
            return False
        self.saved_s -= price_s
        return True
