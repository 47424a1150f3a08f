"""The stages send each other profiles of layers while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from weakref import finalize

from zeroresize.comm.cpu_group import CpuGroup
from zeroresize.comm.exchange import Exchange
from zeroresize.comm.whereabouts import Call
from zeroresize.pipeline.counted_work import CountedBlock
from zeroresize.pipeline.pipeline import Pipeline
from zeroresize.pipeline.profiling import LayerProfiler
from zeroresize.policy.pipeline.profile_cadence import SpentSeconds
from zeroresize.policy.pipeline.profiles import PipelineProfile

_NUM_SPENT = len(fields(SpentSeconds))


@dataclass(frozen=True, eq=False)
class MeasuredBlock:
    """Hold what one stage knows of a block that was measured.

    Attributes:
        profiler: the seconds and bytes of its layers.
        counted: their work, by which seconds become those of the mean block.
        spent: what measuring takes.
    """

    profiler: LayerProfiler
    counted: CountedBlock
    spent: SpentSeconds

    def figures(self) -> list[float]:
        """Return what the other stages are sent, equally many numbers on all of them."""
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


class ProfileExchange:
    """Sends what was measured in one block and brings what all stages measured to the end of a later one.

    It has a group of its own, on CPU, so nothing of it waits for the pipeline's messages, nor they for it. What was
    sent is waited for, never polled: all ranks get a profile at the end of the same block. On a GPU the figures are
    read one block late, when they are done, so the device is never waited for while it has nothing to do.

    Its constructor is collective.

    Raises:
        RuntimeError: if not all ranks come within the time limit of the pipeline's group.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._is_read_late = pipeline.device.type == "cuda"
        self._exchange = Exchange(CpuGroup(pipeline.process_group, {}))
        self.close: Callable[[], object] = finalize(self, self._exchange.close)
        self._unread: MeasuredBlock | None = None
        self._sent: MeasuredBlock | None = None
        self._forgotten: tuple[MeasuredBlock | None, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Return whether figures are under way, or wait to be read; the same on every rank."""
        return self._sent is not None or self._unread is not None

    def forget(self) -> None:
        """Drop what is under way, as it is of work that is no more; every rank calls it alike."""
        self._exchange.where.num_work_changes += 1
        self._forgotten = self._sent, self._unread

    def exchange(self, measured: MeasuredBlock | None, num_blocks: int) -> GatheredProfile | None:
        """Send what was measured in this block, and return what was in an earlier one, where it has come.

        Collective: every rank calls it at the end of each block.

        Args:
            measured: this block; None where it was not measured.
            num_blocks: how many blocks are over.

        Raises:
            RuntimeError: if a rank does not come within the time limit of the pipeline's group, naming it; on every
                rank, if they have called :meth:`forget` unequally often.
        """
        self._exchange.where.call, self._exchange.where.num_steps = Call.STEP, num_blocks
        rows = self._exchange.collect()
        sent = None if self._sent in self._forgotten else self._sent
        gathered = None if rows is None or sent is None else _gathered(sent, rows)
        self._sent = measured
        if self._is_read_late:
            self._sent, self._unread = self._unread, measured
        if self._sent is not None:
            self._exchange.post(self._sent.figures())
        self._forgotten = tuple(one for one in self._forgotten if one in (self._sent, self._unread))
        return gathered


def _gathered(sent: MeasuredBlock, rows: list[list[float]]) -> GatheredProfile:
    profile = sent.profiler.profile_of([row[_NUM_SPENT + 1 :] for row in rows])
    failed = tuple(stage for stage, row in enumerate(rows) if row[_NUM_SPENT])
    return GatheredProfile(profile, tuple(SpentSeconds(*row[:_NUM_SPENT]) for row in rows), failed, sent.counted.error)
