"""When global batches are divided otherwise: a rental of two options, by speed and evenly. Pure, alike on all ranks.

``R`` ranks. Each follows its seconds for a unit of work by a :class:`~zeroresize.policy.speed.meter.SpeedMeter`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from zeroresize.policy.data.division import Division
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import MIN_SAVING, Option, Reason, Rental, Verdict
from zeroresize.policy.slowness.windows import StepWindow
from zeroresize.policy.speed.meter import SpeedMeter

#: Of what a rank takes at least so much is by work, whatever its fixed seconds are said to be.
_LEAST_BY_WORK = 0.1
#: Of so many changes of the division, in which a rank's work differs by this share at least, it is learned how much of
#: what a step takes is not by work: as much as this many times an even share of work takes, at most.
_CHANGES, _LEAST_CHANGE, _MOST_FIXED = 4, 0.1, 2.0
#: It is known to one part in so many of that.
_PARTS = 50
#: So much of all training changes may have lost in all, where the next one is due.
_MAY_LOSE = 0.003
#: Of what even batches are thought to take longer so much is certain: seconds may be fixed of which nobody knows.
_CERTAIN = 0.6
EVEN, BY_SPEED = "evenly", "by speed"


@dataclass(frozen=True)
class RankWindow:
    """Describe what a rank sends of its last steps.

    Attributes:
        window: their usual times, and mean work.
        fixed_s: usual seconds of a step that do not grow with work, as far as known: those of the optimizer.
        excess_s: seconds that these steps took beyond usual ones, in all.
        squares: what the square of a sample's length takes of its length, as this rank's times say; NaN if they do not.
        most: samples that its memory holds.
    """

    window: StepWindow
    fixed_s: float
    excess_s: float
    squares: float
    most: float = math.inf


@dataclass(frozen=True)
class DataProposal:
    """Describe a change of the division, with what it was expected to bring, in seconds."""

    name: str
    division: Division
    step_s: float
    saving_s: float
    verdict: Verdict


@dataclass
class DataState:
    """Hold what decisions go on from."""

    meters: list[SpeedMeter]
    in_force: Division
    cost: MoveCost | None = None  # of a change, once one was seen
    name: str = EVEN
    rental: Rental = field(default_factory=Rental)
    fixed_s: list[float] = field(default_factory=list)
    per_sample: float = 1.0  # units of work
    fixed_work: float = 0.0  # a step takes beside work and optimizer what so many even shares do, on each rank
    contrasts: list[tuple[tuple[float, float, float], ...]] = field(default_factory=list)
    last: tuple[tuple[float, float], ...] = ()  # [R] of the last window: even shares of work, seconds but optimizer's
    before: Division | None = None  # in force until the step ``changed_at``
    changed_at: int = -1
    learned_at: int = -1  # of the last change that is among contrasts
    num_steps: int = 0  # of all windows so far, with the seconds that they took, and that even batches took longer
    trained_s: float = 0.0
    gained_s: float = 0.0


class DataDecision:
    """Decide, window by window, how global batches are divided.

    Args:
        even: the division while all ranks are equally fast, with its limits.
        global_batch: samples of a step.

    Attributes:
        verdict: what the last update came to, and why.
    """

    def __init__(self, even: Division, global_batch: int) -> None:
        self._even, self._global_batch, self._most = even, global_batch, even.most
        num_ranks = len(even.pace_s)
        self.state = DataState([SpeedMeter() for _ in range(num_ranks)], even)
        self.verdict = Verdict(Reason.NOTHING_SAVES)

    def update(self, rows: Sequence[RankWindow], lag: int, *, may_change: bool = True) -> DataProposal | None:
        """Take the windows [R] of a round, and return what is to be put in force now; None where everything stays.

        Args:
            lag: steps that are fetched already, and stay as they are divided now.
            may_change: whether a change is allowed; else what it would be is told in :attr:`verdict` alone.
        """
        if not all(row.window.is_sound and row.window.work > 0.0 for row in rows):
            return None
        self._learn(rows)
        now_s, options = self.step_s(self.state.in_force), self.what_if()
        num_steps = max(row.window.num_steps for row in rows)
        has_lost = self.state.gained_s < -_MAY_LOSE * self.state.trained_s
        offered = []
        for name, (division, _, saving_s) in options.items():
            price_s = math.inf if has_lost and name != EVEN else self._price_s(division, lag)
            is_needed = has_lost and name == EVEN and saving_s > 0.0
            offered.append(Option(name, saving_s, price_s, is_needed=is_needed))
        self.verdict = self.state.rental.decide(offered, now_s, num_steps, self._least_saving)
        option = self.verdict.option
        if not self.verdict.is_due or option is None or not may_change:
            return None
        division, step_s, saving_s = options[option.name]
        return DataProposal(option.name, division, step_s, saving_s, self.verdict)

    def made(self, proposal: DataProposal, from_step: int) -> None:
        """Put a proposal in force from a step on, counted from 0."""
        state = self.state
        state.before, state.changed_at = state.in_force, from_step
        state.in_force, state.name = proposal.division, proposal.name
        state.rental.settle(proposal.name)

    def go_on_from(self, state: DataState) -> Division:
        """Take over a state of as many ranks; return the division that is in force then, within today's limits."""
        most = tuple(map(min, self._even.most, state.in_force.most))
        most = most if sum(most) >= self._global_batch else self._even.most
        in_force = replace(state.in_force, most=most, least=self._even.least)
        self.state = replace(state, in_force=in_force, before=None, changed_at=-1, learned_at=-1)
        return self.state.in_force

    def what_if(self) -> dict[str, tuple[Division, float, float]]:
        """Return the divisions that are not in force: each with the seconds of a step, and what it saves of one."""
        state = self.state
        if not all(meter.is_known for meter in state.meters):
            return {}
        now_s = self.step_s(state.in_force)
        squares = state.in_force.squares
        by_speed, even = (replace(each, squares=squares) for each in (self._measured(self.pace_s), self._even))
        divisions = {BY_SPEED: by_speed, EVEN: even}
        steps_s = {name: self.step_s(division) for name, division in divisions.items()}
        if steps_s[EVEN] <= (1.0 + self._least_saving) * steps_s[BY_SPEED]:
            del divisions[BY_SPEED]  # which is even but for noise
        if state.name == EVEN:
            divisions.pop(EVEN, None)
        return {name: (each, steps_s[name], now_s - steps_s[name]) for name, each in divisions.items()}

    @property
    def pace_s(self) -> tuple[float, ...]:
        """[R] seconds of a unit of work; empty before all ranks were measured."""
        meters = self.state.meters
        return tuple(math.exp(meter.level) for meter in meters) if all(meter.is_known for meter in meters) else ()

    @property
    def even_s(self) -> tuple[float, ...]:
        """[R] seconds of a step of each rank, if batches were divided evenly; empty before all ranks were measured."""
        count = max(self._even.counts(self._global_batch))
        both = zip(self.state.fixed_s, self.pace_s, strict=False)
        return tuple(fixed_s + self.state.per_sample * pace_s * count for fixed_s, pace_s in both)

    @property
    def disturbed_s(self) -> float:
        """Seconds that a change disturbs training for: as seen, and at first those of a step."""
        state = self.state
        return self.step_s(state.in_force) if state.cost is None else state.cost.seconds(0.0)

    def step_s(self, division: Division, pace_s: tuple[float, ...] | None = None) -> float:
        """Return the seconds of a step under a division at these paces, or those that ranks have; NaN before these."""
        paces_s = pace_s or self.pace_s
        if not paces_s:
            return math.nan
        return self._measured(paces_s).step_s(division.counts(self._global_batch))

    def _measured(self, paces_s: Sequence[float]) -> Division:
        """The division by these paces [R] of a unit of work, and by what does not grow with it."""
        per_sample_s = tuple(self.state.per_sample * pace_s for pace_s in paces_s)
        return replace(self._even, fixed_s=tuple(self.state.fixed_s), pace_s=per_sample_s)

    def _learn(self, rows: Sequence[RankWindow]) -> None:
        state = self.state
        squares = [row.squares for row in rows if row.squares >= 0.0]
        if squares:
            state.in_force = replace(state.in_force, squares=median(squares))
        measured = zip(self._most, rows, strict=True)
        self._even = replace(self._even, most=tuple(min(most, row.most) for most, row in measured))
        even_work = math.fsum(row.window.work for row in rows) / len(rows)
        state.per_sample = even_work * len(rows) / self._global_batch
        optimizer_s = [min(row.fixed_s, (1.0 - _LEAST_BY_WORK) * row.window.busy_s) for row in rows]
        shares = [row.window.work / even_work for row in rows]
        worked_s = [row.window.busy_s - fixed_s for row, fixed_s in zip(rows, optimizer_s, strict=True)]
        before = state.fixed_work
        end = max(row.window.end_step for row in rows)
        self._learn_fixed_work(tuple(zip(shares, worked_s, strict=True)), end)
        works = [even_work * (state.fixed_work + share) for share in shares]
        pace_s = tuple(each_s / work for each_s, work in zip(worked_s, works, strict=True))
        for each_s, share, meter in zip(pace_s, shares, state.meters, strict=True):
            meter.pass_interval()
            meter.take([math.log(each_s)], math.log((before + share) / (state.fixed_work + share)))
        fixed_work = even_work * state.fixed_work
        state.fixed_s = [
            fixed_s + fixed_work * each_s for fixed_s, each_s in zip(optimizer_s, self.pace_s, strict=True)
        ]
        self._account(rows, pace_s)

    def _learn_fixed_work(self, now: tuple[tuple[float, float], ...], end: int) -> None:
        """Learn from ranks whose work changed, and not their speed, how many seconds stayed: as many for all, in work.

        Only once from each change of the division: of what samples of other lengths make of it most is noise.

        A rank of work w takes (fixed + w) times a unit's seconds. Work is counted in even shares, so that it is no
        change where units become others, as squares of lengths are learned. By the last changes that fixed work is
        taken which comes nearest to the logarithms of how seconds changed, in the sum of all ranks: a rank that grew
        slow in just that change decides nothing.
        """
        state, last = self.state, self.state.last or now
        state.last = now
        pairs = tuple(
            (work, works, math.log(after_s / before_s))
            for (work, before_s), (works, after_s) in zip(last, now, strict=True)
        )
        change = max(abs(math.log(works / work)) for work, works, _ in pairs)
        if change < _LEAST_CHANGE or not state.learned_at < state.changed_at < end:
            return
        state.learned_at = state.changed_at
        state.contrasts = [*state.contrasts, pairs][-_CHANGES:]
        known = [each for contrast in state.contrasts for each in contrast]

        def miss(fixed: float) -> float:
            return math.fsum(abs(math.log((fixed + after) / (fixed + before)) - seen) for before, after, seen in known)

        state.fixed_work = min((_MOST_FIXED * part / _PARTS for part in range(_PARTS + 1)), key=miss)

    def _account(self, rows: Sequence[RankWindow], pace_s: tuple[float, ...]) -> None:
        """Add up what steps have gained on even batches, less what a change disturbed, and learn the latter."""
        state, since, end = self.state, self.state.num_steps, max(row.window.end_step for row in rows)
        changed = min(max(state.changed_at, since), end)
        even_s, state.num_steps = self.step_s(self._even, pace_s), end
        for division, num_steps in ((state.before or state.in_force, changed - since), (state.in_force, end - changed)):
            step_s = self.step_s(division, pace_s)
            state.trained_s += num_steps * step_s
            gained_s = even_s - step_s
            state.gained_s += num_steps * gained_s * (_CERTAIN if gained_s > 0.0 else 1.0)
        if since <= state.changed_at < end:
            disturbed_s = max(row.excess_s for row in rows)
            state.cost = (state.cost or MoveCost(0.0, 0.0)).learned(0.0, disturbed_s)
            state.gained_s -= disturbed_s

    def _price_s(self, division: Division, lag: int) -> float:
        """Seconds of a change and of the one that undoes it: both come late by what is fetched already."""
        usual_s, fixed_s = median(self.pace_s) * self.state.per_sample, median(self.state.fixed_s)
        alike = replace(self._even, fixed_s=(fixed_s,) * len(self.pace_s), pace_s=(usual_s,) * len(self.pace_s))
        counts = [each.counts(self._global_batch) for each in (division, self.state.in_force)]
        lost_s = abs(alike.step_s(counts[0]) - alike.step_s(counts[1]))
        return 2.0 * self.disturbed_s + lag * lost_s

    @property
    def _least_saving(self) -> float:
        """Share of a step that is noise: of the rank of which least is known, two standard deviations."""
        return max(MIN_SAVING / 2.0, 2.0 * math.sqrt(max(meter.variance for meter in self.state.meters)))
