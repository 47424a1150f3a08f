"""Whether a pipeline is packed onto fewer stages after a profile, and onto how few, within memory and within seconds.

Nothing is owed to its ski rental, as it is for moves: ranks are released for good, so waiting costs nothing, and what
re-packing takes is bounded by the memory and by a slowdown that a user allows. Two profiles must want it instead. Of
the rental it takes the pauses: what could not be made is not tried again at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from zeroresize.plan.partition import Partition
from zeroresize.policy.moves.ski_rental import SkiRental
from zeroresize.policy.pipeline.bubbles import PipelineStep
from zeroresize.policy.pipeline.fewer_stages import Repacking, can_hold, repacked
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingRule
from zeroresize.utils.codec import UNSAVED

#: The shortest of so many steps is how long they were at first: one of them may have been interrupted, or the first to
#: use memory and code, and who is released does not come back.
_FIRST = 3


@dataclass(frozen=True)
class RepackingRule:
    """Hold what is known of a pipeline that may be packed.

    Attributes:
        rule: how layers are divided, and within which memory limits.
        costs: after ``profile``.
        profile: the newest one.
        keep: a stage that must stay; None for any.
    """

    rule: RebalancingRule
    costs: LayerCosts
    profile: PipelineProfile
    keep: int | None

    def on(self, num_stages: int) -> Repacking:
        """Return the re-packing onto so many stages.

        Raises:
            ValueError: if they cannot hold the layers: the message says how few can.
        """
        load = self.rule.load(self.costs, self.profile, num_stages)
        return repacked(load, Partition(self.profile.boundaries), num_stages, keep=self.keep)

    def on_fewest(self, least_stages: int = 1, most_step_s: float = math.inf) -> Repacking:
        """Return the re-packing onto as few stages as hold the layers; onto all where no fewer do in these seconds.

        Args:
            least_stages: no fewer than these.
            most_step_s: that a step may take then, simulated.

        Raises:
            ValueError: if not even all stages can hold the layers.
        """
        num_stages = len(self.profile.boundaries) - 1
        for number in range(min(least_stages, num_stages), num_stages):
            if can_hold(self.rule.load(self.costs, self.profile, number), number, keep=self.keep):
                repacking = self.on(number)
                if self.simulated(repacking).step_s <= most_step_s:
                    return repacking
        return self.on(num_stages)

    def simulated(self, repacking: Repacking) -> PipelineStep:
        """Simulate a step after a re-packing."""
        costs = self.costs.on_stages(repacking.stages, repacking.partition.boundaries)
        return self.rule.simulated(costs, repacking.partition)


@dataclass(frozen=True)
class RepackingProposal:
    """Describe a re-packing that two profiles want.

    Attributes:
        repacking: which stages stay, and what they have then.
        before: boundaries of the stages as they are.
        stage_s: [S] seconds that these compute.
        step, expected_step: simulated steps before and after it.
    """

    repacking: Repacking
    before: Partition
    stage_s: tuple[float, ...]
    step: PipelineStep
    expected_step: PipelineStep


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
    rental: SkiRental = field(default_factory=SkiRental, init=False)
    _first_steps_s: list[float] = field(default_factory=list, init=False)
    _knows_first: bool = field(default=False, init=False)

    def after_loading(self) -> None:
        """Let two profiles want fewer stages, whatever the last one before wanted."""
        self.looks_again = False

    def expect_other_work(self) -> None:
        """Let two profiles want fewer stages from now on, whatever the last one wanted, as the work has changed."""
        self.looks_again = False
        self._knows_first = bool(self._first_steps_s)

    def update(self, profile: PipelineProfile, rebalancing: Rebalancing, keep: int | None) -> RepackingProposal | None:
        """Take a profile; return a re-packing if this one and the last one want fewer stages, else None.

        Args:
            rebalancing: which has taken the profile.
            keep: a stage that must stay; None for any.

        Raises:
            ValueError: if not even all stages can hold the layers.
        """
        if rebalancing.costs is None or not rebalancing.has_learned:
            return None
        self.rental.next_update()
        costs, before = rebalancing.costs, Partition(profile.boundaries)
        # Between fewer stages there are other links, so all steps are compared without messages.
        without_messages = replace(rebalancing.rule, messages=None)
        rule = RepackingRule(without_messages, costs, profile, keep)
        now = without_messages.simulated(costs, before)
        if not self._knows_first:
            self._first_steps_s.append(now.step_s)
            self._knows_first = len(self._first_steps_s) == _FIRST
        if self.rental.pause or not (self._knows_first or self.max_slowdown == math.inf):
            self.looks_again = False
            return None
        repacking = rule.on_fewest(self.least_stages, self.max_slowdown * min(self._first_steps_s))
        is_wanted = len(repacking.stages) < before.num_stages
        self.looks_again, is_confirmed = is_wanted and not self.looks_again, is_wanted and self.looks_again
        if not is_confirmed:
            return None
        stage_s = PipelineLoad.of(costs.seconds, before.num_stages, speeds=costs.speeds).stage_times(before)
        return RepackingProposal(repacking, before, tuple(stage_s.tolist()), now, rule.simulated(repacking))

    def refuse(self) -> None:
        """Note that the re-packing could not be made: none is wanted for some profiles, longer after each refusal."""
        self.rental.refuse()

    def succeed(self) -> None:
        """Note that the re-packing was made."""
        self.rental.succeed()
