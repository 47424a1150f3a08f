"""Which ranks of a group are slow: every rank's windows in, what has begun, changed and ended out; alike on all ranks.

``R`` ranks of the group. A *round* is one window of every rank.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from zeroresize.policy import FEW
from zeroresize.policy.slowness.past import Past, Rows
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
class PastSlowness:
    """Describe what slows most ranks of a group alike, or what they send each other, against their own past.

    Attributes:
        times: how many times as long their steps take as before.
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
class SlownessEvent:
    """Describe what has just changed; ``times_before`` is how slow that was, 1 where it was not."""

    kind: Change
    slow: SlowRank | PastSlowness
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

    slow: SlowRank
    num_unsure: int
    num_rounds: int = 0


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
        self._nodes = tuple(nodes)
        self._past = Past(max(tolerance, ALIKE))
        self._links = defaultdict[str, Past](lambda: Past(tolerance))
        self._lasting: dict[str, PastSlowness] = {}
        self._surroundings: Sequence[Surroundings] = ()
        self._slow: dict[int, _Slowness] = {}
        self._ended: dict[int, SlowRank] = {}
        self._rounds: deque[_Round] = deque(maxlen=MOST_KEPT)
        self._last_step, self._cost_s = 0, 0.0
        self.compares_work = False

    def update(self, windows: Sequence[StepWindow], surroundings: Sequence[Surroundings] = ()) -> list[SlownessEvent]:
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
        events = [event for rank in range(len(windows)) if (event := self._follow(rank)) is not None]
        for rank, slowness in self._slow.items():  # also in rounds before the slowness was told
            for past in self._rounds:
                if past.first_step >= slowness.slow.since_step and (excess_s := past.excess_s(rank)) > past.counted_s:
                    self._cost_s += excess_s - past.counted_s
                    past.counted_s = excess_s
        return events + self._follow_past(as_they_are)

    def report(self) -> WatchReport:
        """Return who is slow now, and what that has cost."""
        usual, ended = self._usual(FEW), dict(self._ended)
        busy_s = tuple(window.busy_s for window in usual)
        now = {rank: slowness.slow for rank, slowness in self._slow.items()}
        ended |= {rank: now.pop(rank) for rank in self._slow if self._levels[rank].seems_recovered}
        return WatchReport(
            step=self._last_step,
            num_ranks=len(self._levels),
            slow=tuple(now[rank] for rank in sorted(now)),
            scores=tuple(min(busy_s) / seconds for seconds in busy_s),
            busy_s=busy_s,
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
        level = self._levels[rank]
        change = level.update(math.log(self._rounds[-1].ratios[rank]))
        if rank not in self._slow:
            if change is None:
                return None
            slow = SlowRank(rank, 1.0, self._first_step(change), 0, 0.0, "compute", {}, 0.0)
            self._slow[rank] = _Slowness(slow, change.num_windows - 1)
        slowness = self._slow[rank]
        slowness.num_unsure += 1
        if not level.seems_recovered:  # what the rank takes once it has recovered tells nothing of why it was slow
            rounds, slow = list(self._rounds)[-slowness.num_unsure :], slowness.slow
            slowness.num_rounds += len(rounds)
            if change is not None and change.kind == "changes":
                slowness.num_rounds = change.num_windows
            others = self._usual(slowness.num_rounds)
            causes = shares_of_causes(others.pop(rank), others)
            seconds = sum(past.num_steps * max(window.step_s for window in past.windows) for past in rounds)
            slowness.num_unsure, slowness.slow = (
                0,
                replace(
                    slow,
                    times=level.times,
                    num_steps=slow.num_steps + sum(past.num_steps for past in rounds),
                    seconds=slow.seconds + seconds,
                    cause=next(iter(causes), "compute"),
                    causes=causes,
                    cost_s=slow.cost_s + sum(past.excess_s(rank) for past in rounds),
                ),
            )
        if change is None:
            return None
        if change.kind == "ends":
            self._ended[rank] = self._slow.pop(rank).slow
        return SlownessEvent(change.kind, slowness.slow, change.before)

    def _first_step(self, change: LevelChange) -> int:
        """After how many steps what has just begun did so."""
        return self._rounds[-change.num_windows].first_step

    def _follow_past(self, windows: Sequence[StepWindow]) -> list[SlownessEvent]:
        """Compare most ranks with their own past, and what they send each other, where nobody is late."""
        rows, past = _rows(windows), self._past
        change = past.update(rows, self._slow)
        if not len(past.ratios):
            self._links.clear()
            self._lasting.clear()
            return []
        ranks, cause = self._who_and_why() if past.level.is_slow else ((), "compute")
        events = self._event_of_past(past.level, change, ranks, cause)
        if past.level.seems_slow or any(level.seems_slow for level in self._levels):
            return events
        usual_s, (_, step_s, *_, work, inputs) = past.usual[:, 0].mean(), rows.mean(axis=0)
        for place, sending_s in self._sending_s().items():
            link, most_s = self._links[place], usual_s + max(sending_s.values())
            change = link.update(np.array([[most_s, step_s, work, inputs]]))
            least_s = min(most_s, link.usual[0, 0] * math.sqrt(link.level.times)) - usual_s
            slower = sorted({rank for ranks, seconds in sending_s.items() if seconds >= least_s for rank in ranks})
            events += self._event_of_past(link.level, change, tuple(slower), "link", place)
        return events

    def _who_and_why(self) -> tuple[tuple[int, ...], Cause]:
        """Return whose busy time is longer than it was, and which part of it is most."""
        ratios, usual = self._past.ratios, (_rows(self._usual(FEW)), self._past.usual)
        ranks = np.flatnonzero(ratios >= min(math.sqrt(self._past.level.times), float(np.nanmedian(ratios))))
        now, before = (StepWindow(0, 1, *each.mean(axis=0)[:-2].tolist()) for each in usual)
        return tuple(ranks.tolist()), next(iter(shares_of_causes(now, [before])), "compute")

    def _sending_s(self) -> dict[str, dict[tuple[int, ...], float]]:
        """Return the least wait of each group, by name and ranks: who comes last waits for what is sent alone.

        Unless all ranks of a group tell what they wait, the least is not known.
        """
        waits_s = defaultdict[Place, dict[int, float]](dict)
        for rank, each in enumerate(self._surroundings):
            for place, seconds in each.waits_s.items():
                waits_s[place][rank] = seconds
        sending_s = defaultdict[str, dict[tuple[int, ...], float]](dict)
        for place, of_ranks in waits_s.items():
            if len(of_ranks) == place.size > 1:
                sending_s[str(place)][tuple(of_ranks)] = min(of_ranks.values())
        return sending_s

    def _event_of_past(
        self, level: RankLevel, change: LevelChange | None, ranks: tuple[int, ...], cause: Cause, place: str = ""
    ) -> list[SlownessEvent]:
        """Note what lasts there; return what has just changed."""
        slow, num_steps = self._lasting.pop(place, None), self._rounds[-1].num_steps
        if change is not None and change.kind == "begins":
            first_step = self._first_step(change)
            slow, num_steps = PastSlowness(1.0, first_step, 0, ranks, cause, place), self._last_step - first_step
        if slow is None:
            return []
        if not level.seems_recovered:
            num_steps += slow.num_steps
            slow = replace(slow, times=level.times, num_steps=num_steps, ranks=ranks, cause=cause)
        if level.is_slow:
            self._lasting[place] = slow
        return [] if change is None else [SlownessEvent(change.kind, slow, change.before)]


def _rows(windows: Sequence[StepWindow]) -> Rows:
    """[R, 6] the numbers of windows that a past follows, with two parts of the busy time."""
    step_s = max(window.step_s for window in windows)
    return np.array([(w.busy_s, step_s, w.loader_s, w.products_s, w.work, w.inputs) for w in windows])


def _compared(windows: Sequence[StepWindow]) -> tuple[list[float], list[float]]:
    """Return [R] the busy time that is usual among the others, and how many times as long each rank takes."""
    busy_s = [window.busy_s for window in windows]
    others_busy_s = usual_of_others(busy_s)
    return others_busy_s, [seconds / others for seconds, others in zip(busy_s, others_busy_s, strict=True)]
