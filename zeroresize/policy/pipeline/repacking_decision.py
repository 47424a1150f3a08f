"""Whether a pipeline is packed onto fewer stages after a profile, and onto how few, within memory and within seconds.

Nothing is owed for it, as for moves: ranks are released for good, so waiting costs nothing, and what re-packing takes
is bounded by the memory and by a slowdown that a user allows. Two profiles must want it instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import Option, Rental
from zeroresize.policy.pipeline.centralized import Repacking, StageChoices, repacked
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingProposal, RebalancingRule
from zeroresize.utils.codec import UNSAVED

#: The shortest of so many steps is how long they were at first: one of them may have been interrupted, or the first to
#: use memory and code, and who is released does not come back.
_FIRST = 3


def repacking_onto(
    num_stages: int, rule: RebalancingRule, costs: LayerCosts, profile: PipelineProfile, keep: int | None
) -> Repacking:
    """Return the re-packing onto so many stages.

    Args:
        rule: how layers are divided, and within which memory limits.
        costs: after ``profile``.
        profile: the newest one.
        keep: a stage that must stay; None for any.

    Raises:
        ValueError: if they cannot hold the layers: the message says how few can.
    """
    return repacked(rule.load(costs, profile, num_stages), Partition(profile.boundaries), num_stages, keep=keep)


def repacking_onto_fewest(
    rule: RebalancingRule,
    costs: LayerCosts,
    profile: PipelineProfile,
    keep: int | None,
    *,
    least_stages: int = 1,
    most_step_s: float = math.inf,
) -> Repacking:
    """Return the re-packing onto as few stages as hold the layers; onto all where no fewer do in these seconds.

    Args:
        rule, costs, profile, keep: as of :func:`repacking_onto`.
        least_stages: no fewer than these.
        most_step_s: that a step may take then, simulated.

    Raises:
        ValueError: if not even all stages can hold the layers.
    """
    num_stages = len(profile.boundaries) - 1
    for number in range(min(least_stages, num_stages), num_stages):
        if number in StageChoices(rule.load(costs, profile, number), keep, number).possible:
            repacking = repacking_onto(number, rule, costs, profile, keep)
            if rule.simulated(_costs_on(costs, repacking), repacking.partition).step_s <= most_step_s:
                return repacking
    return repacking_onto(num_stages, rule, costs, profile, keep)


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
            self._first_steps_s = [min(self._first_steps_s)] * _FIRST

    def update(
        self, profile: PipelineProfile, rebalancing: Rebalancing, keep: int | None
    ) -> tuple[Repacking, RebalancingProposal] | None:
        """Take a profile; return a re-packing and what it changes if this one and the last one want fewer stages.

        Args:
            rebalancing: which has taken the profile.
            keep: a stage that must stay; None for any.

        Raises:
            ValueError: if not even all stages can hold the layers.
        """
        costs = rebalancing.costs
        if costs is None or not rebalancing.has_learned:
            return None
        # Between fewer stages there are other links, so all steps are compared without messages.
        rule = replace(rebalancing.rule, messages=None)
        step_s = rule.simulated(costs, Partition(profile.boundaries)).step_s
        if len(self._first_steps_s) < _FIRST:
            self._first_steps_s.append(step_s)
        options = []
        if len(self._first_steps_s) == _FIRST or self.max_slowdown == math.inf:
            most_step_s = self.max_slowdown * min(self._first_steps_s)
            repacking = repacking_onto_fewest(
                rule, costs, profile, keep, least_stages=self.least_stages, most_step_s=most_step_s
            )
            if len(repacking.stages) < len(profile.boundaries) - 1:
                options = [Option("fewer stages", 0.0, 0.0, is_needed=True)]
        is_wanted = self.rental.decide(options, step_s, 1).is_due
        self.looks_again, is_confirmed = is_wanted and not self.looks_again, is_wanted and self.looks_again
        if not is_confirmed:
            return None
        return repacking, _proposal(repacking, rule, costs, profile, rebalancing.cost_of_move)

    def refuse(self) -> None:
        """Note that the re-packing could not be made: none is wanted for some profiles, longer after each refusal."""
        self.rental.refuse()

    def succeed(self) -> None:
        """Note that the re-packing was made."""
        self.rental.succeed()


def _proposal(
    repacking: Repacking,
    rule: RebalancingRule,
    costs: LayerCosts,
    profile: PipelineProfile,
    cost_of_move: MoveCost,
) -> RebalancingProposal:
    """What the re-packing changes."""
    as_it_is = rule.to(costs, profile, cost_of_move, Partition(profile.boundaries))
    after = rule.simulated(_costs_on(costs, repacking), repacking.partition)
    num_bytes = profile.bytes_of(repacking.transfers)
    return replace(
        as_it_is,
        after=repacking.partition.boundaries,
        expected_step_s=after.step_s,
        expected_bubble_ratio=after.bubble_ratio,
        num_bytes=num_bytes,
        price_s=cost_of_move.there_and_back(num_bytes),
        is_needed=False,
        reason=f"{len(repacking.stages)} of {len(profile.boundaries) - 1} stages hold the layers",
    )
