"""Which ranks of a group are slow: every rank's windows in, what has begun, changed and ended out; alike on all ranks.

``R`` ranks of the group. A *round* is one window of every rank.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from zeroresize.policy import FEW
from zeroresize.policy.slowness.past import Past, Times
from zeroresize.policy.slowness.rank_level import MOST_KEPT, Change, LevelChange, RankLevel
from zeroresize.policy.slowness.surroundings import GpuState, Place, Surroundings
from zeroresize.policy.slowness.windows import Cause, StepWindow, at_work, share_saved, shares_of_causes, usual_window
from zeroresize.policy.speed.noise import ALIKE, USUAL_NOISE
from zeroresize.utils.usual import usual_of_others

#: A rank is slow from this share of a step on, unless the caller says otherwise.
TOLERANCE = USUAL_NOISE


@dataclass(frozen=True)
class SlowRank:
    """Describe a rank that is slow, or was.

    Attributes:
        times: how many times as long as the others it takes, for as much work where that was counted.
        since_step: after so many steps it began.
        num_steps, seconds: for so long it has lasted, until it was last seen.
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
class PastSlowness:
    """Describe what slows most ranks of a group alike, or what they send each other, against their own past.

    Attributes:
        times: how many times as long their steps take as before, as it was told last.
        since_step: after so many steps it began.
        num_steps: for so long it has lasted.
        ranks: whose steps take longer; of a link, who waits longer.
        cause: as of a :class:`SlowRank`, or ``"link"`` where waits are longer though nobody is late.
        place: where they wait longer, of a link; empty else.
    """

    times: float
    since_step: int
    num_steps: int
    ranks: tuple[int, ...]
    cause: Cause
    place: str = ""


@dataclass(frozen=True)
class PastEvent:
    """Describe what has just changed; ``times_before`` is how slow they were, 1 where they were not."""

    kind: Change
    slow: PastSlowness
    times_before: float


Event: TypeAlias = SlownessEvent | PastEvent


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
        ended: who was slow and is not now, by rank, each as it was last: from ``since_step`` on for ``num_steps``.
        past: what slows most ranks alike now, or what they send each other, against their own past.
        past_scores: [R] what a rank took before as a share of what it takes now: 1 is as fast as ever. Empty before
            that is known.
        waits_s: [R] usual seconds of a step by where the rank waits most, such as "collectives of group dp".
        nodes: [R] where each rank runs; empty where that was not asked.
        gpus: [R] the state of each rank's GPU, as far as it is known.
    """

    step: int
    num_ranks: int
    slow: tuple[SlowRank, ...]
    scores: tuple[float, ...]
    busy_s: tuple[float, ...]
    step_s: float
    cost_s: float
    share_saved: float
    ended: tuple[SlowRank, ...] = ()
    past: tuple[PastSlowness, ...] = ()
    past_scores: tuple[float, ...] = ()
    waits_s: tuple[Mapping[str, float], ...] = ()
    nodes: tuple[str, ...] = ()
    gpus: tuple[GpuState | None, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as for JSON."""
        return asdict(self)


@dataclass
class _Round:
    windows: Sequence[StepWindow]
    first_step: int
    num_steps: int
    others_busy_s: list[float]  # [R] what is usual among the others
    ratios: list[float]  # [R] times as long as the others: of as much work, or of its own where that is less
    counted_s: float = 0.0  # of it, what is counted as cost of the group

    def excess_s(self, rank: int) -> float:
        """Seconds of all its steps that a rank takes longer than is usual among the others."""
        return self.num_steps * max(self.windows[rank].busy_s - self.others_busy_s[rank], 0.0)


@dataclass
class _Slowness:
    """A slowness under way; ``num_rounds`` have passed at its present level, ``num_unsure`` since it was last seen."""

    since_step: int
    num_steps: int = 0
    seconds: float = 0.0
    cost_s: float = 0.0
    num_rounds: int = 0
    num_unsure: int = 0
    times: float = 1.0
    causes: dict[Cause, float] = field(default_factory=dict)


class GroupSlowness:
    """Follows every rank of a group, of two at least. The first round, of steps that compile or allocate, is left out.

    Where all ranks counted their work, ``compares_work``, times are those for as much as a rank has on average. Else a
    rank with more work looks slow. A part of a step may be the same for any work, so that less work takes longer for as
    much: only who takes longer as it is, too, is slow.

    Args:
        nodes: [R] where each rank runs, for reports.
    """

    def __init__(self, num_ranks: int, tolerance: float = TOLERANCE, nodes: Sequence[str] = ()) -> None:
        self._levels = [RankLevel(tolerance) for _ in range(num_ranks)]
        self._nodes, self._past = tuple(nodes), Past(max(tolerance, ALIKE))
        self._links = defaultdict[Place, Past](lambda: Past(tolerance))
        self._waiting = defaultdict[Place, set[int]](set)  # who has waited there
        self._lasting: dict[Place | None, PastSlowness] = {}
        self._surroundings: Sequence[Surroundings] = ()
        self._slow: dict[int, _Slowness] = {}
        self._ended: dict[int, SlowRank] = {}
        self._rounds: deque[_Round] = deque(maxlen=MOST_KEPT)
        self._last_step, self._cost_s = 0, 0.0
        self.compares_work = False

    def update(self, windows: Sequence[StepWindow], surroundings: Sequence[Surroundings] = ()) -> list[Event]:
        """Take the windows [R] of a round; return what it changes. Where a rank has measured nothing it is left out."""
        if not all(window.is_sound for window in windows):
            return []
        self._surroundings, as_they_are = surroundings, windows
        work = math.fsum(window.work for window in windows) / len(windows)
        self.compares_work = not math.isnan(work)
        if self.compares_work:
            windows = [at_work(window, work) for window in windows]
        first_step, self._last_step = self._last_step, max(window.end_step for window in windows)
        if first_step == 0:
            return []
        others_busy_s, ratios = _compared(windows)
        ratios = list(map(min, ratios, _compared(as_they_are)[1]))
        self._rounds.append(_Round(windows, first_step, self._last_step - first_step, others_busy_s, ratios))
        events: list[Event] = [event for rank in range(len(windows)) if (event := self._follow(rank)) is not None]
        for rank, slowness in self._slow.items():  # also in rounds before the slowness was told
            for past in self._rounds:
                if past.first_step >= slowness.since_step and (excess_s := past.excess_s(rank)) > past.counted_s:
                    self._cost_s += excess_s - past.counted_s
                    past.counted_s = excess_s
        return events + self._follow_past(as_they_are)

    @property
    def scores(self) -> tuple[float, ...]:
        """[R] the fastest rank's usual time as a share of each rank's own; empty before the first round."""
        busy_s = [window.busy_s for window in self._usual(FEW)]
        return tuple(min(busy_s) / seconds for seconds in busy_s)

    def report(self) -> WatchReport:
        """Return who is slow now, and what that has cost."""
        usual, ended = self._usual(FEW), dict(self._ended)
        now = {rank: self._described(rank, slow.times) for rank, slow in self._slow.items()}
        ended |= {rank: now.pop(rank) for rank in self._slow if self._levels[rank].seems_recovered}
        return WatchReport(
            step=self._last_step,
            num_ranks=len(self._levels),
            slow=tuple(now[rank] for rank in sorted(now)),
            scores=self.scores,
            busy_s=tuple(window.busy_s for window in usual),
            step_s=max((window.step_s for window in usual), default=math.nan),
            cost_s=self._cost_s,
            share_saved=share_saved(usual) if usual else math.nan,
            ended=tuple(ended[rank] for rank in sorted(ended.keys() - now)),
            past=tuple(self._lasting.values()),
            past_scores=tuple((1.0 / self._past.ratios).tolist()),
            waits_s=tuple({str(place): s for place, s in each.waits_s.items()} for each in self._surroundings),
            nodes=self._nodes,
            gpus=tuple(each.gpu for each in self._surroundings),
        )

    def _usual(self, num_rounds: int) -> list[StepWindow]:
        """[R] the usual windows of the last rounds; empty before there was any."""
        last = list(self._rounds)[-num_rounds:]
        return [usual_window([past.windows[rank] for past in last]) for rank in range(len(self._levels)) if last]

    def _follow(self, rank: int) -> SlownessEvent | None:
        newest = self._rounds[-1]
        change = self._levels[rank].update(math.log(newest.ratios[rank]))
        if rank not in self._slow:
            if change is None:
                return None
            first = list(self._rounds)[-change.num_windows]
            self._slow[rank] = _Slowness(first.first_step, num_unsure=change.num_windows - 1)
        slowness, level = self._slow[rank], self._levels[rank]
        slowness.num_unsure += 1
        if not level.seems_recovered:  # what the rank takes once it has recovered tells nothing of why it was slow
            for past in list(self._rounds)[-slowness.num_unsure :]:
                slowness.num_steps += past.num_steps
                slowness.seconds += past.num_steps * max(window.step_s for window in past.windows)
                slowness.cost_s += past.excess_s(rank)
                slowness.num_rounds += 1
            if change is not None and change.kind == "changes":
                slowness.num_rounds = change.num_windows
            others = self._usual(slowness.num_rounds)
            slowness.causes = shares_of_causes(others.pop(rank), others)
            slowness.num_unsure, slowness.times = 0, level.times
        if change is None:
            return None
        event = SlownessEvent(change.kind, self._described(rank, change.after), change.before)
        if change.kind == "ends":
            self._ended[rank] = self._described(rank, change.before)
            del self._slow[rank]
        return event

    def _described(self, rank: int, times: float) -> SlowRank:
        slow = self._slow[rank]
        cause: Cause = next(iter(slow.causes), "compute")
        causes = dict(slow.causes)
        return SlowRank(rank, times, slow.since_step, slow.num_steps, slow.seconds, cause, causes, slow.cost_s)

    def _follow_past(self, windows: Sequence[StepWindow]) -> list[PastEvent]:
        """Compare most ranks with their own past, and what they send each other, where nobody is late."""
        step_s = max(window.step_s for window in windows)
        times = np.array([(window.busy_s, step_s, window.loader_s, window.products_s) for window in windows])
        works = np.array([(window.work, window.inputs) for window in windows])
        change = self._past.update(times, works, are_slow=tuple(self._slow))
        if self._past.times is None:
            self._links.clear()
            self._lasting.clear()
            return []
        usual_s, level = self._past.times.mean(axis=0), self._past.level
        events = self._past_event(None, level, change, *(self._causes_of(times) if level.is_slow else ((), "compute")))
        if level.seems_slow or any(each.seems_slow for each in self._levels):
            return events
        waits_s = [dict(each.waits_s) for each in self._surroundings]
        for rank, waits in enumerate(waits_s):
            for place in waits:
                self._waiting[place].add(rank)
        mean_works = works.mean(axis=0, keepdims=True)
        for place, ranks in self._waiting.items():  # who comes last waits for what is sent alone
            sending_s = min(waits_s[rank].get(place, 0.0) for rank in ranks)
            link = self._links[place]
            change = link.update(np.array([[sending_s]]), mean_works, usual_s[0])
            events += self._past_event(place, link.level, change, tuple(sorted(ranks)), "link")
        return events

    def _causes_of(self, times: Times) -> tuple[tuple[int, ...], Cause]:
        """Return whose busy time is longer than it was, and which part of it is most."""
        half, before = math.sqrt(self._past.level.times), self._past.times
        ranks = tuple(np.flatnonzero(self._past.ratios > half).tolist())
        usual = [StepWindow(0, 1, *parts.mean(axis=0).tolist()) for parts in (times, before) if parts is not None]
        return ranks, next(iter(shares_of_causes(usual[0], usual[1:])), "compute")

    def _past_event(
        self, place: Place | None, level: RankLevel, change: LevelChange | None, ranks: tuple[int, ...], cause: Cause
    ) -> list[PastEvent]:
        """Note what lasts there; return what has just changed."""
        newest, before = self._rounds[-1], self._lasting.pop(place, None)
        if before is None and change is None:
            return []
        if change is not None and change.kind == "begins":
            first = list(self._rounds)[-change.num_windows]
            num_steps = self._last_step - first.first_step
            before = PastSlowness(change.after, first.first_step, num_steps, ranks, cause, str(place or ""))
        elif before is not None and not level.seems_recovered:
            times, num_steps = before.times if change is None else change.after, before.num_steps + newest.num_steps
            before = replace(before, times=times, num_steps=num_steps, ranks=ranks, cause=cause)
        assert before is not None
        if level.is_slow:
            self._lasting[place] = before
        return [] if change is None else [PastEvent(change.kind, before, change.before)]


def _compared(windows: Sequence[StepWindow]) -> tuple[list[float], list[float]]:
    """Return [R] the busy time that is usual among the others, and how many times as long each rank takes."""
    busy_s = [window.busy_s for window in windows]
    others_busy_s = usual_of_others(busy_s)
    return others_busy_s, [seconds / others for seconds, others in zip(busy_s, others_busy_s, strict=True)]
