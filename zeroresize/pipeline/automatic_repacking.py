"""A pipeline releases the ranks that it does not need any more, when :class:`RepackingDecision` says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.release_hooks import ReleaseHook
from zeroresize.pipeline.repacking import RepackingReport, carry_out_repacking, stage_that_stays
from zeroresize.policy.pipeline.profiles import PipelineProfile
from zeroresize.policy.pipeline.rebalancing import Rebalancing
from zeroresize.policy.pipeline.rebalancing_proposal import RebalancingProposal
from zeroresize.policy.pipeline.repacking_decision import RepackingDecision
from zeroresize.resharding.agreement import NotEnoughMemoryError
from zeroresize.utils.value_checks import at_least, number

logger = logging.getLogger(__name__)


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


class AutomaticRepacking:
    """Releases ranks when the decision wants it.

    Attributes:
        decision: which profiles go to.
    """

    def __init__(self, options: Repack) -> None:
        self._options = options
        self.decision = RepackingDecision(options.least_stages, options.max_slowdown)

    def release(
        self,
        profile: PipelineProfile,
        rebalancing: Rebalancing,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        *,
        step: int,
        max_bytes: int,
    ) -> tuple[RebalancingProposal, RepackingReport] | None:
        """Release ranks if two profiles want it, and return what was expected of it, and what it was; collective.

        Args:
            rebalancing: which has taken the profile; it goes on with the stages that stay. Of what moves cost it learns
                nothing: most of a re-packing's time may be that of making a process group.

        Returns:
            None where all stay.

        Raises:
            RuntimeError, ValueError: as :func:`~zeroresize.pipeline.repack`.
        """
        wanted = self.decision.update(profile, rebalancing, stage_that_stays(pipeline))
        if wanted is None:
            return None
        repacking, proposal = wanted
        is_first = pipeline.stage == 0
        try:
            report = carry_out_repacking(
                pipeline, optimizer, repacking, max_bytes=max_bytes, on_release=self._options.on_release, step=step
            )
        except NotEnoughMemoryError as error:
            self.decision.refuse()
            if is_first:
                logger.warning("step %d: no rank is released: %s", step, error)
            return None
        self.decision.succeed()
        rebalancing.continue_on(report.stages, report.boundaries)
        if is_first:
            logger.info(
                "step %d: %d of %d stages go on, ranks %s are released: %.1f MB, %.2f s; expected step %.0f -> %.0f ms",
                step,
                len(report.stages),
                len(proposal.stage_s),
                list(report.released),
                report.moved_bytes / 1e6,
                report.seconds,
                1e3 * proposal.step_s,
                1e3 * proposal.expected_step_s,
            )
        return proposal, report
