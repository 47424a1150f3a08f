"""The clocks that steps are timed by: the CPU's, and a device's events."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes marks now and turns two of them into seconds, at once or later."""

    #: Whether every mark has passed when it is taken, and none is used again.
    is_immediate: bool

    def mark(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float: ...

    def has_passed(self, mark: Any) -> bool: ...

    def wait_for(self, mark: Any) -> None:
        """Wait until ``mark`` has passed."""

    def enter_main_stream(self) -> None:
        """Begin a step, on the stream that is current now."""

    def is_on_main_stream(self) -> bool:
        """Tell whether work that is started now delays the step."""

    def recycle(self, *marks: Any) -> None:
        """Take back marks that have been read and are not needed again."""


class CpuClock:
    """Reads ``time.perf_counter``: wall time, so that sleeping and being preempted count."""

    is_immediate = True

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def has_passed(self, mark: float) -> bool:
        return True

    def wait_for(self, mark: float) -> None:
        pass

    def enter_main_stream(self) -> None:
        pass

    def is_on_main_stream(self) -> bool:
        return True

    def recycle(self, *marks: float) -> None:
        pass


class DeviceClock:
    """Records events on the current stream of a CUDA device, and uses them again once they have been read."""

    is_immediate = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._main_stream = torch.cuda.current_stream(device)
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1e3

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def wait_for(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def enter_main_stream(self) -> None:
        self._main_stream = torch.cuda.current_stream(self._device)

    def is_on_main_stream(self) -> bool:
        return torch.cuda.current_stream(self._device) == self._main_stream

    def recycle(self, *marks: torch.cuda.Event) -> None:
        self._free.extend(marks)


def clock_for(device: torch.device) -> Clock:
    """Return a clock of device events for a GPU, else the CPU's clock."""
    return DeviceClock(device) if device.type == "cuda" else CpuClock()
