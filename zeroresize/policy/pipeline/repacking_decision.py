"""Whether a pipeline is packed onto fewer stages after a profile, and onto which, within memory and within seconds.

Nothing is owed for it, as for moves: ranks are released for good, so waiting costs nothing, and what re-packing takes
is bounded by the memory and by a slowdown that a user allows. Two profiles must want it instead. DynMo's Algorithm 2
(section 3.4.1) hands on the layers of whole stages, first fit, and lets a balancer divide them; here both are one
search. ``L`` layers, ``S`` stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from zeroresize.plan.partition import LayerTransfer, Partition
from zeroresize.policy import FEW
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import Option, Rental
from zeroresize.policy.pipeline.division import NothingFitsError, PipelineLoad
from zeroresize.policy.pipeline.profiles import LayerCosts, PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing, RebalancingProposal, RebalancingRule
from zeroresize.utils.codec import UNSAVED


@dataclass(frozen=True)
class Repacking:
    """Describe which stages stay, and what they have then."""

    stages: tuple[int, ...]  # that stay, ascending; the others can be released
    partition: Partition  # of all layers over them: its stage i is ``stages[i]`` of before
    transfers: tuple[LayerTransfer, ...]  # layers that change stages, ascending; stages are numbered as before


def repacked(load: PipelineLoad, now: Partition, num_stages: int, keep: int | None = None) -> Repacking:
    """Return all layers on so many stages, ``keep`` among them: the choice and division whose slowest stage is fastest.

    Of choices that are as fast the first stages stay.
    """
    if not 1 <= num_stages <= load.num_stages:
        raise ValueError(f"{num_stages} stages cannot be left of {load.num_stages}: wanted are 1 to {load.num_stages}")
    num_layers = load.num_layers
    # By how many of the first stages come into question: [how many are taken, layers on them] the slowest one.
    slowest_s = [np.full((num_stages + 1, num_layers + 1), np.inf)]
    slowest_s[0][0, 0] = 0.0
    for stage in range(load.num_stages):
        before = slowest_s[-1]
        after = np.full_like(before, np.inf) if stage == keep else before.copy()
        taken = np.maximum(before[:-1, :, None], load.times_of(stage)).min(axis=1)
        after[1:] = np.minimum(after[1:], taken)
        slowest_s.append(after)
    if not math.isfinite(slowest_s[-1][num_stages, num_layers]):
        kept = "" if keep is None else f" with stage {keep} among them"
        raise NothingFitsError(
            f"no {num_stages} of {load.num_stages} stages{kept} can hold {load.byte_sums[-1]:.0f} bytes of layers, up "
            f"to {load.layer_bytes.max():.0f} each, within their memory limits"
        )
    stages, boundaries = list[int](), [num_layers]
    for stage in reversed(range(load.num_stages)):
        left = num_stages - len(stages)
        before, wanted_s = slowest_s[stage], slowest_s[stage + 1][left, boundaries[-1]]
        if stage != keep and before[left, boundaries[-1]] <= wanted_s:
            continue
        candidates = np.maximum(before[left - 1], load.times_of(stage)[:, boundaries[-1]])
        boundaries.append(num_layers - int(candidates[::-1].argmin()))
        stages.append(stage)
    partition, remaining = Partition(tuple(boundaries[::-1])), tuple(stages[::-1])
    return Repacking(remaining, partition, now.transfers_to(partition, remaining))


def repacked_onto_fewest(
    rule: RebalancingRule,
    costs: LayerCosts,
    profile: PipelineProfile,
    keep: int | None,
    *,
    least_stages: int = 1,
    most_step_s: float = math.inf,
) -> Repacking:
    """Return the re-packing onto as few stages as hold the layers; onto all where no fewer do in these seconds."""
    num_stages, now = len(profile.boundaries) - 1, Partition(profile.boundaries)
    for number in range(min(least_stages, num_stages), num_stages):
        try:
            repacking = repacked(rule.load(costs, profile, number), now, number, keep)
        except NothingFitsError:
            continue
        if rule.simulated(_costs_on(costs, repacking), repacking.partition).step_s <= most_step_s:
            return repacking
    return repacked(rule.load(costs, profile), now, num_stages, keep)


def _costs_on(costs: LayerCosts, repacking: Repacking) -> LayerCosts:
    return costs.on_stages(repacking.stages, repacking.partition.boundaries)


@dataclass
class RepackingDecision:
    """Decide, profile by profile, whether as few stages are left as hold the layers.

    Attributes:
        least_stages: that always stay.
        max_slowdown: how many times as long as at first a step may take, as simulated: as the shortest of the first
            three that are measured, or of those before the first change of work that is announced. Nobody is released
            before.
        looks_again: whether the next profile is to come at once, as the last one wanted fewer stages.
        rental: tells how long the pause is after a re-packing that could not be made.
    """

    least_stages: int = field(default=1, metadata=UNSAVED)
    max_slowdown: float = field(default=math.inf, metadata=UNSAVED)
    looks_again: bool = field(default=False, init=False, metadata=UNSAVED)
    rental: Rental = field(default_factory=Rental, init=False)
    _first_steps_s: list[float] = field(default_factory=list, init=False)

    def after_loading(self) -> None:
        """Let two profiles want fewer stages, whatever the last one before wanted."""
        self.looks_again = False

    def expect_other_work(self) -> None:
        """Let two profiles want fewer stages from now on, whatever the last one wanted, as the work has changed."""
        self.looks_again = False
        if self._first_steps_s:
            self._first_steps_s = [min(self._first_steps_s)] * FEW

    def update(
        self, profile: PipelineProfile, rebalancing: Rebalancing, keep: int | None
    ) -> tuple[Repacking, RebalancingProposal] | None:
        """Take a profile that ``rebalancing`` has taken; return a re-packing that this one and the last one want.

        And what it changes. Stage ``keep`` must stay.
        """
        costs = rebalancing.costs
        if costs is None or not rebalancing.has_learned:
            return None
        # Between fewer stages there are other links, so all steps are compared without messages.
        rule = replace(rebalancing.rule, messages=None)
        step_s = rule.simulated(costs, Partition(profile.boundaries)).step_s
        # One of the first steps may have been interrupted, or the first to use memory: who is released stays away.
        if len(self._first_steps_s) < FEW:
            self._first_steps_s.append(step_s)
        options = []
        if len(self._first_steps_s) == FEW or self.max_slowdown == math.inf:
            most_step_s = self.max_slowdown * min(self._first_steps_s)
            repacking = repacked_onto_fewest(
                rule, costs, profile, keep, least_stages=self.least_stages, most_step_s=most_step_s
            )
            if len(repacking.stages) < len(profile.boundaries) - 1:
                options = [Option("fewer stages", 0.0, 0.0, is_needed=True)]
        is_wanted = self.rental.decide(options, step_s, 1).is_due
        self.looks_again, is_confirmed = is_wanted and not self.looks_again, is_wanted and self.looks_again
        if not is_confirmed:
            return None
        return repacking, _proposal(repacking, rule, costs, profile, rebalancing.state.cost_of_move)


def _proposal(
    repacking: Repacking, rule: RebalancingRule, costs: LayerCosts, profile: PipelineProfile, cost_of_move: MoveCost
) -> RebalancingProposal:
    """What the re-packing changes."""
    after = rule.simulated(_costs_on(costs, repacking), repacking.partition)
    num_bytes = profile.bytes_of(repacking.transfers)
    return replace(
        rule.to(costs, profile, cost_of_move, Partition(profile.boundaries)),
        after=repacking.partition.boundaries,
        expected_step_s=after.step_s,
        expected_bubble_ratio=after.bubble_ratio,
        num_bytes=num_bytes,
        price_s=cost_of_move.there_and_back(num_bytes),
        is_needed=False,
        reason=f"{len(repacking.stages)} of {len(profile.boundaries) - 1} stages hold the layers",
    )
