"""Measures a pipeline's layers in the blocks that are due, and takes what that costs."""

from __future__ import annotations

import logging

import torch

from zeroresize.pipeline.block_seconds import BlockSeconds
from zeroresize.pipeline.counted_work import WorkCounter
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.profile_exchange import GatheredProfile, MeasuredBlock, ProfileExchange
from zeroresize.pipeline.profiling import LayerProfiler
from zeroresize.pipeline.replicas import PipelineReplicas
from zeroresize.policy.pipeline.profile_cadence import ProfileCadence, profile_cost

logger = logging.getLogger(__name__)


class Measuring:
    """Follows a pipeline from block to block; each is begun, ended, and then exchanged.

    Args:
        pipeline: whose layers are measured.
        optimizer: whose state is counted; None for none.
        cadence: of profiles; it learns what they cost.
        counter: of the layers' work.
        counts_activations: as of :class:`~zeroresize.pipeline.LayerProfiler`.

    Attributes:
        seconds: what blocks take.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer | None,
        cadence: ProfileCadence,
        counter: WorkCounter,
        *,
        counts_activations: bool,
    ) -> None:
        self._pipeline, self._optimizer, self._counts_activations = pipeline, optimizer, counts_activations
        self._cadence, self._counter = cadence, counter
        self._logged_every = cadence.every
        self.seconds = BlockSeconds(pipeline.device)
        self._measured: MeasuredBlock | None = None
        self._exchange: ProfileExchange | None = None

    def connect(self) -> None:
        """Make the group over which profiles travel; collective."""
        self._exchange = ProfileExchange(self._pipeline)

    def disconnect(self) -> None:
        """Leave that group."""
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None

    def begin_block(self) -> None:
        """Begin a block."""
        self._counter.begin_block()
        self.seconds.begin()

    def new_profiler(self) -> LayerProfiler:
        """Return what measures this block."""
        return LayerProfiler(self._pipeline, self._optimizer, counts_activations=self._counts_activations)

    def end_block(self, profiler: LayerProfiler | None, *, is_usual: bool) -> None:
        """End what is computed in a block.

        Args:
            profiler: what has measured it; None where nothing has.
            is_usual: whether nothing else has happened in it but training.
        """
        self.seconds.end(is_measured=profiler is not None, is_usual=is_usual)
        self._counter.end_block()
        self._measured = None
        if profiler is not None:
            self._measured = MeasuredBlock(profiler, self._counter.measured_block(), self.seconds.spent())

    def exchange(self, num_blocks: int) -> GatheredProfile | None:
        """Send what was measured in this block, and return what was in an earlier one; collective.

        Errors and arguments are those of :meth:`ProfileExchange.exchange`.
        """
        measured, self._measured = self._measured, None
        assert self._exchange is not None
        if measured is None and not self._exchange.is_busy:
            return None
        with self.seconds.handling():
            return self._exchange.exchange(measured, num_blocks)

    @property
    def is_under_way(self) -> bool:
        """Return whether figures of a block are on their way to the other stages; the same on every rank."""
        return self._exchange is not None and self._exchange.is_busy

    def learn_cost(
        self, gathered: GatheredProfile, replicas: PipelineReplicas | None, *, log_step: int | None = None
    ) -> None:
        """Learn what a profile costs, which decides when the next one is due; collective with replicas.

        Args:
            gathered: what :meth:`exchange` has returned.
            replicas: pipelines beside this one, of which the dearest counts; None for none.
            log_step: how many blocks are over, for the log; None on ranks that do not log.

        Raises:
            ValueError: on every rank, if the work of a layer could not be counted on one.
        """
        cost, num_failed = profile_cost(gathered.spent), float(len(gathered.failed))
        if replicas is not None:
            largest, num_failed = replicas.gather_most(-1.0 if cost is None else cost, num_failed)
            cost = None if largest < 0.0 else largest
        if num_failed:
            where = f"stages {list(gathered.failed)}" if gathered.failed else "a replica of this pipeline"
            why = "" if gathered.error is None else f": {gathered.error}"
            raise ValueError(f"count_work failed on {where}{why}") from gathered.error
        self._cadence.learn(cost)
        every = self._cadence.every
        if not self._logged_every < 2 * every < 4 * self._logged_every:
            self._logged_every = every
            if log_step is not None:
                logger.info(
                    "step %d: layers are measured in one step of %d, as that takes %.1f %% of a step",
                    log_step,
                    every,
                    100.0 * self._cadence.cost,
                )

    def forget_costs(self) -> None:
        """Forget what blocks take, as this stage has other layers from now on."""
        self.seconds.forget()

    def forget_work(self) -> None:
        """Drop profiles that are under way, and what was counted, as it is of work that is no more.

        Every rank calls it alike.
        """
        if self._exchange is not None:
            self._exchange.forget()
        self._counter.forget()
        if self._cadence.costs:  # else what profiles cost would never be known where work changes every few steps
            self.seconds.forget()
