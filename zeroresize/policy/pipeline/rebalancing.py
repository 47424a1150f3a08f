"""Whether layers move after a profile: what is learned from profile to profile, and what is owed for not moving.

Pure: every rank is given the same profiles, so all decide alike. A ski rental of one candidate
(:class:`~zeroresize.policy.moves.ski_rental.SkiRental`): layers move when staying has cost, and is about to cost until
the next profile, what the move there and back takes. And an account is kept
(:class:`~zeroresize.policy.pipeline.layer_account.LayerAccount`): where steps have become longer by balancing than they
would have been with the layers where they were at first, moves included, the next move is dearer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.account import Account
from zeroresize.policy.moves.least_saving import is_saving
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.ski_rental import SkiRental
from zeroresize.policy.pipeline.layer_account import LayerAccount
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.layer_means import LayerMeans
from zeroresize.policy.pipeline.message_delays import PipelineMessages
from zeroresize.policy.pipeline.pipeline_load import Floats
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingProposal, RebalancingRule
from zeroresize.policy.pipeline.running_profile import RunningProfile

#: The candidate that is owed for: whatever boundaries are wanted.
_WANTED = "wanted"
#: Layers that have changed by no more than this share since nothing was wanted want nothing now.
_SETTLED = 0.01
#: So many told changes in a row for which nothing moved are measured at once; further ones as measuring allows.
_UNFOLLOWED = 4
#: A move that saves less than this share of what it was to save disappoints: the next one is dearer.
_LEAST_KEPT = 0.5
#: With profiles of every step a move is judged by the mean of so many, or of those until the next move is wanted.
_JUDGED = 8
#: So many profiles of every step are compared with what was known before them.
_ANCHORED = 16
#: Told changes of work that say how often there are some.
_TOLD = 9
#: Of profiles of every step every so many lead to a decision, while nothing is owed: it takes milliseconds.
_DECIDED = 4


class _Settled(NamedTuple):
    """What layers [L, 2] took where they stayed, nothing being wanted."""

    boundaries: tuple[int, ...]
    layer_s: Floats
    rule: RebalancingRule


class _Promise(NamedTuple):
    """Seconds of a step before the last move, and then, and the messages with which they were simulated."""

    before_s: float
    expected_s: float
    messages: PipelineMessages | None


@dataclass(frozen=True)
class RebalancingState:
    """Hold what was learned of layers, devices, moves and costs.

    Attributes:
        costs, cost_of_move, rental: as of :class:`Rebalancing`.
        home, account: of its account.
        is_other_work: whether the next profile is of other work.
        told_steps: steps at which the caller said so.
    """

    costs: LayerCosts | None
    cost_of_move: MoveCost
    rental: SkiRental
    home: tuple[int, ...] | None
    account: Account
    is_other_work: bool
    told_steps: list[int]

    def on(self, num_layers: int, num_stages: int) -> RebalancingState:
        """Return what holds for so many layers and stages; of other stages that is what moves take, and no costs.

        Raises:
            ValueError: for another number of layers.
        """
        if self.costs is not None and {len(self.costs.forward_s), len(self.costs.backward_s)} != {num_layers}:
            raise ValueError(f"it is of {len(self.costs.forward_s)} layers, and the pipeline has {num_layers}")
        if self.costs is None or len(self.costs.speeds) != num_stages:
            return replace(self, costs=None, home=None, account=Account(), is_other_work=False, told_steps=[])
        for boundaries in (self.costs.boundaries, self.home or self.costs.boundaries):
            Partition.of(boundaries, num_layers, num_stages)
        return self


class Rebalancing:
    """Decide, profile by profile, whether layers move.

    Args:
        rule: how wanted boundaries are found.
        cost_of_move: as the links between stages promise.

    Attributes:
        rule: as given.
        interval: steps until the next regular profile; the caller says so when it changes.
        costs: of layers; None before the first profile.
        cost_of_move: as far as is known.
        rental: what the present boundaries have cost since others were wanted, and doubt of what moves save.
        account: what moves have lost against the first boundaries.
        looks_again: whether the next profile is to come at once, as this one wants a move.
        has_learned: whether ``costs`` are of the last profile; not while another one is waited for.
        num_searches: how often the best boundaries were looked for, which is most of what decisions take.
        comes_home: whether the last proposal is to undo what has lost, whatever work layers have.
    """

    def __init__(self, rule: RebalancingRule, cost_of_move: MoveCost) -> None:
        self.rule = rule
        self.interval = rule.num_steps
        self.costs: LayerCosts | None = None
        self.cost_of_move = cost_of_move
        self.rental = SkiRental()
        self.account = LayerAccount()
        self._num_unfollowed = 0  # told changes since the last move
        self.num_searches = 0
        self._settled: _Settled | None = None
        self._profile: PipelineProfile | None = None
        self._running: RunningProfile | None = None
        self._anchor: LayerCosts | None = None
        self._age = 0
        self._num_undecided = 0
        self._steps_s: list[float] = []  # as measured since the last move, with profiles of every step
        self._means: LayerMeans | None = None
        self._trial: RebalancingProposal | None = None  # what one more profile must confirm
        self._is_other_work = False
        self._told_steps: deque[int] = deque(maxlen=_TOLD)  # the last ones
        self.has_learned = self.comes_home = False
        self._promised: _Promise | None = None

    @property
    def follows(self) -> bool:
        """Return whether changes of work that are told are worth being measured at once."""
        return not self.account.is_reversed and self._num_unfollowed <= _UNFOLLOWED

    @property
    def looks_again(self) -> bool:
        """Whether another profile must confirm what the last one wants."""
        return self._trial is not None

    def expect_other_work(self, step: int | None = None) -> None:
        """Expect profiles of layers whose work has changed, by what the caller did to them.

        Whatever needed one more profile is forgotten, as is what the last move was to save. What the boundaries have
        cost is still owed: they did cost that, and where work changes often, moves would never be worth it otherwise.

        Args:
            step: how many steps are over; None where the caller does not count. A caller that has said so before is
                expected to say so again after as many steps as between the last such calls, on average: for so long
                layers stay good where they are.
        """
        self.account.expect_other_work(step)
        self._is_other_work = True
        self._num_unfollowed += 1
        self._means = self._running = self._anchor = self._trial = self._promised = self._settled = None
        self._steps_s.clear()
        if step is not None:
            self._told_steps.append(step)

    def update(
        self, profile: PipelineProfile, step: int | None = None, messages: PipelineMessages | None = None
    ) -> RebalancingProposal | None:
        """Return what is to be carried out after this profile; None where everything stays.

        Of a move that one profile wants, the next one by itself must say that it saves, too: what was chosen for what
        one profile says, noise and interruptions included, is worth less by another one. What is made then is what
        both want. With profiles of every step it is decided on running figures.

        Args:
            step: how many steps are over, as of :meth:`expect_other_work`.
            messages: between the stages, as far as is known by now; None for as before.

        Raises:
            ValueError: if no boundaries fit into the memory limits.
        """
        self.has_learned = self.comes_home = False
        if messages is not None:
            self.rule = replace(self.rule, messages=messages)
        if self.rule.num_steps == 1:
            return self._update_running(profile, step)
        trial, self._trial = self._trial, None
        if trial is not None and trial.before != profile.boundaries:
            trial = None  # somebody else has moved layers since
        if self._means is None:
            self._means = LayerMeans(len(profile.layers))
        speeds = np.ones(len(profile.boundaries) - 1) if self.costs is None else self.costs.speeds
        surprised = self._means.surprised(profile)
        means = self._means.after(profile, speeds)
        costs = self._costs_after(self.costs, means)
        # By what is known of devices now: layers that have moved may just have told.
        measured = LayerCosts.measured(profile, costs.speeds)
        step_s = self._keep_account(profile, measured, step)
        if trial is None:
            if self._is_settled(surprised) and self._is_settled(means):
                now = Partition(means.boundaries)
                proposal = self.rule.propose(costs, means, self.cost_of_move, wanted=now)
                return self._decide(means, costs, proposal, 0.0, step)
            # The first profile of layers is all surprise, and their mean.
            are_alike = np.array_equal(surprised.layer_s, means.layer_s)
            for known in (means,) if are_alike else (surprised, means):
                proposal = self._proposal(self._costs_after(self.costs, known), known)
                if proposal.transfers:
                    self._trial, self._settled = proposal, None
                    return None
            self._settled = _Settled(means.boundaries, means.layer_s, self.rule)
            return self._decide(means, costs, proposal, 0.0, step)
        self._settled = None
        # What was told is followed at once; else what both profiles say is looked for.
        if self._is_other_work:
            proposal = self.rule.propose(costs, means, self.cost_of_move, wanted=Partition(trial.after))
        else:
            proposal = self._proposal(costs, means)
        # By what this profile alone says of layers.
        confirmed_s = step_s - self.rule.simulated(measured, Partition(trial.after)).step_s
        return self._decide(means, costs, proposal, confirmed_s, step)

    def _is_settled(self, profile: PipelineProfile) -> bool:
        """Whether nothing was wanted for layers as these are, so that nothing need be looked for."""
        settled = self._settled
        if settled is None or self.rule.memory_limits is not None:
            return False
        if (settled.boundaries, settled.rule) != (profile.boundaries, self.rule):
            return False
        return bool((np.abs(profile.layer_s - settled.layer_s) <= _SETTLED * settled.layer_s).all())

    def _proposal(self, costs: LayerCosts, profile: PipelineProfile) -> RebalancingProposal:
        """What the best boundaries would change; the rental waits until that pays."""
        self.num_searches += 1
        return self.rule.propose(costs, profile, self.cost_of_move)

    def _update_running(self, profile: PipelineProfile, step: int | None) -> RebalancingProposal | None:
        if self._running is None:
            self._running = RunningProfile(len(profile.layers))
        running = self._running.after(profile)
        self._num_undecided += 1
        if self._promised is not None:
            self._steps_s.append(self.rule.measured_step_s(profile))
        has_nothing_new = self.costs is not None and not self._is_other_work and not self.rental.owed_s
        if running is None or (has_nothing_new and self._num_undecided < _DECIDED):
            return None
        self._num_undecided = 0
        costs = self._costs_by_now(running)
        self._keep_account(running, costs, step)
        proposal = self._proposal(costs, running)
        return self._decide(running, costs, proposal, proposal.saving_s, step)

    def _costs_by_now(self, running: PipelineProfile) -> LayerCosts:
        """Running figures change little at a time, so they are compared with what was known some time ago."""
        if self.costs is None or self._is_other_work:  # then what is known from now on is compared with this
            return self._costs_after(self.costs, running)
        is_of_other = self._anchor is not None and self._anchor.boundaries != self.costs.boundaries
        if self._anchor is None or self._age == _ANCHORED or is_of_other:
            self._anchor, self._age = self.costs, 0
        self._age += 1
        return self._costs_after(self._anchor, running)

    def _costs_after(self, known: LayerCosts | None, profile: PipelineProfile) -> LayerCosts:
        return LayerCosts.first(profile) if known is None else known.after(profile, is_other_work=self._is_other_work)

    def _decide(
        self,
        profile: PipelineProfile,
        costs: LayerCosts,
        proposal: RebalancingProposal,
        confirmed_s: float,
        step: int | None = None,
    ) -> RebalancingProposal | None:
        """The proposal, if it is due; by ``confirmed_s`` seconds it saves of a step at most."""
        saving_s = min(proposal.saving_s, confirmed_s)
        is_wanted = bool(proposal.transfers) and is_saving(saving_s, proposal.step_s, self.rule.min_saving)
        self.costs, self._profile, self._is_other_work = costs, profile, False
        self.has_learned = True
        if self.rule.num_steps > 1:
            self._judge(self._step_s_as_promised(profile, costs, proposal))
        elif self._steps_s and (is_wanted or len(self._steps_s) >= _JUDGED):
            self._judge(fmean(self._steps_s))
        num_steps = self._steps_until_told(step)
        good_for = min(self.interval, num_steps) if self.account.is_reversed else self.interval
        self.rental.charge({_WANTED: saving_s} if is_wanted else {}, good_for)
        mistrust_s = self.account.mistrust_s(proposal.before, proposal.after, proposal.price_s / 2.0)
        # Where the program has told of the work to come, the move back need not be paid for.
        one_way_s = self.rental.doubt * proposal.price_s / 2.0 + mistrust_s
        pays = not self.rental.pause and num_steps < math.inf and saving_s * num_steps >= one_way_s
        is_due = is_wanted and (self.rental.is_due(_WANTED, proposal.price_s + mistrust_s) or pays)
        if not (is_due or (proposal.is_needed and proposal.transfers)):
            may_be_mended = is_wanted and self.account.trusts(proposal.before, proposal.after)
            homecoming = self._homecoming(profile, costs, may_be_mended=may_be_mended)
            if homecoming is None:
                return None
            proposal, saving_s, self.comes_home = homecoming, homecoming.saving_s, True
        self.rental.settle()
        self.account.move(proposal.before, proposal.saving_s, proposal.expected_step_s, step)
        self._steps_s.clear()
        promise = _Promise(proposal.step_s, proposal.step_s - saving_s, self.rule.messages)
        self._promised = None if proposal.is_needed else promise
        return proposal

    def _step_s_as_promised(self, profile: PipelineProfile, costs: LayerCosts, proposal: RebalancingProposal) -> float:
        """Seconds of a step by now with the messages of the last promise: networks that have changed judge no move."""
        if self._promised is None or self._promised.messages == self.rule.messages:
            return proposal.step_s
        rule = replace(self.rule, messages=self._promised.messages)
        return rule.simulated(costs, Partition(profile.boundaries)).step_s

    def _steps_until_told(self, step: int | None) -> float:
        """Steps for which a move would be good until the caller is expected to change the work again.

        Infinite where nobody knows. A change that is overdue is expected after as long again.
        """
        if step is None or len(self._told_steps) < 2:
            return math.inf
        first, last = self._told_steps[0], self._told_steps[-1]
        usual = (last - first) / (len(self._told_steps) - 1)
        return max(last + usual - step - 1.0, 0.0) if step < last + usual else float(step - last)

    def _homecoming(
        self, profile: PipelineProfile, costs: LayerCosts, *, may_be_mended: bool
    ) -> RebalancingProposal | None:
        """Where more is lost than may be, and layers have lost the way home where they are: that way.

        Where another move may mend it, it must be the way there and back.
        """
        if self.account.home in (None, profile.boundaries) or not self.account.calls_home(0.0) or self.rental.pause:
            return None
        home = Partition(self.account.home)
        if not self.rule.load(costs, profile).fits(home):
            return None
        proposal = self.rule.propose(costs, profile, self.cost_of_move, wanted=home)
        least_s = proposal.price_s * (1.0 if may_be_mended else 0.5)
        return proposal if proposal.transfers and self.account.calls_home(least_s) else None

    def _keep_account(self, profile: PipelineProfile, costs: LayerCosts, step: int | None) -> float:
        """Return the seconds of a step as it is."""
        account = self.account
        if account.home is None:
            account.home = profile.boundaries
        now_s = home_s = self.rule.simulated(costs, Partition(profile.boundaries)).step_s
        if account.home != profile.boundaries:
            home_s = self.rule.simulated(costs, Partition(account.home)).step_s
        account.keep(profile.boundaries, now_s, home_s, account.num_steps + self.interval if step is None else step)
        return now_s

    def propose(self, boundaries: tuple[int, ...]) -> RebalancingProposal | None:
        """Return what would change from these boundaries on, by the last profile; None before there was one.

        Raises:
            ValueError: as :meth:`update`.
        """
        if self.costs is None or self._profile is None:
            return None
        return self._proposal(self.costs, replace(self._profile, boundaries=boundaries))

    def learn(self, num_bytes: float, seconds: float) -> None:
        """Learn from a move that has been made; bytes are those of the rank that sent or received most."""
        self.cost_of_move = self.cost_of_move.learned(num_bytes, seconds)
        self.account.pay(seconds)
        self._num_unfollowed = 0

    def refuse(self) -> None:
        """Note that the last move could not be made."""
        self.drop()
        self.rental.judge(is_kept=False)

    def drop(self) -> None:
        """Note that the last move was not made, as its profile no longer holds."""
        self._promised = None

    def continue_on(self, stages: Sequence[int], boundaries: tuple[int, ...]) -> None:
        """Continue on these stages only, with the layers between ``boundaries`` [S + 1] of them."""
        if self.costs is not None:
            self.costs = self.costs.on_stages(stages, boundaries)
        if self.rule.memory_limits is not None:
            self.rule = replace(self.rule, memory_limits=tuple(self.rule.memory_limits[stage] for stage in stages))
        self.rental.settle()
        self.account = LayerAccount()
        self._profile = self._trial = self._promised = self._means = self._running = self._anchor = self._settled = None
        self._steps_s.clear()

    @property
    def state(self) -> RebalancingState:
        """Return what was learned."""
        account = self.account
        return RebalancingState(
            self.costs,
            self.cost_of_move,
            self.rental,
            account.home,
            account.account,
            self._is_other_work,
            list(self._told_steps),
        )

    def go_on_from(self, state: RebalancingState) -> None:
        """Go on from :attr:`state`, for the pipeline as it is."""
        self.costs, self.cost_of_move, self.rental = state.costs, state.cost_of_move, state.rental
        self.account = LayerAccount(state.home, state.account)
        self._profile = self._trial = self._promised = self._anchor = None
        self._means = self._running = self._settled = None
        self._told_steps, self._num_unfollowed = deque(state.told_steps, maxlen=_TOLD), 0
        self._steps_s.clear()
        self._is_other_work, self.has_learned = state.is_other_work, False

    def _judge(self, step_s: float) -> None:
        """Compare what the last move was to save with what it has."""
        if self._promised is not None:
            before_s, expected_s = self._promised.before_s, self._promised.expected_s
            self.rental.judge(is_kept=before_s - step_s >= _LEAST_KEPT * (before_s - expected_s))
        self._promised = None
        self._steps_s.clear()
