"""Whether layers move after a profile: what is learned from profile to profile, and what is owed for not moving.

Pure: every rank is given the same profiles, so all decide alike. A profile and one more that confirms it say which
boundaries are wanted; a :class:`~zeroresize.policy.moves.rental.Rental` of two options, these and those that there were
at first, says whether and when layers move there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import Option, Rental, Verdict
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.layer_means import LayerMeans
from zeroresize.policy.pipeline.message_delays import PipelineMessages
from zeroresize.policy.pipeline.pipeline_load import Floats
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingProposal, RebalancingRule

#: The options: the best boundaries by now, and those that there were at first.
WANTED, HOME = "wanted", "home"
#: Layers that have changed by no more than this share since nothing was wanted want nothing now.
_SETTLED = 0.01
#: Steps until layers that are to move are in place.
_IN_PLACE = 2
#: Told changes of work that say how often there are some.
_TOLD = 9


@dataclass(frozen=True)
class RebalancingState:
    """Hold what was learned of layers, devices, moves and costs.

    Attributes:
        costs: of layers; None before the first profile.
        cost_of_move: as far as is known.
        rental: what the present boundaries have cost since others were wanted, and doubt of what moves save.
        home: [S + 1] the first boundaries; None before the first profile.
        is_other_work: whether the next profile is of other work.
        told_steps: steps at which the caller said so, the last ones.
    """

    costs: LayerCosts | None
    cost_of_move: MoveCost
    rental: Rental = field(default_factory=Rental)
    home: tuple[int, ...] | None = None
    is_other_work: bool = False
    told_steps: tuple[int, ...] = ()

    def on(self, num_layers: int, num_stages: int) -> RebalancingState:
        """Return what holds for so many layers and stages; of other stages that is what moves take, and no costs.

        Raises:
            ValueError: for another number of layers.
        """
        if self.costs is not None and {len(self.costs.forward_s), len(self.costs.backward_s)} != {num_layers}:
            raise ValueError(f"it is of {len(self.costs.forward_s)} layers, and the pipeline has {num_layers}")
        if self.costs is None or len(self.costs.speeds) != num_stages:
            return RebalancingState(None, self.cost_of_move, self.rental)
        for boundaries in (self.costs.boundaries, self.home or self.costs.boundaries):
            Partition.of(boundaries, num_layers, num_stages)
        return self


@dataclass
class _Evidence:
    """What profiles of the same work say.

    Attributes:
        means: of each layer; None before the first profile.
        trial: what one more profile must confirm.
        settled: boundaries, and what layers [L, 2] took there while nothing was wanted.
    """

    means: LayerMeans | None = None
    trial: RebalancingProposal | None = None
    settled: tuple[tuple[int, ...], Floats, RebalancingRule] | None = None


@dataclass
class _Move:
    """What the last move has gained against the first boundaries, by what each profile says of these.

    Attributes:
        saving_s: by how many seconds a step is shorter than with these, by the last profile.
        gained_s: until then, less what the move took.
        step: up to which that is counted.
    """

    saving_s: float
    gained_s: float
    step: int

    def pass_to(self, step: int) -> None:
        """Count the steps until this one."""
        self.gained_s += self.saving_s * max(step - self.step, 0)
        self.step = max(step, self.step)


class Rebalancing:
    """Decide, profile by profile, whether layers move.

    Args:
        rule: how wanted boundaries are found.
        cost_of_move: as the links between stages promise.

    Attributes:
        rule: as given, with the messages that are known by now.
        interval: steps until the next regular profile; the caller says so when it changes.
        state: what was learned; it may be set.
        verdict: of the last profile; None while nothing is decided.
        has_learned: whether the costs are of the last profile; not while another one is waited for.
        num_searches: how often the best boundaries were looked for, which is most of what decisions take.
    """

    def __init__(self, rule: RebalancingRule, cost_of_move: MoveCost) -> None:
        self.rule, self.interval, self.num_searches = rule, rule.num_steps, 0
        self.go_on_from(RebalancingState(None, cost_of_move))

    def go_on_from(self, state: RebalancingState) -> None:
        """Go on from what was learned, for the pipeline as it is."""
        self.state, self.has_learned = state, False
        self.verdict: Verdict | None = None
        self._profile: PipelineProfile | None = None
        self._evidence = _Evidence()
        self._move: _Move | None = None
        self._num_steps = self._decided = 0

    @property
    def costs(self) -> LayerCosts | None:
        """Return what is known of layers and devices; None before the first profile."""
        return self.state.costs

    @property
    def cost_of_move(self) -> MoveCost:
        """Return what moves take, as far as is known."""
        return self.state.cost_of_move

    @property
    def comes_home(self) -> bool:
        """Whether the last proposal is to undo what has lost, whatever work layers have."""
        return self.verdict is not None and self.verdict.option is not None and self.verdict.option.name == HOME

    @property
    def looks_again(self) -> bool:
        """Whether another profile must confirm what the last one wants, and so is to come at once."""
        return self._evidence.trial is not None

    def expect_other_work(self, step: int | None = None) -> None:
        """Expect profiles of layers whose work has changed, by what the caller did to them.

        What profiles have said is forgotten. What the boundaries have cost is still owed: they did cost that, and where
        work changes often, moves would never be worth it otherwise.

        Args:
            step: how many steps are over; None where the caller does not count. A caller that has said so before is
                expected to say so again after as many steps as between the last such calls, on average: for so long
                layers stay good where they are.
        """
        if self._move is not None and step is not None:
            self._move.pass_to(step)
        told_steps = self.state.told_steps if step is None else (*self.state.told_steps, step)[-_TOLD:]
        self.state = replace(self.state, is_other_work=True, told_steps=told_steps)
        self._evidence = _Evidence()

    def update(
        self, profile: PipelineProfile, step: int | None = None, messages: PipelineMessages | None = None
    ) -> RebalancingProposal | None:
        """Return what is to be carried out after this profile; None where everything stays.

        Of a move that one profile wants, the next one by itself must say that it saves, too: what was chosen for what
        one profile says, noise and interruptions included, is worth less by another one. What is made then is what
        both want.

        Args:
            step: how many steps are over, as of :meth:`expect_other_work`.
            messages: between the stages, as far as is known by now; None for as before.

        Raises:
            ValueError: if no boundaries fit into the memory limits.
        """
        self.has_learned = False
        self._num_steps = self._num_steps + self.interval if step is None else step
        if messages is not None:
            self.rule = replace(self.rule, messages=messages)
        evidence = self._evidence
        trial, evidence.trial = evidence.trial, None
        if trial is not None and trial.before != profile.boundaries:
            trial = None  # somebody else has moved layers since
        if evidence.means is None:
            evidence.means = LayerMeans(len(profile.layers))
        surprised = evidence.means.surprised(profile)
        means = evidence.means.after(profile)
        costs = self._costs_after(means)
        now = Partition(profile.boundaries)
        if trial is None:
            if self._is_settled(surprised) and self._is_settled(means):
                return self._decide(means, costs, self.rule.propose(costs, means, self.cost_of_move, now), 0.0, step)
            proposal = self._search(self._costs_after(surprised), surprised)
            if proposal.transfers:
                evidence.trial = proposal
                return None
            evidence.settled = means.boundaries, means.layer_s, self.rule
            return self._decide(means, costs, proposal, 0.0, step)
        evidence.settled = None
        # By what this profile alone says of layers, and by what is known of devices now.
        measured = LayerCosts.measured(profile, costs.speeds)
        confirmed_s = self.rule.saving_s(measured, now, Partition(trial.after))
        if self.state.is_other_work:  # followed at once; else what both profiles say is looked for
            proposal = self.rule.propose(costs, means, self.state.cost_of_move, Partition(trial.after))
        else:
            proposal = self._search(costs, means)
        return self._decide(means, costs, proposal, confirmed_s, step)

    def _is_settled(self, profile: PipelineProfile) -> bool:
        """Whether nothing was wanted for layers as these are, so that nothing need be looked for."""
        if self._evidence.settled is None or self.rule.memory_limits is not None:
            return False
        boundaries, layer_s, rule = self._evidence.settled
        if (boundaries, rule) != (profile.boundaries, self.rule):
            return False
        return bool((np.abs(profile.layer_s - layer_s) <= _SETTLED * layer_s).all())

    def _search(self, costs: LayerCosts, profile: PipelineProfile) -> RebalancingProposal:
        """What the best boundaries would change."""
        self.num_searches += 1
        return self.rule.propose(costs, profile, self.state.cost_of_move)

    def _costs_after(self, profile: PipelineProfile) -> LayerCosts:
        if self.costs is None:
            return LayerCosts.first(profile)
        return self.costs.after(profile, is_other_work=self.state.is_other_work)

    def _decide(
        self,
        profile: PipelineProfile,
        costs: LayerCosts,
        proposal: RebalancingProposal,
        confirmed_s: float,
        step: int | None,
    ) -> RebalancingProposal | None:
        """The proposal, or the way home, where it is due; ``confirmed_s`` is the most that the proposal saves."""
        home = self.state.home or profile.boundaries
        self.state = replace(self.state, costs=costs, home=home, is_other_work=False)
        self._profile, self.has_learned = profile, True
        rental, lasts_steps = self.state.rental, self._steps_until_told(step)
        way_home = self.rule.to(costs, profile, self.cost_of_move, Partition(home))
        proposals, options = {WANTED: proposal, HOME: way_home}, []
        if proposal.transfers:
            self._judge(-way_home.saving_s)
            saving_s = min(proposal.saving_s, confirmed_s)
            options.append(Option(WANTED, saving_s, proposal.price_s, lasts_steps, proposal.is_needed))
        if home not in (profile.boundaries, proposal.after) and self.rule.load(costs, profile).fits(Partition(home)):
            # One way, and what was disappointed by going away does not make it dearer to come home.
            options.append(Option(HOME, way_home.saving_s, way_home.price_s / 2.0 / rental.doubt))
        # Where work changes more often than regular profiles come it stays as it is for as long as it was before.
        num_steps, self._decided = min(self.interval, self._num_steps - self._decided), self._num_steps
        verdict = self.verdict = rental.decide(options, proposal.step_s, num_steps, self.rule.min_saving)
        if not verdict.is_due or verdict.option is None:
            return None
        rental.settle()
        chosen = replace(proposals[verdict.option.name], reason=str(verdict))
        self._move = None
        if verdict.option.name == WANTED and not chosen.is_needed:
            saving_s = verdict.option.saving_s - way_home.saving_s
            self._move = _Move(saving_s, -chosen.price_s / 2.0, self._num_steps + _IN_PLACE)
        return chosen

    def _steps_until_told(self, step: int | None) -> float:
        """Steps for which a move would be good until the caller is expected to change the work again.

        Infinite where nobody knows. A change that is overdue is expected after as long again.
        """
        told_steps = self.state.told_steps
        if step is None or len(told_steps) < 2:
            return inf
        first, last = told_steps[0], told_steps[-1]
        usual = (last - first) / (len(told_steps) - 1)
        return max(last + usual - step - 1.0, 0.0) if step < last + usual else float(step - last)

    def _judge(self, saving_s: float) -> None:
        """Take what the last move has gained, until layers can move again, where steps now are so much shorter."""
        move, self._move = self._move, None
        if move is not None:
            move.saving_s = saving_s
            move.pass_to(self._num_steps + _IN_PLACE)
            self.state.rental.judge(is_kept=move.gained_s >= 0.0)

    def propose(self, boundaries: tuple[int, ...]) -> RebalancingProposal | None:
        """Return what would change from these boundaries on, by the last profile; None before there was one.

        Raises:
            ValueError: as :meth:`update`.
        """
        if self.costs is None or self._profile is None:
            return None
        proposal = self._search(self.costs, replace(self._profile, boundaries=boundaries))
        return proposal if self.verdict is None else replace(proposal, reason=str(self.verdict))

    def learn(self, num_bytes: float, seconds: float) -> None:
        """Learn from a move that has been made; bytes are those of the rank that sent or received most."""
        self.state = replace(self.state, cost_of_move=self.state.cost_of_move.learned(num_bytes, seconds))

    def refuse(self) -> None:
        """Note that the last move could not be made: the next one is dearer."""
        self.drop()
        self.state.rental.judge(is_kept=False)

    def drop(self) -> None:
        """Note that the last move was not made, as its profile no longer holds."""
        self._move = None

    def continue_on(self, stages: Sequence[int], boundaries: tuple[int, ...]) -> None:
        """Continue on these stages only, with the layers between ``boundaries`` [S + 1] of them."""
        costs = None if self.costs is None else self.costs.on_stages(stages, boundaries)
        if self.rule.memory_limits is not None:
            self.rule = replace(self.rule, memory_limits=tuple(self.rule.memory_limits[stage] for stage in stages))
        self.state.rental.settle()
        self.go_on_from(replace(self.state, costs=costs, home=None))
