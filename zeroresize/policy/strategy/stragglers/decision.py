"""When strategies change for slow ranks, and back: a rental of several candidates, of which going back is one.

Every change takes some seconds, one of the optimizer's strategy most, since that has the weights and the optimizer's
state. A change of other strategies moves no bytes, as only the optimizer's strategy holds weights between steps. It
takes time all the same: ranks agree, and a strategy that the model does not have needs process groups, modules and
plans. Where steps are planned ahead, to plan them anew is the cheapest candidate: it moves nothing, and what other
candidates save beyond it is what they are owed, so samples and layers never answer the same slowness twice.

Pure: the same speeds give the same decisions on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import MIN_SAVING, Option, Reason, Rental, Verdict
from zeroresize.policy.strategy.stragglers.candidates import (
    Candidate,
    ModelDivision,
    StrategyCosts,
    candidates,
    slow_ranks,
)

#: Where shares inside the tensor-parallel groups make a step at most so much longer than the best candidate does, as a
#: share of that, nothing else is done: less travels, and no rank is idle.
TOLERANCE = 0.05
#: What a switch takes where nobody has measured it.
_COST = MoveCost(setup_s=0.2)
#: What planning anew takes before it was seen: training waits for the first plan.
REPLAN_COST = MoveCost(0.0, _COST.setup_s)
#: Kinds of candidates that only move units inside the groups, or nothing, or undo everything.
_MODEST = ("stay", "replan", "shares", "original")


@dataclass(frozen=True)
class StrategyProposal:
    """Describe what a candidate would bring, in seconds."""

    candidate: Candidate
    step_s: float
    saving_s: float  # by how much steps would be shorter than as it is; negative where they would be longer
    switch_s: float  # one way
    owed_s: float = 0.0  # what it has cost not to have it in force


@dataclass
class StragglerState:
    """Hold what a decision goes on from: each range's strategy, what a switch costs, and what is owed for others."""

    in_force: tuple[Strategy, ...]
    cost: MoveCost
    rental: Rental = field(default_factory=Rental)
    owed_for: dict[str, tuple[Strategy, ...]] = field(default_factory=dict)


class StragglerDecision:
    """Decide, step by step, which strategies are in force.

    Args:
        original: of each range, as the caller wants it while all ranks are equally fast.
        tolerance, min_saving: see :data:`TOLERANCE` and :data:`~zeroresize.policy.moves.rental.MIN_SAVING`.
        cost: of a switch, until one was made; a strategy that the model does not have is one setup.
        as_planned_s: tells the seconds of a step by the plans that there are, where steps are planned ahead for the
            speeds that ranks had, and can be planned anew. Every change pays for that, too.

    Attributes:
        verdict: what the last update came to, and why.
    """

    def __init__(
        self,
        original: Sequence[Strategy],
        model: ModelDivision,
        costs: StrategyCosts,
        *,
        tolerance: float = TOLERANCE,
        min_saving: float = MIN_SAVING,
        cost: MoveCost = _COST,
        as_planned_s: Callable[[Sequence[Strategy], Sequence[float]], float] | None = None,
    ) -> None:
        self.original = tuple(original)
        self.state = StragglerState(self.original, cost)
        self.verdict = Verdict(Reason.NOTHING_SAVES)
        self._model, self._costs = model, costs
        self._tolerance, self._min_saving = tolerance, min_saving
        self._as_planned_s, self._replan, self._is_planned_evenly = as_planned_s, REPLAN_COST, True
        self._changed: tuple[tuple[Strategy, ...], tuple[Strategy, ...]] = self.original, self.original
        self._last: tuple[object, tuple[StrategyProposal, ...]] | None = None

    @property
    def in_force(self) -> tuple[Strategy, ...]:
        """Return the strategy of each range."""
        return self.state.in_force

    def what_if(self, speeds: Sequence[float]) -> tuple[StrategyProposal, ...]:
        """Return what each candidate would bring at these speeds: to stay, then the others by their steps' seconds."""
        key = tuple(speeds), self.in_force, self.state.cost, self._replan
        if self._last is None or self._last[0] != key:  # speeds mostly stay, and to look at all candidates takes long
            stay, *others = candidates(self.original, self.in_force, speeds, self._model, self._costs)
            now_s = (self._as_planned_s or self._costs.step_s)(self.in_force, speeds)
            proposals = [self._propose(candidate, speeds, now_s) for candidate in others]
            if self._as_planned_s is not None:
                proposals.append(self._propose(replace(stay, kind="replan"), speeds, now_s))
            ranked = sorted(proposals, key=lambda proposal: proposal.step_s)
            self._last = key, (StrategyProposal(stay, now_s, 0.0, 0.0), *ranked)
        owed_s = self.state.rental.owed_s
        return tuple(replace(one, owed_s=owed_s.get(one.candidate.key, 0.0)) for one in self._last[1])

    def update(self, speeds: Sequence[float]) -> StrategyProposal | None:
        """Take a step made at these speeds and return what is to be put in force now, None where everything stays.

        Whoever is given a proposal calls :meth:`made`, or :meth:`refuse`. Nothing is worked out where there is nothing
        to do: no rank is slow, the original strategies are in force and planned for that, and nothing is owed.
        """
        state, is_even = self.state, not slow_ranks(self.original, speeds)
        if is_even and self._is_planned_evenly and self.in_force == self.original and not state.rental.owed_s:
            self.verdict = state.rental.decide((), 0.0, 1)
            return None
        stay, *others = self.what_if(speeds)
        longest_s = (1.0 + self._tolerance) * min(proposal.step_s for proposal in (stay, *others))
        modest = ("shares", "stay", "replan") if self._is_modest else ("shares",)
        suffices = any(each.candidate.kind in modest and each.step_s <= longest_s for each in (stay, *others))
        allowed = {each.candidate.key: each for each in others if each.candidate.kind in _MODEST or not suffices}
        options = [Option(key, proposal.saving_s, 2.0 * proposal.switch_s) for key, proposal in allowed.items()]
        options += [  # owed, and not offered now, as no rank is slow or something else suffices
            Option(key, stay.step_s - self._costs.step_s(strategies, speeds), math.inf)
            for key, strategies in state.owed_for.items()
            if key not in allowed
        ]
        self.verdict = state.rental.decide(options, stay.step_s, 1, self._min_saving)
        state.owed_for |= {key: proposal.candidate.strategies for key, proposal in allowed.items()}
        state.owed_for = {key: state.owed_for[key] for key in state.rental.owed_s}
        if not self.verdict.is_due or self.verdict.option is None:
            return None
        return replace(allowed[self.verdict.option.name], owed_s=self.verdict.owed_s)

    def made(self, proposal: StrategyProposal, speeds: Sequence[float]) -> None:
        """Put the proposal's candidate in force from now on, planned for these speeds."""
        self._changed = self.in_force, proposal.candidate.strategies
        self.state.in_force = proposal.candidate.strategies
        self.state.rental.settle(proposal.candidate.key)
        self.state.rental.succeed()
        self._is_planned_evenly = self._as_planned_s is None or not slow_ranks(self.original, speeds)

    def learn(self, seconds: float) -> None:
        """Take how long the change took that was made last."""
        before, after = self._changed
        if before == after:
            self._replan = self._replan.learned(0.0, seconds)
        else:
            num_bytes = self._costs.switch_bytes(before, after)
            self.state.cost = self.state.cost.learned(num_bytes, seconds, self._num_new(before, after))

    def refuse(self) -> None:
        """Note that the switch could not be made: nothing is tried for a while."""
        self.state.rental.refuse()

    def look_again(self) -> None:
        """Forget the last proposals, as what steps take has changed for other reasons than speeds."""
        self._last = None

    def go_on_from(self, state: StragglerState) -> None:
        """Go on from :attr:`state`; where other strategies are in force they stay, and nothing is owed."""
        is_alike = state.in_force == self.in_force
        self.state = replace(state, in_force=self.in_force)
        if not is_alike:
            self.state.rental.settle()
            self.state.owed_for = {}
        self._last = None

    @property
    def _is_modest(self) -> bool:
        """Whether at most shares differ from the original."""
        return all(
            (now.degrees, now.ranks, now.boundaries) == (then.degrees, then.ranks, then.boundaries)
            for now, then in zip(self.in_force, self.original, strict=True)
        )

    def _propose(self, candidate: Candidate, speeds: Sequence[float], now_s: float) -> StrategyProposal:
        before, after = self.in_force, candidate.strategies
        step_s, switch_s = self._costs.step_s(after, speeds), 0.0
        if after != before:
            num_bytes = self._costs.switch_bytes(before, after)
            switch_s = self.state.cost.seconds(num_bytes, self._num_new(before, after))
        elif self._as_planned_s is not None:
            switch_s = self._replan.seconds(0.0)
        return StrategyProposal(candidate, step_s, now_s - step_s, switch_s)

    def _num_new(self, before: Sequence[Strategy], after: Sequence[Strategy]) -> int:
        """Strategies that the model does not have: it has the original ones and those in force before."""
        return len({*after} - {*self.original, *before})
