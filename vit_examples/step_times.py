"""How long the steps of a run take: the clock of a training, and what the lines of its ``metrics.jsonl`` tell later."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
        is_of_each: whether they are measured step by step.
    """

    def __init__(self, device: torch.device, before: Sequence[Sequence[float]] = ()) -> None:
        self.is_of_each = device.type != "cuda"
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
        if self.is_of_each:
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
    """Steps that were timed together; one by one where the run tells it.

    Attributes:
        begin, end: the first of them, and the one after the last.
        seconds: their mean; None where they were not timed.
        from_step: the first step of the process that made them.
    """

    begin: int
    end: int
    seconds: float | None
    from_step: int = 0


def timed_steps(lines: Iterable[Mapping[str, Any]]) -> list[TimedSteps]:
    """All steps of a run, in order.

    An epoch that has ended tells each step's time, if the run knows it. Else the lines of logged steps tell means.
    """
    ended: list[TimedSteps] = []
    logged: list[TimedSteps] = []  # of the epoch that goes on
    end = from_step = 0
    for line in lines:
        if line["kind"] == "step":
            logged.append(TimedSteps(end, line["step"] + 1, line["step_s"], from_step))
            end = line["step"] + 1
        elif line["kind"] == "epoch":
            end = line["step"] + 1
            from_step = line.get("from_step", from_step)
            begin = end - len(line.get("seconds", ()))
            each = [TimedSteps(step, step + 1, one) for step, one in enumerate(line.get("seconds", ()), begin)]
            ended += [replace(timed, from_step=from_step) for timed in each or logged]
            logged = []
    return ended + logged


def seconds_by_process(steps: Sequence[TimedSteps]) -> list[list[float]]:
    """Seconds of every step that was timed, one list for each process that trained a part of the run."""
    by_process = groupby(steps, key=lambda timed: timed.from_step)
    return [
        [timed.seconds for timed in of_process for _ in range(timed.end - timed.begin) if timed.seconds is not None]
        for _, of_process in by_process
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
