"""Onto how few stages a profiled pipeline can be packed, within memory and within seconds; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.bubbles import PipelineStep
from zeroresize.policy.pipeline.layer_costs import LayerCosts
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingRule
from zeroresize.policy.pipeline.repacking import Repacking, can_hold, repacked


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
