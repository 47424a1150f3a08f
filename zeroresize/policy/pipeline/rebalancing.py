"""Whether layers move after a profile, and where to; pure, so ranks that are given the same profiles decide alike.

``L`` layers, ``S`` stages. A profile and one more that confirms it say which boundaries are wanted
(:class:`RebalancingRule`). A :class:`~zeroresize.policy.moves.rental.Rental` of two options, these and those that there
were at first, says in a :class:`~zeroresize.policy.moves.rental.Verdict` whether and when layers move there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

import numpy as np

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import MIN_SAVING, Option, Rental, Verdict, is_saving
from zeroresize.policy.pipeline.division import (
    PipelineLoad,
    PipelineMessages,
    balanced_partition,
    shortest_partition,
    step_delays,
)
from zeroresize.policy.pipeline.profile_cadence import LEAST_BLOCKS
from zeroresize.policy.pipeline.profiles import LayerCosts, LayerMeans, PipelineProfile
from zeroresize.runtime.schedules import Schedule
from zeroresize.runtime.simulated_steps import PipelineStep, simulated_step

By = Literal["time", "parameters"]
#: The options: the best boundaries by now, and those that there were at first.
WANTED, HOME = "wanted", "home"


@dataclass(frozen=True)
class RebalancingProposal:
    """Describe what other boundaries would change. Seconds are those of one profiled block.

    Attributes:
        before, after: [S + 1] boundaries; equal where nothing is to be gained.
        stage_s: [S] seconds that stages compute before.
        step_s, expected_step_s: before and after, simulated from the layers' seconds, and from those of messages
            where they are measured.
        bubble_ratio, expected_bubble_ratio: of these steps, the mean of the stages.
        measured_bubble_ratio: of the profiled block.
        num_bytes: that the busiest rank sends or receives.
        price_s: of the move there and back.
        is_needed: whether a stage is now over its memory limit.
        reason: why layers move, or do not move now; nothing where none was decided.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    stage_s: tuple[float, ...]
    step_s: float
    expected_step_s: float
    bubble_ratio: float
    expected_bubble_ratio: float
    measured_bubble_ratio: float
    num_bytes: float
    price_s: float
    is_needed: bool
    reason: str = ""

    @property
    def saving_s(self) -> float:
        """Return by how many seconds a step would be shorter."""
        return self.step_s - self.expected_step_s

    @property
    def transfers(self) -> tuple[LayerTransfer, ...]:
        """Return the layers that would move."""
        return Partition(self.before).transfers_to(Partition(self.after))


@dataclass(frozen=True)
class RebalancingRule:
    """Say how wanted boundaries are found."""

    by: By  # what is divided evenly: seconds, or bytes of parameters. The saving is always one of seconds
    schedule: Schedule
    num_microbatches: int
    num_steps: int  # over which a change pays; those until the next profile
    min_saving: float = MIN_SAVING  # share of a step below which nothing changes
    memory_limits: tuple[float, ...] | None = None  # [S] bytes; None for none
    messages: PipelineMessages | None = None  # between stages, which wait for them; None where they take no time

    def to(
        self, costs: LayerCosts, profile: PipelineProfile, cost_of_move: MoveCost, wanted: Partition
    ) -> RebalancingProposal:
        """Return what these boundaries would change, whatever they save."""
        now = Partition(profile.boundaries)
        before = self.simulated(costs, now)
        after = before if wanted == now else self.simulated(costs, wanted)
        num_bytes = profile.bytes_of(now.transfers_to(wanted))
        stage_s = PipelineLoad.of(costs.seconds, now.num_stages, speeds=costs.speeds).stage_times(now)
        return RebalancingProposal(
            now.boundaries,
            wanted.boundaries,
            tuple(stage_s.tolist()),
            before.step_s,
            after.step_s,
            before.bubble_ratio,
            after.bubble_ratio,
            profile.bubble_ratio,
            num_bytes,
            0.0 if wanted == now else cost_of_move.there_and_back(num_bytes),
            not self.load(costs, profile).fits(now),
        )

    def wanted(self, costs: LayerCosts, profile: PipelineProfile) -> Partition:
        """Return the boundaries that divide best, whatever they save; NothingFitsError where none fit."""
        load = self.load(costs, profile)
        if self.by != "time":
            return balanced_partition(load)
        forward_s, backward_s = (
            np.array(seconds) / self.num_microbatches for seconds in (costs.forward_s, costs.backward_s)
        )
        messages = self._messages_of(load.num_stages)
        return shortest_partition(load, forward_s, backward_s, self.num_microbatches, self.schedule, messages)

    def load(self, costs: LayerCosts, profile: PipelineProfile, num_left: int | None = None) -> PipelineLoad:
        """Return what is divided evenly, and what must fit: bytes of a layer on the stage that keeps most activations.

        That is the first one of ``num_left`` stages, where only so many are to be left.
        """
        messages, is_of_time = self._messages_of(len(costs.speeds)), self.by == "time"
        delays = layer_bytes = None
        if messages is not None and is_of_time:
            delays = step_delays(messages.seconds(Partition(profile.boundaries)), self.num_microbatches, self.schedule)
        if self.memory_limits is not None:
            num_stages = num_left or len(profile.boundaries) - 1
            kept = self.num_microbatches if self.schedule == "gpipe" else min(num_stages, self.num_microbatches)
            layer_bytes = [float(layer.bytes_at_rest + kept * layer.activation_bytes) for layer in profile.layers]
        return PipelineLoad.of(
            costs.seconds if is_of_time else [float(layer.weight_bytes) for layer in profile.layers],
            len(costs.speeds),
            speeds=costs.speeds,
            delays=delays,
            layer_bytes=layer_bytes,
            memory_limits=self.memory_limits,
        )

    def simulated(self, costs: LayerCosts, partition: Partition) -> PipelineStep:
        """Simulate a step with the messages of :attr:`messages`, if these are of so many stages, else without."""
        both_s, num_stages = (costs.forward_s, costs.backward_s), partition.num_stages
        loads = (PipelineLoad.of(seconds, num_stages, speeds=costs.speeds) for seconds in both_s)
        forward_s, backward_s = ((load.stage_times(partition) / self.num_microbatches).tolist() for load in loads)
        messages = self._messages_of(num_stages)
        return simulated_step(
            forward_s,
            backward_s,
            self.num_microbatches,
            schedule=self.schedule,
            communication_s=0.0 if messages is None else messages.seconds(partition),
        )

    def _messages_of(self, num_stages: int) -> PipelineMessages | None:
        """Those of the pipeline, unless it is asked about one of fewer stages."""
        fits = self.messages is not None and len(self.messages.links) == num_stages - 1
        return self.messages if fits else None


@dataclass(frozen=True)
class RebalancingState:
    """Hold what was learned of layers, devices, moves and costs."""

    costs: LayerCosts | None  # of layers; None before the first profile
    cost_of_move: MoveCost
    rental: Rental = field(default_factory=Rental)  # what the boundaries have cost, and doubt of what moves save
    home: tuple[int, ...] | None = None  # [S + 1] the first boundaries; None before the first profile
    is_other_work: bool = False  # whether the next profile is of other work
    told_steps: tuple[int, ...] = ()  # steps at which the caller said so, the last ones

    def on(self, num_layers: int, num_stages: int) -> RebalancingState:
        """Return what holds for so many layers and stages; of other stages that is what moves take, and no costs."""
        if self.costs is not None and {len(self.costs.forward_s), len(self.costs.backward_s)} != {num_layers}:
            raise ValueError(f"it is of {len(self.costs.forward_s)} layers, and the pipeline has {num_layers}")
        if self.costs is None or len(self.costs.speeds) != num_stages:
            return RebalancingState(None, self.cost_of_move, self.rental)
        for boundaries in (self.costs.boundaries, self.home or self.costs.boundaries):
            Partition.of(boundaries, num_layers, num_stages)
        return self


class Rebalancing:
    """Decide, profile by profile, whether layers move.

    Args:
        cost_of_move: as the links between stages promise.

    Attributes:
        rule: as given, with the messages that are known by now.
        interval: steps until the next regular profile; the caller says so when it changes.
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
        self._forget()
        #: What the last move has gained against the first boundaries, less what it took; None where none is judged.
        self._gained_s: float | None = None
        self._num_steps = self._decided = 0

    def _forget(self) -> None:
        """Forget what profiles of the same work have said; what one of them wants must be confirmed by another."""
        self._means: LayerMeans | None = None
        self._trial: RebalancingProposal | None = None

    @property
    def costs(self) -> LayerCosts | None:
        """What is known of layers and devices; None before the first profile."""
        return self.state.costs

    @property
    def comes_home(self) -> bool:
        """Whether the last proposal is to undo what has lost, whatever work layers have."""
        return self.verdict is not None and self.verdict.option is not None and self.verdict.option.name == HOME

    @property
    def looks_again(self) -> bool:
        """Whether another profile must confirm what the last one wants, and so is to come at once."""
        return self._trial is not None

    def expect_other_work(self, step: int | None = None) -> None:
        """Expect profiles of layers whose work has changed, by what the caller did to them after so many steps.

        What profiles have said is forgotten. What the boundaries have cost is still owed: they did cost that, and where
        work changes often, moves would never be worth it otherwise. A caller that has said so before is expected to say
        so again after as many steps as between the last such calls, on average: for so long layers stay where they are.
        """
        told_steps = self.state.told_steps if step is None else (*self.state.told_steps, step)[-LEAST_BLOCKS:]
        self.state = replace(self.state, is_other_work=True, told_steps=told_steps)
        self._forget()

    def update(
        self, profile: PipelineProfile, step: int | None = None, messages: PipelineMessages | None = None
    ) -> RebalancingProposal | None:
        """Return what is to be carried out after this profile; None where everything stays.

        Of a move that one profile wants, the next one by itself must say that it saves, too: what was chosen for what
        one profile says, noise and interruptions included, is worth less by another one. What is made then is what
        both want. Messages between the stages are as before where they are None.
        """
        self.has_learned = False
        self._num_steps = self._num_steps + self.interval if step is None else step
        if messages is not None:
            self.rule = replace(self.rule, messages=messages)
        self._means = self._means or LayerMeans(len(profile.layers))
        known, state, now = self._means.after(profile), self.state, Partition(profile.boundaries)
        trial, self._trial = self._trial, None
        if state.costs is None:
            costs = LayerCosts.first(known)
        else:
            costs = state.costs.after(known, is_other_work=state.is_other_work)
        confirmed_s = 0.0
        if trial is not None and trial.before == profile.boundaries:  # else somebody has moved layers since
            # By what this profile alone says of layers, and by what is known of devices now.
            measured, after = LayerCosts.measured(profile, costs.speeds), Partition(trial.after)
            confirmed_s = self.rule.simulated(measured, now).step_s - self.rule.simulated(measured, after).step_s
            # Told work is followed at once; else what both profiles say is looked for.
            proposal = self._search(costs, known, after if state.is_other_work else None)
        else:
            proposal = self._search(costs, known)
            if proposal.transfers:
                self._trial = proposal
                if state.costs is None:  # else a device that is slow by the next profile would pass for a heavy layer
                    self.state = replace(state, costs=costs)
                return None
        return self._decide(known, costs, proposal, confirmed_s, step)

    def _search(
        self, costs: LayerCosts, profile: PipelineProfile, wanted: Partition | None = None
    ) -> RebalancingProposal:
        """What the wanted boundaries, or those that divide best, would change; nothing where that is noise."""
        self.num_searches += wanted is None
        rule, cost_of_move = self.rule, self.state.cost_of_move
        proposal = rule.to(costs, profile, cost_of_move, wanted or rule.wanted(costs, profile))
        if proposal.is_needed or is_saving(proposal.saving_s, proposal.step_s, rule.min_saving):
            return proposal
        return rule.to(costs, profile, cost_of_move, Partition(profile.boundaries))

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
        rental = self.state.rental
        way_home = self.rule.to(costs, profile, self.state.cost_of_move, Partition(home))
        proposals, options = {WANTED: proposal, HOME: way_home}, []
        # Where work changes more often than regular profiles come it stays as it is for as long as it was before.
        num_steps, self._decided = min(self.interval, self._num_steps - self._decided), self._num_steps
        if self._gained_s is not None:
            self._gained_s -= way_home.saving_s * num_steps
        if proposal.transfers:
            if self._gained_s is not None:
                rental.judge(is_kept=self._gained_s >= 0.0)
                self._gained_s = None
            saving_s = min(proposal.saving_s, confirmed_s)
            lasts_steps = self._steps_until_told(step)
            options.append(Option(WANTED, saving_s, proposal.price_s, lasts_steps, proposal.is_needed))
        if home not in (profile.boundaries, proposal.after) and self.rule.load(costs, profile).fits(Partition(home)):
            # One way, and what was disappointed by going away does not make it dearer to come home.
            options.append(Option(HOME, way_home.saving_s, way_home.price_s / 2.0 / rental.doubt))
        verdict = self.verdict = rental.decide(options, proposal.step_s, num_steps, self.rule.min_saving)
        if not verdict.is_due or verdict.option is None:
            return None
        rental.settle()
        chosen = replace(proposals[verdict.option.name], reason=str(verdict))
        is_judged = verdict.option.name == WANTED and not chosen.is_needed
        self._gained_s = -chosen.price_s / 2.0 if is_judged else None
        return chosen

    def _steps_until_told(self, step: int | None) -> float:
        """Steps for which a move would be good until the caller is expected to change the work again, or infinite.

        A change that is overdue is expected after as long again.
        """
        told_steps = self.state.told_steps
        if step is None or len(told_steps) < 2:
            return inf
        first, last = told_steps[0], told_steps[-1]
        usual = (last - first) / (len(told_steps) - 1)
        return max(last + usual - step - 1.0, 0.0) if step < last + usual else float(step - last)

    def propose(self, boundaries: tuple[int, ...]) -> RebalancingProposal | None:
        """Return what would change from these boundaries on, by the last profile; None before there was one."""
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
        self._gained_s = None

    def continue_on(self, stages: Sequence[int], boundaries: tuple[int, ...]) -> None:
        """Continue on these stages only, with the layers between ``boundaries`` [S + 1] of them."""
        costs = None if self.costs is None else self.costs.on_stages(stages, boundaries)
        if self.rule.memory_limits is not None:
            self.rule = replace(self.rule, memory_limits=tuple(self.rule.memory_limits[stage] for stage in stages))
        self.state.rental.settle()
        self.go_on_from(replace(self.state, costs=costs, home=None))


def described(transfers: Sequence[LayerTransfer]) -> str:
    """Return a text such as "layers 7 and 8 move from stage 2 to 1, layer 3 from 1 to 0"."""
    layers: dict[tuple[int, int], list[int]] = {}
    for transfer in transfers:
        layers.setdefault((transfer.source, transfer.destination), []).append(transfer.layer)
    texts: list[str] = []
    for (source, destination), numbers in layers.items():
        listed = f"{numbers[0]}" if len(numbers) == 1 else f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        verb = "" if texts else "moves " if len(numbers) == 1 else "move "
        stage = "" if texts else "stage "
        texts.append(f"layer{'s' * (len(numbers) > 1)} {listed} {verb}from {stage}{source} to {destination}")
    return ", ".join(texts)
