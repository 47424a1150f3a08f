"""How fast ranks are, by what their part of a step should have taken and did; pure, the same on every rank.

The filter of :mod:`zeroresize.policy.tensor.estimation.estimator` tells what pruning costs apart from what a rank is
slow by, in one layout of the work. Here work changes its layout, and only the speed counts: so it is what is usual
among three steps (:mod:`zeroresize.utils.usual`), which no single interruption moves, and a mean of those until they
jump.

``R`` ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from zeroresize.utils.usual import usual_of

#: Steps of which the middle one counts.
_RECENT = 3
#: A middle one that differs by this factor from the mean is a jump: the mean begins anew.
_JUMP = 1.15
#: How much a step says where there is no jump.
_WEIGHT = 1.0 / 8.0
#: Ranks whose speeds differ by less from the middle one's are taken to be as fast, and a speed that is told changes by
#: no less.
_ALIKE = 0.08


@dataclass
class RankSpeeds:
    """Learn how fast ranks are from the seconds that each gives for each step.

    A rank that has no part in a step tells what a few products took instead. What these take compared with a unit of
    work is learned from ranks that do both, in steps like those before: so not while a device warms up.

    Args:
        num_ranks: R.
    """

    num_ranks: int
    _recent: list[list[float]] = field(init=False)
    _paces: list[float | None] = field(init=False)
    _announced: list[float] = field(default_factory=list, init=False)
    _ratios: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        ranks = range(self.num_ranks)
        self._recent, self._paces, self._ratios = [[] for _ in ranks], [None for _ in ranks], [[] for _ in ranks]

    def learn(self, busy_s: Sequence[float], work_s: Sequence[float], probe_s: Sequence[float]) -> None:
        """Take one step.

        Args:
            busy_s: [R] seconds that each rank computed in it.
            work_s: [R] what it should have taken; 0 for a rank without a part.
            probe_s: [R] seconds of a few products; 0 where none were made in this step.
        """
        for rank, (busy, work, probe) in enumerate(zip(busy_s, work_s, probe_s, strict=True)):
            if work > 0.0 and 0.0 < busy < math.inf:
                self._take(rank, busy / work)
                if probe > 0.0 and self._is_settled(rank, busy / work):
                    self._ratios[rank] = [*self._ratios[rank], busy / work / probe][-_RECENT:]
        known = [median(own) for own in self._ratios if own]
        for rank, (work, probe) in enumerate(zip(work_s, probe_s, strict=True)):
            if known and work <= 0.0 and probe > 0.0:
                self._take(rank, probe * median(known))
        self._tell()

    def speeds(self) -> tuple[float, ...] | None:
        """Return [R] how many times as fast as the model of costs says each rank is.

        It is None before enough is known of all.

        Ranks that are about as fast as the middle one are told to be as fast as that.
        """
        return tuple(self._announced) or None

    def _tell(self) -> None:
        if any(pace is None or len(own) < _RECENT for pace, own in zip(self._paces, self._recent, strict=True)):
            return
        now = [1.0 / pace for pace in self._paces if pace]
        before = self._announced or now
        middle = _steady(median(before), median(now))
        self._announced = [
            middle if abs(new / middle - 1.0) < _ALIKE else _steady(old, new)
            for old, new in zip(before, now, strict=True)
        ]

    def _is_settled(self, rank: int, pace: float) -> bool:
        mean = self._paces[rank]
        return len(self._recent[rank]) == _RECENT and mean is not None and abs(math.log(pace / mean)) < math.log(_JUMP)

    def _take(self, rank: int, pace: float) -> None:
        recent, mean = [*self._recent[rank], pace][-_RECENT:], self._paces[rank]
        self._recent[rank] = recent
        middle = usual_of(recent)
        if mean is None or abs(math.log(middle / mean)) > math.log(_JUMP):
            self._paces[rank] = middle
        else:
            self._paces[rank] = mean + _WEIGHT * (middle - mean)


def _steady(old: float, new: float) -> float:
    """``old`` where ``new`` is about as much: decisions are to change with speeds, not with noise."""
    return old if abs(new / old - 1.0) < _ALIKE else new
