"""What measuring takes on this rank, by what blocks take that are not measured.

Wall time cannot tell: in a pipeline it is mostly that of other stages, and it varies by more than a profile takes. The
processor's time can: what hooks and decisions spend is in it, waits are not. On CPU that is the time of the thread that
trains, which runs forward, backward and all hooks of them; on a GPU backward has a thread of its own, so there it is
the time of the process. There it also counts what the device would have hidden, so the cost is rather overrated.

A step's length is wall time on a GPU only, whose work is none of the processor's. On CPU it is the processor's time,
too: where ranks share a core, steps take longer, and measuring does as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median

import torch

from zeroresize.policy.pipeline.profile_cadence import SpentSeconds

#: Of so many blocks the middle one is usual.
_REMEMBERED = 15
#: Fewer tell nothing.
_LEAST_BLOCKS = 3


class BlockSeconds:
    """Takes the seconds of blocks, usual ones and measured ones.

    Args:
        device: where layers are computed.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._usual: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._profiled_s = self._handling_s = 0.0
        self._begun_s, self._begun_at = 0.0, 0.0
        self._last_s: float | None = None  # of the block before, where it was a usual one

    def begin(self) -> None:
        """Begin a block."""
        now = time.perf_counter() if self._on_gpu else self._clock()
        if self._last_s is not None:
            self._usual.append((self._last_s, now - self._begun_at))
        self._begun_at, self._last_s = now, None
        self._begun_s = self._clock()

    def end(self, *, is_measured: bool, is_usual: bool) -> None:
        """End what is computed in a block."""
        spent_s = self._clock() - self._begun_s
        if is_measured:
            self._profiled_s = spent_s
        elif is_usual:
            self._last_s = spent_s

    def handling(self) -> AbstractContextManager[None]:
        """Count what the block spends as spent on a profile."""
        return self._spending(self._clock)

    def waiting(self) -> AbstractContextManager[None]:
        """Count the wall time of what the block spends as spent on a profile: all stages wait for it."""
        return self._spending(time.perf_counter)

    @contextmanager
    def _spending(self, clock: Callable[[], float]) -> Iterator[None]:
        begin = clock()
        try:
            yield
        finally:
            self._handling_s += clock() - begin

    def forget(self) -> None:
        """Forget what is usual and what was handled, as blocks have other work from now on."""
        self._usual.clear()
        self._last_s, self._handling_s = None, 0.0

    def spent(self) -> SpentSeconds:
        """Return what the block that was measured last has taken, and what was handled since this was last asked."""
        handling_s, self._handling_s = self._handling_s, 0.0
        if len(self._usual) < _LEAST_BLOCKS:
            return SpentSeconds(0.0, self._profiled_s, handling_s, 0.0)
        usual_s, step_s = map(median, zip(*self._usual, strict=True))
        return SpentSeconds(usual_s, self._profiled_s, handling_s, step_s)

    @property
    def _clock(self) -> Callable[[], float]:
        return time.process_time if self._on_gpu else time.thread_time
