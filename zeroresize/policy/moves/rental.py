"""When a change pays that nobody knows how long it will be good for: a ski rental of several options, and its verdict.

Staying is rented, a change is bought. Each option is charged with what staying instead of it has cost, and it is due
when that has reached its price, which is the change there and back. So staying and changing together take at most
twice what the best would in hindsight, and what alternates faster than a change pays is never followed to and fro
(Karlin, Manasse, Rudolph, Sleator, 1988).

Two rules more, each for a case that was measured:

- A change that does not save what it was to save doubles the price of the next one, and one that does halves it. Work
  that changes again and again would otherwise be chased for good.
- A change that could not be made, as memory does not suffice, is not tried again for some updates, twice as many after
  each refusal.

Units, layers, strategies and micro-batches ask for its verdict (:meth:`Rental.decide`). It knows seconds only, so equal
numbers give equal verdicts on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from zeroresize.policy import ROUNDING
from zeroresize.utils.texts import duration_text

#: After a refused change nothing is due for so many updates, twice as many after each that follows, up to the most.
FIRST_PAUSE = 8
LONGEST_PAUSE = FIRST_PAUSE**2 * FIRST_PAUSE
#: By so much all prices rise at most, as changes did not save what they were to save.
MOST_DOUBT = float(FIRST_PAUSE**2)
#: Share of a step that a change must save at least, where nothing measures how large noise is.
MIN_SAVING = 0.02


def is_saving(saving_s: float, step_s: float, least: float) -> bool:
    """Whether a change saves more than ``least``, the share of a step that is noise."""
    return saving_s > least * step_s


def beyond_noise(saving_s: float, step_s: float, least: float) -> float:
    """Return the saving, negative for a loss, or 0 where :func:`is_saving` takes it for noise."""
    return saving_s if is_saving(abs(saving_s), step_s, least) else 0.0


class Reason(Enum):
    """Why a change is made, or is not made now."""

    DUE = "staying has cost as much as the change"
    LASTS = "the work stays as it is for long enough to pay for the change"
    NEEDED = "what is in force cannot stay"
    NOTHING_SAVES = "no change saves more than noise"
    NOT_YET = "staying has not cost as much as the change yet"
    PAUSED = "the last change could not be made, and is not tried again at once"
    HELD = "a user decides"


@dataclass(frozen=True)
class Option:
    """Describe a change that could be made.

    Attributes:
        name: by which what is owed for it is kept.
        saving_s: by how many seconds steps become shorter, negative where longer.
        price_s: seconds of the change, and of the one that undoes it where that may be needed.
        lasts_steps: for how many steps the work is known to stay as it is; infinite where nobody knows. Where it is
            known, the way back need not be paid for.
        is_needed: whether what is in force cannot stay, whatever the change costs.
    """

    name: str
    saving_s: float
    price_s: float
    lasts_steps: float = math.inf
    is_needed: bool = False


@dataclass(frozen=True)
class Verdict:
    """Tell what a decision came to and why: log lines, telemetry and what-if tables are made of it alone.

    Attributes:
        reason: why the option is due, or is not.
        option: that is due; else the one that comes nearest to it, None where nothing saves more than noise.
        step_s: seconds of a step as it is.
        owed_s: what staying instead of the option has cost.
        needed_s: at how much it is due: its price, times what changes that disappointed have raised it to.
        pause: for so many updates nothing is due.
    """

    reason: Reason
    option: Option | None = None
    step_s: float = math.nan
    owed_s: float = 0.0
    needed_s: float = math.inf
    pause: int = 0

    @property
    def is_due(self) -> bool:
        """Return whether the option is to be put in force now."""
        return self.reason in (Reason.DUE, Reason.LASTS, Reason.NEEDED)

    def __str__(self) -> str:
        if self.option is None:
            return self.reason.value
        saving, step, price, owed, needed = map(
            duration_text, (self.option.saving_s, self.step_s, self.option.price_s, self.owed_s, self.needed_s)
        )
        pause = f" ({self.pause} updates)" if self.pause else ""
        saves = f"it would save {saving} of {step} a step and take {price}"
        return f"{self.reason.value}{pause}: {saves}; staying has cost {owed} of {needed}"


@dataclass
class Rental:
    """Add up what staying has cost, update after update, and say which option is due."""

    #: Seconds that staying instead of each option has cost, by its name, where it has cost any.
    owed_s: dict[str, float] = field(default_factory=dict)
    doubt: float = 1.0  # factor of all prices, as changes did not save what they were to save; at least 1
    pause: int = 0  # for so many updates, this one included, nothing is due
    next_pause: int = FIRST_PAUSE  # after the next refusal

    def decide(
        self, options: Sequence[Option], step_s: float, num_steps: float, least_saving: float = MIN_SAVING
    ) -> Verdict:
        """Charge the options with some steps of staying, and decide.

        Of several that are due it is the one that saves most. What is owed for an option that is not named any more is
        forgotten. A step takes ``step_s`` as it is, and stays so for ``num_steps``; what an option saves or loses less
        than the share ``least_saving`` of it is noise and counts as nothing.
        """
        self.pause = max(self.pause - 1, 0)
        counted_s = {option.name: beyond_noise(option.saving_s, step_s, least_saving) for option in options}
        owed_s = {name: self.owed_s.get(name, 0.0) + saving_s * num_steps for name, saving_s in counted_s.items()}
        self.owed_s = {name: total_s for name, total_s in owed_s.items() if total_s > 0.0}
        by_saving = sorted(options, key=lambda option: -option.saving_s)
        verdicts = [
            self._verdict(option, step_s) for option in by_saving if option.is_needed or counted_s[option.name] > 0.0
        ]
        if not verdicts:
            return Verdict(Reason.NOTHING_SAVES, step_s=step_s)
        due = [verdict for verdict in verdicts if verdict.is_due]
        return due[0] if due else max(verdicts, key=lambda verdict: verdict.owed_s / max(verdict.needed_s, ROUNDING))

    def _verdict(self, option: Option, step_s: float) -> Verdict:
        owed_s, needed_s = self.owed_s.get(option.name, 0.0), self.doubt * option.price_s
        reason = Reason.DUE if owed_s >= needed_s else Reason.NOT_YET
        if self.pause:
            reason = Reason.PAUSED
        elif option.is_needed:
            reason = Reason.NEEDED
        elif option.lasts_steps < math.inf and option.saving_s * option.lasts_steps >= needed_s / 2.0:
            reason = Reason.LASTS
        return Verdict(reason, option, step_s, owed_s, needed_s, self.pause)

    def settle(self, name: str | None = None) -> None:
        """Forget what is owed, as the option of that name is in force now; None where all is to be forgotten.

        What would have been better still than the option is owed for the rest.
        """
        paid_s = math.inf if name is None else self.owed_s.get(name, 0.0)
        self.owed_s = {key: total_s - paid_s for key, total_s in self.owed_s.items() if total_s > paid_s}

    def succeed(self) -> None:
        """Note that a change was made: the next refusal counts as the first again."""
        self.next_pause = FIRST_PAUSE

    def refuse(self) -> None:
        """Note that a change could not be made: nothing is owed, and nothing is due for a while."""
        self.settle()
        self.pause = self.next_pause
        self.next_pause = min(2 * self.next_pause, LONGEST_PAUSE)

    def judge(self, *, is_kept: bool) -> None:
        """Take whether the last change saves what it was to save: if not, prices double, up to :data:`MOST_DOUBT`.

        Each that does halves them again, down to what they are.
        """
        self.doubt = max(self.doubt / 2.0, 1.0) if is_kept else min(2.0 * self.doubt, MOST_DOUBT)
