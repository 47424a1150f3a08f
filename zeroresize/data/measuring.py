"""What this rank's steps take, for decisions on how global batches are divided."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from zeroresize.data.timetable import Part
from zeroresize.measure.clocks import clock_for
from zeroresize.measure.model_steps import ModelSteps
from zeroresize.optim.optimizers import hook_steps
from zeroresize.policy.data.decision import RankWindow
from zeroresize.policy.data.division import Division
from zeroresize.policy.data.lengths import LengthTimes
from zeroresize.policy.slowness.windows import WatchedStep, window_of

#: So much of the memory that is free further samples may take.
_USED_OF_FREE = 0.8


class RankSteps:
    """Measures the steps of this rank, as :func:`zeroresize.watch` does, and those of its optimizer.

    Args:
        before: called before each step of the optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Any, before: Callable[[], None]) -> None:
        self._device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._steps, self._clock, self._lengths = ModelSteps(model), clock_for(self._device), LengthTimes()
        self._before = before
        self._begin: Any = None
        self._unread: deque[tuple[Part, Division]] = deque()
        self._read: list[tuple[WatchedStep, Part, Division]] = []
        self._optimizer_marks: deque[tuple[Any, Any]] = deque()
        self._optimizer_s: list[float] = []
        self._most_samples = 0
        self._unhook = hook_steps(optimizer, before=self._optimizer_begins, after=self._optimizer_ends)

    def end_step(self, part: Part, division: Division) -> None:
        """End a step, in which this rank computed ``part``, as a division gave it."""
        self._unread.append((part, division))
        self._most_samples = max(self._most_samples, part.num_samples)
        for step in self._steps.end_step():
            known, of_division = self._unread.popleft()
            self._read.append((step, known, of_division))
            self._lengths.take(known.length, known.square, step.busy_s)
        while self._optimizer_marks and self._clock.has_passed(self._optimizer_marks[0][1]):
            begin, end = self._optimizer_marks.popleft()
            self._optimizer_s.append(self._clock.seconds(begin, end))
            self._clock.recycle(begin, end)

    def window(self, end_step: int, squares: float) -> RankWindow:
        """Return the window of the steps since the last one, those of the newest division, of samples' ``squares``."""
        steps = [
            replace(step, work=part.length + squares * part.square)
            for step, part, division in self._read
            if division is self._read[-1][-1]
        ]
        window, optimizer_s = window_of(steps, end_step), self._optimizer_s
        excess_s = math.fsum(max(step.busy_s - window.busy_s, 0.0) for step in steps if step.busy_s > 0.0)
        self.forget()
        fixed_s = float(np.median(optimizer_s)) if optimizer_s else 0.0
        return RankWindow(window, fixed_s, excess_s, self._lengths.squares, self._most)

    def forget(self) -> None:
        """Drop the steps since the last window, which would else be kept where nobody asks for one."""
        self._read, self._optimizer_s = [], []

    @property
    def _most(self) -> float:
        """How many samples this rank's memory holds, by what the most so far have taken; infinite on the CPU."""
        if self._device.type != "cuda" or not self._most_samples:
            return math.inf
        free, _ = torch.cuda.mem_get_info(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        free += torch.cuda.memory_reserved(self._device) - allocated
        of_sample = max(torch.cuda.max_memory_allocated(self._device) - allocated, 1) / self._most_samples
        return max(float(_USED_OF_FREE * free // of_sample), self._most_samples)

    def close(self) -> None:
        """Take back all hooks."""
        self._unhook()
        self._steps.close()

    def _optimizer_begins(self) -> None:
        self._before()
        self._begin = self._clock.mark()

    def _optimizer_ends(self) -> None:
        if self._begin is not None:
            self._optimizer_marks.append((self._begin, self._clock.mark()))
            self._begin = None
