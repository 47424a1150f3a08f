"""How fast ranks are, and after which steps that is worth working out; pure, the same on every rank.

A :class:`~zeroresize.policy.speed.meter.SpeedMeter` of each rank follows seconds per unit of work: every third step it
takes the last three, and at once if their usual one is a jump. ``R`` ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from zeroresize.policy import FEW
from zeroresize.policy.pipeline.profile_cadence import MAX_MEASURING, MOST_BLOCKS
from zeroresize.policy.speed.meter import SpeedMeter
from zeroresize.policy.speed.noise import ALIKE

#: Steps between two samples of steps, at least.
LEAST_STEPS = 16


@dataclass
class _RankSpeed:
    """A rank's newest steps, of which the middle one counts, and what was learned of those before."""

    meter: SpeedMeter = field(default_factory=SpeedMeter)  # of the logarithm of seconds per unit of work
    recent: list[float] = field(default_factory=list)  # the newest of these logarithms
    num_new: int = 0  # how many of them the meter has not taken
    #: Seconds per unit of work as a multiple of those of a few products, newest last.
    ratios: list[float] = field(default_factory=list)

    def take(self, pace: float) -> None:
        """Take a step's seconds per unit of work."""
        self.recent = [*self.recent, math.log(pace)][-FEW:]
        self.num_new += 1
        is_full = len(self.recent) == FEW
        if is_full and (self.num_new >= FEW or self.meter.is_jump(self.recent)):
            self.meter.pass_interval()
            self.meter.take(self.recent)
            self.num_new = 0


@dataclass
class RankSpeeds:
    """Learn how fast ranks are from the seconds that each gives for each step.

    A rank that has no part in a step tells what a few products took instead. What these take compared with a unit of
    work is learned from ranks that do both, in steps like those before: so not while a device warms up.
    """

    num_ranks: int
    _ranks: list[_RankSpeed] = field(init=False)
    _announced: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._ranks = [_RankSpeed() for _ in range(self.num_ranks)]

    def learn(self, busy_s: Sequence[float], work_s: Sequence[float], probe_s: Sequence[float]) -> None:
        """Take one step.

        Args:
            busy_s: [R] seconds that each rank computed in it.
            work_s: [R] what it should have taken; 0 for a rank without a part.
            probe_s: [R] seconds of a few products; 0 where none were made in this step.
        """
        for rank, busy, work, probe in zip(self._ranks, busy_s, work_s, probe_s, strict=True):
            if work > 0.0 and 0.0 < busy < math.inf:
                rank.take(busy / work)
                if probe > 0.0 and rank.meter.is_known and not rank.meter.is_jump([math.log(busy / work)]):
                    rank.ratios = [*rank.ratios, busy / work / probe][-FEW:]
        known = [median(rank.ratios) for rank in self._ranks if rank.ratios]
        for rank, work, probe in zip(self._ranks, work_s, probe_s, strict=True):
            if known and work <= 0.0 and probe > 0.0:
                rank.take(probe * median(known))
        if all(rank.meter.is_known for rank in self._ranks):
            self._announce([math.exp(-rank.meter.level) for rank in self._ranks])

    def speeds(self) -> tuple[float, ...] | None:
        """Return [R] how many times as fast as costs say each rank is; None before enough is known of all.

        Ranks that are about as fast as the middle one are told to be as fast as that.
        """
        return tuple(self._announced) or None

    def _announce(self, now: Sequence[float]) -> None:
        before = self._announced or now
        middle = _steady(median(before), median(now))
        self._announced = [
            middle if abs(new / middle - 1.0) < ALIKE else _steady(old, new)
            for old, new in zip(before, now, strict=True)
        ]


def _steady(old: float, new: float) -> float:
    """``old`` where ``new`` is about as much: decisions are to change with speeds, not with noise."""
    return old if abs(new / old - 1.0) < ALIKE else new


@dataclass
class SampleCadence:
    """Say after which steps a new sample is taken, from which what steps take is worked out anew.

    After each of the first ones, as many as a whole sample has, then as often as a pipeline's layers are measured. What
    was spent on working out, with tens of ranks seconds, is owed, and each step pays its share; a new sample waits
    until nothing is owed, so dear ones are rare. Proposals that changed speeds ask for do not wait, but are owed, too.
    All ranks are given the same figures.
    """

    num_first: int
    owed_s: float = 0.0  # seconds that steps have not paid for yet
    _num_steps: int = field(default=0, init=False, repr=False)
    _last: int = field(default=0, init=False, repr=False)

    def is_due(self) -> bool:
        """Count a step, and return whether a new sample is taken after it."""
        self._num_steps += 1
        is_paid = self._num_steps - self._last >= (MOST_BLOCKS if self.owed_s > 0.0 else LEAST_STEPS)
        is_due = self._num_steps <= self.num_first or is_paid
        if is_due:
            self._last = self._num_steps
        return is_due

    def learn(self, working_s: float, step_s: float) -> None:
        """Take a step: how many seconds the slowest rank has worked out since the one before, and those of the step."""
        self.owed_s = max(self.owed_s + working_s - MAX_MEASURING * step_s, 0.0)

    def begin_anew(self) -> None:
        """Let the next steps be the first ones of a sample; what is owed stays."""
        self._num_steps = self._last = 0
