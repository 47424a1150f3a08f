"""Seconds of every iteration of a run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch


class StepClock:
    """Seconds of every iteration, by wall clock. A GPU is synchronised at each :meth:`lap`, whose iterations share the
    time evenly; a CPU needs no synchronisation.

    Args:
        before: seconds of iterations of earlier processes, one sequence each.
        since_lap: those of them that no lap was told of yet.

    Attributes:
        seconds: of this process's iterations.
        is_of_each: whether they are measured one by one.
    """

    def __init__(
        self, device: torch.device, before: Sequence[Sequence[float]] = (), since_lap: Sequence[float] = ()
    ) -> None:
        self._is_gpu = device.type == "cuda"
        self.is_of_each = not self._is_gpu
        self._before, self._carried = before, list(since_lap)
        self.seconds: list[float] = []
        self._pending, self._num_told = 0, 0

    @property
    def by_process(self) -> list[Sequence[float]]:
        """Seconds of all iterations, those of this process last."""
        return [*self._before, self.seconds]

    @property
    def num_since_lap(self) -> int:
        """Iterations since the last lap."""
        return len(self._carried) + len(self.seconds) - self._num_told + self._pending

    def start(self) -> None:
        """The next iteration begins now, for example after an evaluation."""
        self._began, self._pending = time.perf_counter(), 0

    def tick(self) -> None:
        """An iteration is over."""
        self._pending += 1
        if not self._is_gpu:
            self._time_pending()

    def lap(self) -> float:
        """Mean seconds of the iterations since the last lap; NaN for none."""
        since = self.since_lap()
        self._num_told, self._carried = len(self.seconds), []
        return statistics.fmean(since) if since else math.nan

    def since_lap(self) -> list[float]:
        """Seconds of the iterations since the last lap; a GPU is synchronised."""
        if self._pending:  # on a GPU
            torch.cuda.synchronize()
            self._time_pending()
        return self._carried + self.seconds[self._num_told :]

    def _time_pending(self) -> None:
        now = time.perf_counter()
        self.seconds += [(now - self._began) / self._pending] * self._pending
        self._began, self._pending = now, 0


def num_settling(seconds: Sequence[float], settle_steps: int) -> int:
    """How many first iterations of a process are not timed: ``settle_steps``, but at most half of them."""
    return min(settle_steps, len(seconds) // 2)
