"""What a rank tells of some steps in a row: its usual times, as a few numbers that the ranks exchange.

``R`` ranks of the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from zeroresize.policy.tensor.estimation.times import StepTimes
from zeroresize.utils.usual import usual_of

_TimedT = TypeVar("_TimedT", "WatchedStep", "StepWindow")

#: Steps of which the products were timed are left out of the usual time where so many others are there.
_FEWEST_UNTIMED = 3
#: No step takes longer, in seconds.
_MOST_SECONDS = 1e9


@dataclass(frozen=True)
class WatchedStep:
    """Describe one step of a rank, in seconds.

    Attributes:
        busy_s: its time without waits for other ranks.
        wait_s: the rest of it.
        loader_s: the part of ``busy_s`` before the model's forward begins, as for fetching a batch.
        products_s: the part of ``busy_s`` in matrix products, forward and backward; NaN where that was not measured.
        work: samples, tokens or what else was counted in it; NaN where nothing was.
    """

    busy_s: float
    wait_s: float
    loader_s: float = 0.0
    products_s: float = math.nan
    work: float = math.nan

    @classmethod
    def of_times(cls, times: StepTimes, products_s: float, work: float) -> WatchedStep:
        """Return a step that was timed, with the seconds of its products, 0 where it had none that was timed."""
        most_s = max(times.busy_s - times.outside_s, 0.0)
        known_s = min(products_s, most_s) if products_s > 0.0 else math.nan
        return cls(times.busy_s, times.wait_s, times.outside_s, known_s, work)


@dataclass(frozen=True)
class StepWindow:
    """Describe the usual step of a rank among some in a row.

    Attributes:
        end_step: how many steps were over at its end.
        num_steps: of how many steps it is.
        busy_s, loader_s, products_s: as in :class:`WatchedStep`; NaN where nothing was measured.
        step_s: seconds of the whole step, waits included.
        work: mean of the steps, to which the times of each are scaled; NaN where it was not counted.
    """

    end_step: int
    num_steps: int
    busy_s: float
    step_s: float
    loader_s: float
    products_s: float
    work: float = math.nan

    #: How many numbers :meth:`as_numbers` returns.
    NUM_NUMBERS = 7

    def as_numbers(self) -> list[float]:
        """Return the window as numbers to be sent."""
        measured = self.busy_s, self.step_s, self.loader_s, self.products_s, self.work
        return [float(self.end_step), float(self.num_steps), *measured]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> StepWindow:
        """Return the window that :meth:`as_numbers` has told."""
        end_step, num_steps, *measured = numbers
        return cls(int(end_step), int(num_steps), *measured)

    @property
    def is_sound(self) -> bool:
        """Whether steps can have taken these times; what a clock that was set may tell is not sound."""
        return 0.0 < self.busy_s <= _MOST_SECONDS and 0.0 <= self.loader_s <= _MOST_SECONDS and self.num_steps > 0


def at_work(timed: _TimedT, work: float) -> _TimedT:
    """Return what a step would take, or a window's, for another amount of work; waits stay as they are."""
    ratio = work / timed.work
    busy_s, loader_s, products_s = (ratio * each for each in (timed.busy_s, timed.loader_s, timed.products_s))
    return replace(timed, busy_s=busy_s, loader_s=loader_s, products_s=products_s, work=work)


def window_of(steps: Sequence[WatchedStep], end_step: int) -> StepWindow:
    """Return the usual step among ``steps``: an evaluation, a checkpoint or a hiccup in one of them does not count.

    Args:
        steps: those that could be read since the last window; on a device the newest may be missing.
        end_step: how many steps are over.
    """
    sound = [step for step in steps if 0.0 < step.busy_s <= _MOST_SECONDS and step.work != 0.0]
    work = math.fsum(step.work for step in sound) / max(len(sound), 1)
    if not math.isnan(work):
        sound = [at_work(step, work) for step in sound]
    if not sound:
        return StepWindow(end_step, 0, math.nan, math.nan, math.nan, math.nan)
    untimed = [step for step in sound if math.isnan(step.products_s)]
    timed = [step for step in sound if not math.isnan(step.products_s)]
    usual = untimed if len(untimed) >= _FEWEST_UNTIMED else sound
    return StepWindow(
        end_step=end_step,
        num_steps=len(sound),
        busy_s=_uninterrupted([step.busy_s for step in usual]),
        step_s=usual_of([step.busy_s + step.wait_s for step in usual]),
        loader_s=_uninterrupted([step.loader_s for step in usual]),
        products_s=usual_of([step.products_s for step in timed]) if timed else math.nan,
        work=work,
    )


def _uninterrupted(values: Sequence[float]) -> float:
    """Return the lower quartile: other work on the machine lengthens steps, and hardly shortens any."""
    ascending = sorted(values)
    place = (len(ascending) - 1) / 4.0
    lower = int(place)
    upper = min(lower + 1, len(ascending) - 1)
    return ascending[lower] + (ascending[upper] - ascending[lower]) * (place - lower)
