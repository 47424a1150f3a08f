"""Measures a pipeline's layers in the blocks that are due, tells all stages of it, and takes what that costs.

Figures travel over a group of their own, on CPU, so nothing of them waits for the pipeline's messages, nor they for
them. What was sent is waited for, never polled: all ranks get a profile at the end of the same later block. On a GPU
the figures are read one block late, when they are done, so the device is never waited for while it has nothing to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from weakref import finalize

import torch

from zeroresize.comm.exchange import Exchange
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.words import Call
from zeroresize.pipeline.block_seconds import BlockSeconds
from zeroresize.pipeline.counted_work import CountedBlock, WorkCounter
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.profiling import LayerProfiler
from zeroresize.pipeline.replicas import PipelineReplicas
from zeroresize.policy.pipeline.profile_cadence import ProfileCadence, SpentSeconds, profile_cost
from zeroresize.policy.pipeline.profiles import PipelineProfile

logger = logging.getLogger(__name__)

_NUM_SPENT = len(fields(SpentSeconds))


@dataclass(frozen=True, eq=False)
class _MeasuredBlock:
    """What one stage knows of a block: its layers, their work, and what measuring takes."""

    profiler: LayerProfiler
    counted: CountedBlock
    spent: SpentSeconds

    def figures(self) -> list[float]:
        """What the other stages are sent, equally many numbers on all of them."""
        failed = float(self.counted.error is not None)
        return [*astuple(self.spent), failed, *self.profiler.figures(self.counted.mean_seconds)]


@dataclass(frozen=True)
class GatheredProfile:
    """Hold what all stages have measured.

    Attributes:
        profile: of the block.
        spent: [S] what measuring takes on each stage.
        failed: the stages on which the work of a layer could not be counted.
        error: why, on this one; None where it could.
    """

    profile: PipelineProfile
    spent: tuple[SpentSeconds, ...]
    failed: tuple[int, ...]
    error: Exception | None


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
        self._close: Callable[[], object] = lambda: None
        #: What was measured in this block; on a GPU in the block before; what is under way; what of it is of no use.
        self._measured: _MeasuredBlock | None = None
        self._unread: _MeasuredBlock | None = None
        self._sent: _MeasuredBlock | None = None
        self._forgotten: tuple[_MeasuredBlock | None, ...] = ()

    def connect(self) -> None:
        """Make the group over which profiles travel, and leave the one before; collective.

        Raises:
            RuntimeError: if not all ranks come within the time limit of the pipeline's group.
        """
        self.disconnect()
        self._exchange = Exchange(CpuGroup(self._pipeline.process_group, {}))
        self._close = finalize(self, self._exchange.close)

    def disconnect(self) -> None:
        """Leave that group."""
        self._close()
        self._unread = self._sent = None
        self._forgotten = ()

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
            self._measured = _MeasuredBlock(profiler, self._counter.measured_block(), self.seconds.spent())

    @property
    def is_under_way(self) -> bool:
        """Return whether figures of a block are on their way to the other stages; the same on every rank."""
        return self._sent is not None or self._unread is not None

    def exchange(self, num_blocks: int) -> GatheredProfile | None:
        """Send what was measured in this block, and return what was in an earlier one; collective at the end of each.

        Args:
            num_blocks: how many blocks are over.

        Raises:
            RuntimeError: if a rank does not come within the time limit of the pipeline's group, naming it; on every
                rank, if they have called :meth:`forget_work` unequally often.
        """
        measured, self._measured = self._measured, None
        if measured is None and not self.is_under_way:
            return None
        with self.seconds.handling():
            self._exchange.where.call, self._exchange.where.num_steps = Call.STEP, num_blocks
            rows = self._exchange.collect()
            sent = None if self._sent in self._forgotten else self._sent
            self._sent = measured
            if self._pipeline.device.type == "cuda":
                self._sent, self._unread = self._unread, measured
            if self._sent is not None:
                self._exchange.post(self._sent.figures())
            self._forgotten = tuple(block for block in self._forgotten if block in (self._sent, self._unread))
            return None if rows is None or sent is None else _gathered(sent, rows)

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
        self._exchange.where.num_work_changes += 1
        self._forgotten = self._sent, self._unread
        self._counter.forget()
        if self._cadence.costs:  # else what profiles cost would never be known where work changes every few steps
            self.seconds.forget()


def _gathered(sent: _MeasuredBlock, rows: list[list[float]]) -> GatheredProfile:
    profile = sent.profiler.profile_of([row[_NUM_SPENT + 1 :] for row in rows])
    failed = tuple(stage for stage, row in enumerate(rows) if row[_NUM_SPENT])
    return GatheredProfile(profile, tuple(SpentSeconds(*row[:_NUM_SPENT]) for row in rows), failed, sent.counted.error)
