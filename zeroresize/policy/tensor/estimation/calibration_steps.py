"""When a plan that spares nobody is in force for a moment, since only there is seen what pruning hides."""

from __future__ import annotations

from dataclasses import dataclass

#: Share of the training time that these steps may add while somebody prunes or lends.
BUDGET = 0.01
#: So many usual steps' time they may take ahead of that budget, where a ratio is new or little is known.
CREDIT = 20.0
#: Of a usual step, at least: what costs nothing else tells nothing of the plan while it lasts.
_LEAST_PRICE = 0.25
#: In a shorter interval all steps are made so, since a device is read one step late.
_FEWEST_STEPS = 4


@dataclass
class CalibrationSteps:
    """Decide how many calibration steps there are, within the time that may be spent on them.

    Attributes:
        saved_s: seconds, never more than one of them takes: what cheap ones leave is not there for dear ones later.
    """

    saved_s: float = 0.0

    def due(
        self,
        num_steps: int,
        step_s: float,
        full_step_s: float,
        *,
        is_new: bool,
        is_unsure: bool,
    ) -> int:
        """Return with how many calibration steps the interval that follows begins; to be asked once an interval.

        Args:
            num_steps: of an interval.
            step_s, full_step_s: seconds of a step under the plan, and at full work.
            is_new: whether a rank is spared much more or less than before.
            is_unsure: whether little is known of the speed of a rank that is spared something.
        """
        number = 1 if num_steps >= _FEWEST_STEPS else num_steps
        price_s = number * max(full_step_s - step_s, _LEAST_PRICE * step_s)
        # What was owed for long steps is not paid off by short ones for ever.
        self.saved_s = max(self.saved_s, -CREDIT * step_s)
        self.saved_s = min(self.saved_s + BUDGET * num_steps * step_s, price_s)
        credit = CREDIT if is_unsure or (is_new and number < num_steps) else 0.0
        if self.saved_s + credit * step_s < price_s:
            return 0
        self.saved_s -= price_s
        return number
