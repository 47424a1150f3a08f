"""A rank's steps: which are timed, their usual times as a few numbers that the ranks exchange, and what delays them.

``R`` ranks of the group.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal, TypeVar

from zeroresize.policy import FEW
from zeroresize.policy.tensor.estimation.times import LEAST_SECONDS, MOST_SECONDS, StepTimes
from zeroresize.utils.usual import usual_of

_TimedT = TypeVar("_TimedT", "WatchedStep", "StepWindow")

#: Which share of the time may be spent on listening to steps, by a count that sees about two thirds of it.
_SHARE = 0.002
#: A rank that becomes ten times as slow is told after ten times as long, so it is not to take for ever.
_MOST_STRIDE = 32
#: What a window has cost decides on the one that begins so many windows later: by then its numbers have come.
_LAG = 4
#: "compute" stands for products and the rest together, where products were not timed; "link" for what lasts longer
#: between ranks, though none is late.
Cause = Literal["products", "rest", "loader", "compute", "link"]


@dataclass(frozen=True)
class WatchedStep:
    """Describe one step of a rank, in seconds."""

    busy_s: float  # its time without waits for other ranks
    wait_s: float  # the rest of it
    loader_s: float = 0.0  # the part of ``busy_s`` before the model's forward begins, as for fetching a batch
    products_s: float = math.nan  # the part of ``busy_s`` in matrix products, if that was measured
    work: float = math.nan  # samples, tokens or what else was counted in it
    inputs: float = math.nan  # elements of what the model was given, by which no time is scaled
    waits_s: Mapping[Any, float] = field(default_factory=dict)  # parts of ``wait_s`` by where, as its timer tells it

    @classmethod
    def of_times(
        cls, times: StepTimes, products_s: float, work: float, inputs: float, waits_s: Mapping[Any, float]
    ) -> WatchedStep:
        """Return a step that was timed, with the seconds of its products, and its inputs, 0 where it had none."""
        most_s = max(times.busy_s - times.outside_s, 0.0)
        known_s = min(products_s, most_s) if products_s > 0.0 else math.nan
        return cls(times.busy_s, times.wait_s, times.outside_s, known_s, work, inputs or math.nan, waits_s)


@dataclass(frozen=True)
class StepWindow:
    """Describe the usual of ``num_steps`` steps of a rank, as in :class:`WatchedStep`, once ``end_step`` were over."""

    end_step: int
    num_steps: int
    busy_s: float
    step_s: float  # the whole step, waits included
    loader_s: float
    products_s: float
    work: float = math.nan  # mean of the steps, to which the times of each are scaled
    inputs: float = math.nan  # mean of the steps

    def as_numbers(self) -> list[float]:
        """Return the window as numbers to be sent."""
        return [float(number) for number in astuple(self)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> StepWindow:
        """Return the window that :meth:`as_numbers` has told."""
        end_step, num_steps, *measured = numbers
        return cls(int(end_step), int(num_steps), *measured)

    @property
    def is_sound(self) -> bool:
        """Whether steps can have taken these times; what a clock that was set may tell is not sound."""
        return 0.0 < self.busy_s <= MOST_SECONDS and 0.0 <= self.loader_s <= MOST_SECONDS and self.num_steps > 0

    @property
    def computing_s(self) -> float:
        """Seconds from the beginning of the model's forward on, without waits."""
        return self.busy_s - self.loader_s


class Sampling:
    """Decides which steps make windows, by what listening to them has cost in earlier ones: all of them at first.

    Windows begin and end at the same steps on all ranks. Where the numbers that decide on one come late to a rank, it
    listens to as many steps as in the window before, and ends late.
    """

    def __init__(self, steps_of_window: int) -> None:
        self._steps_of_window = steps_of_window
        self._number, self._begin = 0, 1  # the present window, and its first step
        #: Of the present window and, as far as is known, those that follow: one of so many steps is listened to.
        self._strides, self._latest = deque([1] * _LAG), 1
        self._costs_s = deque[float](maxlen=FEW)

    def listens_to(self, step: int) -> bool:
        """Return whether step number ``step``, from 1 on, is listened to; it lies in the present window.

        The place within each stretch of steps moves on: of ten that are listened to no more than six lie at the same
        place of any period, so what a rank does in each second or tenth step is not taken for usual.
        """
        stride = self._strides[0] if self._strides else self._latest
        stretch, place = divmod(step - self._begin, stride)
        return place == (self._number * self._steps_of_window + stretch) // 2 % stride

    def ends_window(self, step: int) -> bool:
        """Return whether the present window is over after ``step``, and if so go on with the next."""
        if not self._strides or step + 1 < self._begin + self._steps_of_window * self._strides[0]:
            return False
        self._begin += self._steps_of_window * self._strides.popleft()
        self._number += 1
        return True

    def take(self, cost_s: float, step_s: float) -> None:
        """Take what a window has told, if anything: the cost of listening to a step, and the seconds of a usual one."""
        if math.isfinite(cost_s) and step_s > 0.0:
            self._costs_s.append(cost_s)
            self._latest = min(max(math.ceil(usual_of(self._costs_s) / (_SHARE * step_s)), 1), _MOST_STRIDE)
        self._strides.append(self._latest)


def at_work(timed: _TimedT, work: float) -> _TimedT:
    """Return what a step would take, or a window's, for another amount of work; waits stay as they are."""
    ratio = work / timed.work
    busy_s, loader_s, products_s = (ratio * each for each in (timed.busy_s, timed.loader_s, timed.products_s))
    return replace(timed, busy_s=busy_s, loader_s=loader_s, products_s=products_s, work=work)


def window_of(steps: Sequence[WatchedStep], end_step: int) -> StepWindow:
    """Return the usual one of steps that could be read since the last window, once ``end_step`` are over.

    An evaluation, a checkpoint or a hiccup in one of them does not count.
    """
    sound = [step for step in steps if 0.0 < step.busy_s <= MOST_SECONDS and step.work != 0.0]
    if not sound:
        return StepWindow(end_step, 0, math.nan, math.nan, math.nan, math.nan)
    work = math.fsum(step.work for step in sound) / len(sound)
    if not math.isnan(work):
        sound = [at_work(step, work) for step in sound]
    timed_s = [step.products_s for step in sound if not math.isnan(step.products_s)]
    untimed = [step for step in sound if math.isnan(step.products_s)]
    usual = untimed or sound  # timing products takes time
    return StepWindow(
        end_step=end_step,
        num_steps=len(sound),
        busy_s=_uninterrupted([step.busy_s for step in usual]),
        step_s=usual_of([step.busy_s + step.wait_s for step in usual]),
        loader_s=_uninterrupted([step.loader_s for step in usual]),
        products_s=usual_of(timed_s) if timed_s else math.nan,
        work=work,
        inputs=math.fsum(step.inputs for step in sound) / len(sound),
    )


def usual_waits(steps: Sequence[WatchedStep]) -> dict[Any, float]:
    """Return usual seconds of a step by where they were waited; 0 in a step that did not wait there."""
    places = dict.fromkeys(place for step in steps for place in step.waits_s)
    return {place: usual_of([step.waits_s.get(place, 0.0) for step in steps]) for place in places}


def _uninterrupted(values: Sequence[float]) -> float:
    """Return the lower quartile: other work on the machine lengthens steps, and hardly shortens any."""
    ascending, place = sorted(values), (len(values) - 1) / 4
    lower, upper = ascending[math.floor(place)], ascending[math.ceil(place)]
    return lower + (place % 1.0) * (upper - lower)


def usual_window(windows: Sequence[StepWindow]) -> StepWindow:
    """Return what is usual among windows of a rank."""
    timed_s = [window.products_s for window in windows if not math.isnan(window.products_s)]
    return replace(
        windows[-1],
        busy_s=usual_of([window.busy_s for window in windows]),
        step_s=usual_of([window.step_s for window in windows]),
        loader_s=usual_of([window.loader_s for window in windows]),
        products_s=usual_of(timed_s) if timed_s else math.nan,
    )


def shares_of_causes(slow: StepWindow, others: Sequence[StepWindow]) -> dict[Cause, float]:
    """Return which share of a slow rank's delay comes from which part of its usual step, the largest first.

    Parts are compared with what is usual among the others. Shares add up to 1; a part in which the rank is not slower
    has none.
    """
    compute_s = slow.computing_s - usual_of([other.computing_s for other in others])
    delays: dict[Cause, float] = {"loader": slow.loader_s - usual_of([other.loader_s for other in others])}
    if any(math.isnan(window.products_s) for window in (slow, *others)):
        delays["compute"] = compute_s
    else:
        products_s = slow.products_s - usual_of([other.products_s for other in others])
        delays |= {"products": products_s, "rest": compute_s - products_s}
    total_s = math.fsum(seconds for seconds in delays.values() if seconds > 0.0)
    by_delay = sorted(delays.items(), key=lambda item: item[1], reverse=True)
    return {cause: seconds / total_s for cause, seconds in by_delay if seconds > 0.0}


def share_saved(windows: Sequence[StepWindow]) -> float:
    """Return which share of a step is saved at most if work is divided by the speeds of ranks with these windows [R].

    What a rank does before its forward stays where it is. The rest, c seconds of rank i, is divided so that all ranks
    end together, at T with Σ (T − loader_i) / c_i = R. Whether work can be divided at all is not asked.
    """
    weights = [1.0 / max(window.computing_s, LEAST_SECONDS) for window in windows]
    loaded = math.fsum(weight * window.loader_s for weight, window in zip(weights, windows, strict=True))
    balanced_s = (len(windows) + loaded) / math.fsum(weights)
    balanced_s = max(balanced_s, *(window.loader_s for window in windows))
    longest_s = max(window.busy_s for window in windows)
    step_s = max(longest_s, *(window.step_s for window in windows))
    return max(longest_s - balanced_s, 0.0) / step_s
