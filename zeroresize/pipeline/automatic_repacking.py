"""A pipeline decides after each profile whether it needs all of its ranks, and releases those that it does not."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.release_hooks import ReleaseHook
from zeroresize.pipeline.repacking import RepackingReport, carry_out_repacking, stage_that_stays
from zeroresize.plan.partition import Partition
from zeroresize.policy.pipeline.fewest_stages import RepackingRule
from zeroresize.policy.pipeline.pipeline_load import PipelineLoad
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingProposal
from zeroresize.resharding.agreement import NotEnoughMemoryError
from zeroresize.utils.state_checks import keyed, not_negative
from zeroresize.utils.value_checks import at_least, number

logger = logging.getLogger(__name__)

_CHECK = keyed({"first_step_s": not_negative})


@dataclass(frozen=True)
class Repack:
    """Says when a :class:`~zeroresize.pipeline.PipelineBalancer` packs a pipeline onto fewer ranks.

    After each profile as few stages are left as hold the layers within the balancer's ``memory_limits``, as DynMo does
    whenever memory allows. That makes best use of devices, as a pipeline with fewer stages has fewer bubbles: steps per
    second and rank rise. But each step takes longer, unless work has become less. ``max_slowdown`` bounds that: with
    1.0 devices are given back as a model shrinks, and steps never take longer than at the beginning.

    A released rank does not come back in this job, so a profile that wants fewer stages is followed by another one,
    and both must. The loss of the step after which it leaves may be known to it alone, as the last stage: a program
    that shows losses does so before it leaves the loop, or shares them within the block.

    Attributes:
        least_stages: that always stay.
        max_slowdown: how many times as long as in the first profile of all a step may take, as simulated.
        on_release: called on every rank that is released, with a :class:`~zeroresize.pipeline.Release`.

    Raises:
        ValueError: for values that are not allowed.
    """

    least_stages: int = 1
    max_slowdown: float = math.inf
    on_release: Sequence[ReleaseHook] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least("least_stages", self.least_stages, 1)
        if self.max_slowdown != math.inf:
            number("max_slowdown", self.max_slowdown, above=0.0)
        if not isinstance(self.on_release, list | tuple) or not all(map(callable, self.on_release)):
            raise ValueError(
                f"on_release={self.on_release!r} is not allowed: a list is needed of functions that take a Release"
            )


@dataclass(frozen=True)
class Released:
    """Reports a release of ranks: what was expected of it, and what it was."""

    proposal: RebalancingProposal
    report: RepackingReport


class AutomaticRepacking:
    """Decides after each profile whether ranks are released, and releases them.

    Attributes:
        options: as given.
        looks_again: whether the next profile is to come at once, as this one wants fewer stages.
    """

    def __init__(self, options: Repack) -> None:
        self.options = options
        self.looks_again = False
        self._first_step_s: float | None = None

    def expect_other_work(self) -> None:
        """Let two profiles want fewer stages from now on, whatever the last one wanted, as the work has changed."""
        self.looks_again = False

    def release(
        self,
        profile: PipelineProfile,
        rebalancing: Rebalancing,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        *,
        step: int,
        max_bytes: int,
    ) -> Released | None:
        """Release ranks if two profiles want it; None where all stay. Collective.

        Args:
            rebalancing: which has taken the profile; it goes on with the stages that stay. Of what moves cost it learns
                nothing: most of a re-packing's time may be that of making a process group.

        Raises:
            RuntimeError, ValueError: as :func:`~zeroresize.pipeline.repack`.
        """
        if rebalancing.costs is None or not rebalancing.has_learned:
            return None
        rule, costs, before = rebalancing.rule, rebalancing.costs, Partition(profile.boundaries)
        now = rule.simulated(costs, before)
        if self._first_step_s is None:
            self._first_step_s = now.step_s
        repacking_rule = RepackingRule(rule, costs, profile, stage_that_stays(pipeline))
        repacking = repacking_rule.on_fewest(self.options.least_stages, self.options.max_slowdown * self._first_step_s)
        is_wanted = len(repacking.stages) < before.num_stages
        self.looks_again, is_confirmed = is_wanted and not self.looks_again, is_wanted and self.looks_again
        if not is_confirmed:
            return None
        then = repacking_rule.simulated(repacking)
        stage_s = PipelineLoad.of(costs.seconds, before.num_stages, speeds=costs.speeds).stage_times(before)
        try:
            report = carry_out_repacking(
                pipeline, optimizer, repacking, max_bytes=max_bytes, on_release=self.options.on_release, step=step
            )
        except NotEnoughMemoryError as error:
            if pipeline.stage == 0:
                logger.warning("step %d: no rank is released: %s", step, error)
            return None
        rebalancing.continue_on(report.stages, report.boundaries)
        if pipeline.stage == 0:
            logger.info(
                "step %d: %d of %d stages go on, ranks %s are released: %.1f MB, %.2f s; expected step %.0f -> %.0f ms",
                step,
                len(report.stages),
                before.num_stages,
                list(report.released),
                report.moved_bytes / 1e6,
                report.seconds,
                1e3 * now.step_s,
                1e3 * then.step_s,
            )
        proposal = RebalancingProposal(
            before.boundaries,
            report.boundaries,
            tuple(stage_s.tolist()),
            now.step_s,
            then.step_s,
            now.bubble_ratio,
            then.bubble_ratio,
            profile.bubble_ratio,
            report.busiest_bytes,
            rebalancing.cost_of_move.there_and_back(report.busiest_bytes),
            is_needed=False,
        )
        return Released(proposal, report)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, as plain values."""
        return {} if self._first_step_s is None else {"first_step_s": self._first_step_s}

    @staticmethod
    def check_state(state: Any) -> None:
        """Check that :meth:`load_state_dict` can go on from ``state``.

        Raises:
            ValueError: naming what does not fit.
        """
        if state != {}:
            _CHECK(state, "state.repack")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict`.

        Raises:
            ValueError: as :meth:`check_state`; nothing is taken over then.
        """
        self.check_state(state)
        self._first_step_s = state.get("first_step_s")
        self.looks_again = False
