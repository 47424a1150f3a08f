"""Which ranks of a group are slow: every rank's windows in, what has begun, changed and ended out; alike on all ranks.

``R`` ranks of the group. A *round* is one window of every rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zeroresize.policy.slowness.causes import Cause, main_cause, share_saved, shares_of_causes, usual_window
from zeroresize.policy.slowness.rank_level import Change, RankLevel
from zeroresize.policy.slowness.windows import StepWindow, at_work
from zeroresize.utils.usual import usual_of_others

#: A rank is slow from this share of a step on, unless the caller says otherwise.
TOLERANCE = 0.03
#: So many rounds are kept: a slowness is told to have begun at most so many rounds ago.
_MOST_KEPT = 16
#: A usual time is that of so many rounds.
_USUAL = 4
#: Of so many ranks a slow one hardly changes what is usual among the others of each.
_MANY = 5
#: After this many rounds ranks are compared: the first steps compile, allocate and fill caches.
_WARM_UP = 1


@dataclass(frozen=True)
class SlowRank:
    """Describe a rank that is slow.

    Attributes:
        rank: within the group.
        times: how many times as long as the others it takes, for as much work where that was counted.
        since_step: after so many steps it began.
        num_steps, seconds: for so long it has lasted.
        cause: what most of the delay comes from: ``"products"`` (matrix products), ``"rest"`` (what else is computed),
            ``"loader"`` (what passes before the model's forward begins), or ``"compute"`` where products were not timed
            apart.
        causes: which share of the delay comes from which of them.
        cost_s: seconds that the group has waited for it, as far as can be said: of every step what the rank took longer
            than is usual among the others.
    """

    rank: int
    times: float
    since_step: int
    num_steps: int
    seconds: float
    cause: Cause
    causes: Mapping[Cause, float]
    cost_s: float


@dataclass(frozen=True)
class SlownessEvent:
    """Describe what has just changed; ``times_before`` is how slow the rank was, 1 where it was not."""

    kind: Change
    slow: SlowRank
    times_before: float


@dataclass(frozen=True)
class WatchReport:
    """Describe who is slow in a group.

    Attributes:
        step: how many steps were over at the end of the last round; 0 before there was any.
        num_ranks: R.
        slow: who is slow now, by rank.
        scores: [R] the fastest rank's usual busy time as a share of each rank's own: 1 is as fast as the fastest. Empty
            before the first round.
        busy_s: [R] usual seconds of a step without waits for other ranks; where work was counted, for as much as ranks
            have on average.
        step_s: usual seconds of a step.
        cost_s: seconds that slow ranks have cost the group so far: over all steps in which one was slow, what the
            slowest took longer than is usual among the others.
        share_saved: share of a step that would be saved at most if work were divided by the ranks' speeds.
    """

    step: int
    num_ranks: int
    slow: tuple[SlowRank, ...]
    scores: tuple[float, ...]
    busy_s: tuple[float, ...]
    step_s: float
    cost_s: float
    share_saved: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as for JSON."""
        return asdict(self)


@dataclass
class _Round:
    windows: Sequence[StepWindow]
    first_step: int
    counted_s: float = 0.0  # what is counted of it as cost of the group
    others_busy_s: list[float] = field(init=False)  # [R] what is usual among the others

    def __post_init__(self) -> None:
        self.others_busy_s = usual_of_others([window.busy_s for window in self.windows])

    @property
    def num_steps(self) -> int:
        return max(window.end_step for window in self.windows) - self.first_step

    @property
    def seconds(self) -> float:
        return self.num_steps * max(window.step_s for window in self.windows)

    def excess_s(self, rank: int) -> float:
        """Seconds of all its steps that a rank takes longer than is usual among the others."""
        return self.num_steps * max(self.windows[rank].busy_s - self.others_busy_s[rank], 0.0)


@dataclass
class _Slowness:
    """A slowness under way; its rounds at its present level are the last ``num_rounds``."""

    since_step: int
    num_steps: int = 0
    seconds: float = 0.0
    cost_s: float = 0.0
    num_rounds: int = 0
    shares: dict[Cause, float] = field(default_factory=dict)

    def add(self, past: _Round, rank: int) -> None:
        excess_s = past.excess_s(rank)
        self.num_steps += past.num_steps
        self.seconds += past.seconds
        self.cost_s += excess_s
        self.num_rounds += 1


class GroupSlowness:
    """Follows every rank of a group, of two at least.

    Args:
        num_ranks: R.
        tolerance: by which share a rank must take longer than the others before it is told.

    Attributes:
        compares_work: whether all ranks counted their work, so that times are those for as much as a rank has on
            average. Else a rank with more work looks slow.
    """

    def __init__(self, num_ranks: int, tolerance: float = TOLERANCE) -> None:
        self._levels = [RankLevel(tolerance) for _ in range(num_ranks)]
        self._slow: dict[int, _Slowness] = {}
        self._rounds: deque[_Round] = deque(maxlen=_MOST_KEPT)
        self._num_rounds, self._last_step, self._cost_s = 0, 0, 0.0
        self.compares_work = False

    def update(self, windows: Sequence[StepWindow]) -> list[SlownessEvent]:
        """Take a round; return what it changes.

        Args:
            windows: [R] of every rank; a round in which a rank has measured nothing is left out.
        """
        if not all(window.is_sound for window in windows):
            return []
        work = math.fsum(window.work for window in windows) / len(windows)
        self.compares_work = not math.isnan(work)
        if self.compares_work:
            windows = [at_work(window, work) for window in windows]
        first_step, self._last_step = self._last_step, max(window.end_step for window in windows)
        self._num_rounds += 1
        if self._num_rounds <= _WARM_UP:
            return []
        self._rounds.append(_Round(windows, first_step))
        events = [event for rank in range(len(windows)) if (event := self._follow(rank)) is not None]
        self._count_cost()
        return events

    @property
    def scores(self) -> tuple[float, ...]:
        """[R] the fastest rank's usual time as a share of each rank's own; empty before the first round."""
        busy_s = [window.busy_s for window in self._usual()]
        return tuple(min(busy_s) / seconds for seconds in busy_s)

    def report(self) -> WatchReport:
        """Return who is slow now, and what that has cost."""
        usual = self._usual()
        return WatchReport(
            step=self._last_step,
            num_ranks=len(self._levels),
            slow=tuple(self._described(rank) for rank in sorted(self._slow)),
            scores=self.scores,
            busy_s=tuple(window.busy_s for window in usual),
            step_s=max((window.step_s for window in usual), default=math.nan),
            cost_s=self._cost_s,
            share_saved=share_saved(usual) if usual else math.nan,
        )

    def _usual(self) -> list[StepWindow]:
        """[R] the usual windows of the last rounds."""
        last = list(self._rounds)[-_USUAL:]
        return [usual_window([past.windows[rank] for past in last]) for rank in range(len(self._levels)) if last]

    def _follow(self, rank: int) -> SlownessEvent | None:
        newest = self._rounds[-1]
        window = newest.windows[rank]
        level = math.log(window.busy_s / newest.others_busy_s[rank])
        is_another_slow = any(other != rank for other in self._slow)
        change = self._levels[rank].update(level, learns=len(self._levels) >= _MANY or not is_another_slow)
        if rank in self._slow:
            self._slow[rank].add(self._rounds[-1], rank)
        elif change is not None:
            self._begin(rank, change.num_windows)
        if change is None:
            return None
        if change.kind == "changes":
            self._slow[rank].num_rounds = change.num_windows
        event = SlownessEvent(change.kind, self._described(rank, change.after), change.before)
        if change.kind == "ends":
            del self._slow[rank]
        return event

    def _begin(self, rank: int, num_windows: int) -> None:
        begun = list(self._rounds)[-num_windows:]
        self._slow[rank] = _Slowness(begun[0].first_step)
        for other, level in enumerate(self._levels) if len(self._levels) < _MANY else ():
            if other != rank:
                level.forget_newest(num_windows)
        for past in begun:
            self._slow[rank].add(past, rank)

    def _count_cost(self) -> None:
        """Count what the slowest of the slow ranks has cost, also in rounds before that was told."""
        for rank, slowness in self._slow.items():
            for past in self._rounds:
                if past.first_step >= slowness.since_step and (excess_s := past.excess_s(rank)) > past.counted_s:
                    self._cost_s += excess_s - past.counted_s
                    past.counted_s = excess_s

    def _described(self, rank: int, times: float | None = None) -> SlowRank:
        slowness = self._slow[rank]
        last = list(self._rounds)[-max(min(slowness.num_rounds, _MOST_KEPT), 1) :]
        usual = [usual_window([past.windows[peer] for past in last]) for peer in range(len(self._levels))]
        others = [window for peer, window in enumerate(usual) if peer != rank]
        if times != 1.0:  # a rank that has recovered was slow for the reason told before
            slowness.shares = shares_of_causes(usual[rank], others)
        return SlowRank(
            rank=rank,
            times=self._levels[rank].times if times is None else times,
            since_step=slowness.since_step,
            num_steps=slowness.num_steps,
            seconds=slowness.seconds,
            cause=main_cause(slowness.shares),
            causes=dict(slowness.shares),
            cost_s=slowness.cost_s,
        )
