"""How long the steps of a run take: the clock of a training, and what the lines of its ``metrics.jsonl`` tell later."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch


class StepClock:
    """Seconds of every step, by wall clock.

    A GPU is synchronised at each :meth:`lap`, whose steps share the time evenly; a CPU needs no synchronisation.

    Args:
        before: seconds of steps of earlier processes, one sequence each.

    Attributes:
        seconds: of this process's steps.
    """

    def __init__(self, device: torch.device, before: Sequence[Sequence[float]] = ()) -> None:
        self._is_of_each = device.type != "cuda"
        self._before, self.seconds = before, list[float]()
        self._pending = self._num_told = 0

    @property
    def by_process(self) -> list[Sequence[float]]:
        """Seconds of all steps, those of this process last."""
        return [*self._before, self.seconds]

    def start(self) -> None:
        """The next step begins now, for example after an evaluation."""
        self._began, self._pending = time.perf_counter(), 0

    def tick(self) -> None:
        """A step is over."""
        self._pending += 1
        if self._is_of_each:
            self._time_pending()

    def lap(self) -> float:
        """Mean seconds of the steps since the last lap; NaN for none."""
        if self._pending:  # on a GPU
            torch.cuda.synchronize()
            self._time_pending()
        since, self._num_told = self.seconds[self._num_told :], len(self.seconds)
        return statistics.fmean(since) if since else math.nan

    def _time_pending(self) -> None:
        now = time.perf_counter()
        self.seconds += [(now - self._began) / self._pending] * self._pending
        self._began, self._pending = now, 0


@dataclass(frozen=True)
class TimedSteps:
    """Steps that were timed together, those between two lines of ``metrics.jsonl``.

    Attributes:
        begin, end: the first of them, and the step after the last.
        seconds: their mean.
        from_step: the first step of the process that made them.
    """

    begin: int
    end: int
    seconds: float
    from_step: int


def timed_steps(lines: Iterable[Mapping[str, Any]]) -> list[TimedSteps]:
    """All steps of a run, in order, by its lines of logged steps."""
    steps: list[TimedSteps] = []
    end = 0
    for line in lines:
        if line["kind"] == "step":
            begin, end = end, line["step"] + 1
            steps.append(TimedSteps(begin, end, line["step_s"], line["from_step"]))
    return steps


def seconds_by_process(steps: Sequence[TimedSteps]) -> list[list[float]]:
    """Seconds of every step, one list for each process that trained a part of the run."""
    by_process = groupby(steps, key=lambda timed: timed.from_step)
    return [
        [timed.seconds for timed in of_process for _ in range(timed.end - timed.begin)] for _, of_process in by_process
    ]


def timing(
    by_process: Sequence[Sequence[float]], *, settle_steps: int, batch_size: int = 1, steps_per_epoch: int = 1
) -> dict[str, float]:
    """What the seconds of a run's steps say of its speed; NaN where there are none.

    ``step_ms`` is their median, an undisturbed step, and ``mean_step_ms`` their mean, which also holds the steps before
    a plan follows a straggler. ``images_per_s`` and ``epoch_s``, the seconds of training of an epoch without evaluation
    and checkpoints, come from the mean.

    Args:
        by_process: one sequence for each process that trained a part of the run.
        settle_steps: so many first steps of each, at most half, are left out.
    """
    settled = [
        step_s for seconds in by_process for step_s in seconds[min(settle_steps, len(seconds) // 2) :]
    ] or [math.nan]  # fmt: skip
    mean_s = statistics.fmean(settled)
    return {
        "step_ms": 1e3 * statistics.median(settled),
        "mean_step_ms": 1e3 * mean_s,
        "images_per_s": batch_size / mean_s,
        "epoch_s": mean_s * steps_per_epoch,
    }
