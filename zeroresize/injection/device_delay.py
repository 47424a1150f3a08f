"""A delay on a GPU's stream, so that streams and their overlaps behave as on a slow device."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zeroresize.measure.clocks import DeviceClock
from zeroresize.utils.torch_private import spin_on_device

_CALIBRATION_CYCLES = 10_000_000


class SleepingDevice(Protocol):
    """A device as a delay needs it: marks on the current stream, and a kernel that only spins."""

    def mark(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float: ...

    def has_passed(self, mark: Any) -> bool: ...

    def wait_for(self, mark: Any) -> None: ...

    def recycle(self, marks: list[Any]) -> None: ...

    def spin(self, cycles: int) -> None: ...


class CudaDevice(DeviceClock):
    """The current stream of a CUDA device."""

    def wait_for(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has passed ``mark``."""
        mark.synchronize()

    def spin(self, cycles: int) -> None:
        """Keep the stream busy for so many clock cycles."""
        with torch.cuda.device(self._device):
            spin_on_device(cycles)


@dataclass(frozen=True)
class _Execution:
    """One product on the stream whose times are not read yet."""

    key: Hashable
    chi: float
    begin: Any
    end: Any
    delayed: Any
    expected_s: float
    spun_s: float


class DeviceDelay:
    """Enqueues (χ − 1)× the device time of a product as a spinning kernel, right behind it.

    How long a product will take is known from earlier ones with the same key: device events, read when the device has
    passed them, so only the first execution of a key waits for the device. What an estimate or the calibration of the
    spinning kernel got wrong is added to, or taken off, a later delay once it is known.

    Args:
        device: the device's clock and spinning kernel.
    """

    def __init__(self, device: SleepingDevice) -> None:
        self._device = device
        self._chi = 1.0
        self._owed_s = 0.0
        self._cycles_per_s = 0.0
        self._begin: Any = None
        self._times_s: dict[Hashable, deque[float]] = {}
        self._unread: deque[_Execution] = deque()
        self.num_products = 0
        self.seconds_added = 0.0

    @property
    def chi(self) -> float:
        """The skewness χ ≥ 1 in force; a change drops what is still owed."""
        return self._chi

    @chi.setter
    def chi(self, chi: float) -> None:
        if chi != self._chi:
            self._chi = chi
            self._owed_s = 0.0

    def begins(self) -> None:
        if self._chi > 1.0:
            self._calibrate()
            self._begin = self._device.mark()

    def ends(self, key: Hashable = None) -> None:
        if self._begin is None:
            return
        end = self._device.mark()
        self._read_what_has_passed()
        expected_s = self._expected_s(key, end)
        wanted_s = (self._chi - 1.0) * expected_s + self._owed_s
        spun_s = max(wanted_s, 0.0)
        self._owed_s = wanted_s - spun_s
        if spun_s > 0.0:
            self._device.spin(round(spun_s * self._cycles_per_s))
        delayed = self._device.mark()
        self._unread.append(_Execution(key, self._chi, self._begin, end, delayed, expected_s, spun_s))
        self._begin = None
        self.num_products += 1
        self.seconds_added += spun_s

    def _expected_s(self, key: Hashable, end: Any) -> float:
        """Seconds the product that ended at ``end`` is thought to take."""
        if key not in self._times_s:
            self._device.wait_for(end)
            self._times_s[key] = deque([self._device.seconds(self._begin, end)], maxlen=9)
        return statistics.median(self._times_s[key])

    def _read_what_has_passed(self) -> None:
        while self._unread and self._device.has_passed(self._unread[0].delayed):
            execution = self._unread.popleft()
            product_s = self._device.seconds(execution.begin, execution.end)
            delay_s = self._device.seconds(execution.end, execution.delayed)
            self._device.recycle([execution.begin, execution.end, execution.delayed])
            self._times_s[execution.key].append(product_s)
            if execution.chi == self._chi:
                too_short_s = (self._chi - 1.0) * (product_s - execution.expected_s)
                self._owed_s += too_short_s - (delay_s - execution.spun_s)

    def _calibrate(self) -> None:
        """Measure once how fast the spinning kernel spins; waits for the device."""
        if self._cycles_per_s:
            return
        self._device.spin(1)  # loads the kernel
        begin = self._device.mark()
        self._device.spin(_CALIBRATION_CYCLES)
        end = self._device.mark()
        self._device.wait_for(end)
        self._cycles_per_s = _CALIBRATION_CYCLES / self._device.seconds(begin, end)
        self._device.recycle([begin, end])
