"""When strategies change for slow ranks, and back: a ski rental of several candidates, of which going back is one.

:class:`~zeroresize.policy.moves.ski_rental.SkiRental` adds up what steps would have been shorter by under each of them.
Every change takes some seconds, one of the optimizer's strategy most, since that has the weights and the optimizer's
state. A change of other strategies moves no bytes, as only the optimizer's strategy holds weights between steps. It
takes time all the same: ranks agree, and a strategy that the model does not have needs process groups, modules and
plans.

Pure: the same speeds give the same decisions on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args

from zeroresize.plan.strategy import Strategy
from zeroresize.policy.moves.least_saving import MIN_SAVING, beyond_noise, is_saving
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.ski_rental import SkiRental
from zeroresize.policy.strategy.stragglers.changed_strategies import (
    Candidate,
    Kind,
    ModelDivision,
    RangeCosts,
    candidates,
    slow_ranks,
)
from zeroresize.utils.value_checks import number

#: Where shares inside the tensor-parallel groups make a step at most so much longer than the best candidate does, as a
#: share of that, nothing else is done: less travels, and no rank is idle.
TOLERANCE = 0.05
#: What a switch takes where nobody has measured it.
_COST = MoveCost(1e-9, 0.05, setup_s=0.2)
#: Kinds of candidates that only move units inside the groups, or undo everything.
_MODEST = ("stay", "shares", "original")


class StrategyCosts(RangeCosts, Protocol):
    """Tell what steps and switches take, as far as is known before."""

    def step_s(self, strategies: Sequence[Strategy], speeds: Sequence[float]) -> float:
        """Return the seconds of a step under these strategies, one of each range, with the switches in it."""

    def switch_bytes(self, before: Sequence[Strategy], after: Sequence[Strategy]) -> float:
        """Return the bytes that the busiest rank sends or receives when training goes on under others.

        These are weights and the optimizer's state, where the optimizer's strategy is another; 0 otherwise.
        """


@dataclass(frozen=True)
class StrategyProposal:
    """Describe what a candidate would bring.

    Attributes:
        candidate: what would be in force.
        step_s: seconds of a step then.
        saving_s: by how much steps would be shorter than as it is; negative where they would be longer.
        switch_s: seconds of the switch, one way.
        owed_s: what it has cost not to have it in force.
    """

    candidate: Candidate
    step_s: float
    saving_s: float
    switch_s: float
    owed_s: float


@dataclass(frozen=True)
class StragglerState:
    """Hold what a decision goes on from.

    Attributes:
        in_force: strategies of each range.
        rental: what is owed for others.
        owed_for: these, by key.
        cost: of a switch, as far as is known.
    """

    in_force: tuple[Strategy, ...]
    rental: SkiRental
    owed_for: dict[str, tuple[Strategy, ...]]
    cost: MoveCost


class StragglerDecision:
    """Decide, step by step, which strategies are in force.

    Args:
        original: of each range, as the caller wants it while all ranks are equally fast.
        model: how it can be divided.
        costs: tells what steps take.
        tolerance: see :data:`TOLERANCE`.
        min_saving: see :data:`~zeroresize.policy.moves.least_saving.MIN_SAVING`.
        cost: of a switch, until one was made; a strategy that the model does not have is one setup.
        kinds: of candidates that may be chosen, beside to stay and to go back.

    Attributes:
        original, in_force: of each range.
        cost: of a switch, as far as is known.

    Raises:
        ValueError: for values that are not allowed.
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
        kinds: Collection[Kind] = get_args(Kind),
    ) -> None:
        for name, value in (("tolerance", tolerance), ("min_saving", min_saving)):
            number(name, value, least=0.0, below=1.0)
        self.original = self.in_force = tuple(original)
        self.cost = cost
        self._model, self._costs, self._kinds = model, costs, {"stay", "original", *kinds}
        self._tolerance, self._min_saving = tolerance, min_saving
        self._rental = SkiRental()
        self._strategies_of: dict[str, tuple[Strategy, ...]] = {}  # of what is owed, as last offered
        self._last: tuple[Any, tuple[StrategyProposal, ...]] | None = None

    def what_if(self, speeds: Sequence[float]) -> tuple[StrategyProposal, ...]:
        """Return what each candidate would bring at these speeds.

        The first is to stay; the others are sorted by their steps' seconds.
        """
        key = tuple(speeds), self.in_force, self.cost
        if self._last is None or self._last[0] != key:  # speeds mostly stay, and to look at all candidates takes long
            offered = candidates(self.original, self.in_force, speeds, self._model, self._costs)
            now_s = self._costs.step_s(self.in_force, speeds)
            proposals = [
                self._propose(candidate, speeds, now_s) for candidate in offered if candidate.kind in self._kinds
            ]
            stay, *others = proposals
            self._last = key, (stay, *sorted(others, key=lambda one: one.step_s))
        return tuple(
            replace(proposal, owed_s=self._rental.owed_for(proposal.candidate.key)) for proposal in self._last[1]
        )

    def update(self, speeds: Sequence[float], num_steps: int = 1) -> StrategyProposal | None:
        """Take steps made at these speeds and return what is to be put in force now, None where everything stays.

        Whoever is given one calls :meth:`made`, or :meth:`refuse`. Nothing is worked out where there is nothing to do:
        no rank is slow, the original strategies are in force, and nothing is owed.
        """
        self._rental.next_update()
        if self.is_settled and not slow_ranks(self.original, speeds):
            return None
        self._add_up(self.what_if(speeds), speeds, num_steps)
        proposals = self.what_if(speeds)
        best_s = min(one.step_s for one in proposals)
        # By what is left to gain: what is worth it is decided among those only that may be chosen.
        suffices = any(
            proposal.candidate.kind == "shares" or (proposal.candidate.kind == "stay" and self._is_modest)
            for proposal in proposals
            if proposal.step_s <= (1.0 + self._tolerance) * best_s
        )
        due = [
            proposal
            for proposal in proposals[1:]
            if (proposal.candidate.kind in _MODEST or not suffices)
            and is_saving(proposal.saving_s, proposals[0].step_s, self._min_saving)
            and self._rental.is_due(proposal.candidate.key, 2.0 * proposal.switch_s)
        ]
        return due[0] if due else None

    def made(self, proposal: StrategyProposal, seconds: float | None = None) -> None:
        """Put the proposal's candidate in force from now on; the switch took so many seconds, if that is known."""
        before, self.in_force = self.in_force, proposal.candidate.strategies
        if seconds is not None:
            self.learn(before, self.in_force, seconds)
        self._rental.settle(proposal.candidate.key)
        self._rental.succeed()

    def learn(self, before: Sequence[Strategy], after: Sequence[Strategy], seconds: float) -> None:
        """Take how long a switch took that was made."""
        num_new = self._num_new(before, after)
        self.cost = self.cost.learned(self._costs.switch_bytes(before, after), seconds, num_new)

    def refuse(self) -> None:
        """Note that the switch could not be made: nothing is tried for a while."""
        self._rental.refuse()

    def look_again(self) -> None:
        """Forget the last proposals, as what steps take has changed for other reasons than speeds."""
        self._last = None

    @property
    def state(self) -> StragglerState:
        """Return what a saved run needs, the same on every rank; the original strategies are the caller's."""
        return StragglerState(self.in_force, self._rental, self._strategies_of, self.cost)

    def go_on_from(self, state: StragglerState) -> None:
        """Go on from :attr:`state`; the strategies in force stay.

        Where these are others than the state's, nothing is owed for changing those.
        """
        self._rental, self._strategies_of, self.cost = state.rental, state.owed_for, state.cost
        if state.in_force != self.in_force:
            self._rental.settle()
            self._strategies_of = {}
        self._last = None

    @property
    def is_settled(self) -> bool:
        """Return whether the original strategies are in force, and nothing is owed for others."""
        return self.in_force == self.original and not self._rental.owed_s

    @property
    def _is_modest(self) -> bool:
        """Whether at most shares differ from the original."""
        return all(
            (now.degrees, now.ranks, now.boundaries) == (then.degrees, then.ranks, then.boundaries)
            for now, then in zip(self.in_force, self.original, strict=True)
        )

    def _propose(self, candidate: Candidate, speeds: Sequence[float], now_s: float) -> StrategyProposal:
        step_s = self._costs.step_s(candidate.strategies, speeds)
        return StrategyProposal(candidate, step_s, now_s - step_s, self._switch_s(candidate.strategies), 0.0)

    def _switch_s(self, after: tuple[Strategy, ...]) -> float:
        if after == self.in_force:
            return 0.0
        return self.cost.seconds(self._costs.switch_bytes(self.in_force, after), self._num_new(self.in_force, after))

    def _num_new(self, before: Sequence[Strategy], after: Sequence[Strategy]) -> int:
        """Strategies that the model does not have: it has the original ones and those in force before."""
        return len({*after} - {*self.original, *before})

    def _add_up(self, proposals: Sequence[StrategyProposal], speeds: Sequence[float], num_steps: int) -> None:
        now_s = proposals[0].step_s
        saved_s = {}
        for proposal in proposals[1:]:
            key = proposal.candidate.key
            self._strategies_of[key] = proposal.candidate.strategies
            saved_s[key] = proposal.saving_s
        for key in self._rental.owed_s.keys() - saved_s.keys():  # not offered now, as it is worse or no rank is slow
            saved_s[key] = now_s - self._costs.step_s(self._strategies_of[key], speeds)
        counted_s = {key: beyond_noise(saving_s, now_s, self._min_saving) for key, saving_s in saved_s.items()}
        self._rental.charge(counted_s, num_steps)
        self._strategies_of = {key: self._strategies_of[key] for key in self._rental.owed_s}
