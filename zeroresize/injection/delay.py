"""How long a slow rank is held up after what it executed, and how: by sleeping, or by work on a device's stream."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from zeroresize.measure.clocks import DeviceClock
from zeroresize.utils.torch_private import spin_on_device

#: Delays shorter than this are carried to the next product: sleeping takes some 60 to 100 µs however short it is.
SHORTEST_SLEEP_S = 100e-6
#: A device spins for so many cycles to tell how long one is.
_CALIBRATION_CYCLES = 10_000_000
#: A product is expected to take the median of so many of its kind before.
_MOST_KEPT = 9


class Delay(ABC):
    """Makes what lies between ``begins`` and ``ends`` take ``chi`` times as long; counts products and seconds added."""

    def __init__(self) -> None:
        self._chi = 1.0
        self._owed_s = 0.0
        self.num_products = 0
        self.seconds_added = 0.0

    @property
    def chi(self) -> float:
        """The straggling skewness χ ≥ 1 in force; a change drops what is still owed."""
        return self._chi

    @chi.setter
    def chi(self, chi: float) -> None:
        if chi != self._chi:
            self._chi = chi
            self._owed_s = 0.0

    @abstractmethod
    def begins(self) -> None:
        """Note that a product begins."""

    @abstractmethod
    def ends(self, key: Hashable = None) -> None:
        """Delay what follows a product; ``key`` tells apart products that may take different times."""


class CpuDelay(Delay):
    """Sleeps (χ − 1)× the time of a product, right after it.

    A sleep ends late. The overshoot is taken off the next delays, so that the slowdown is exact on average. With a
    ``work_clock`` such as ``time.thread_time``, products that lose their core for a while are held up no longer for it.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        work_clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        self._clock, self._sleep, self._work_clock = clock, sleep, work_clock or clock
        self._start_s: float | None = None

    def begins(self) -> None:
        self._start_s = self._work_clock() if self._chi > 1.0 else None

    def ends(self, key: Hashable = None) -> None:
        if self._start_s is None:
            return
        self._owed_s += (self._chi - 1.0) * (self._work_clock() - self._start_s)
        end_s = self._clock()
        self._start_s = None
        self.num_products += 1
        if self._owed_s >= SHORTEST_SLEEP_S:
            self._sleep(self._owed_s)
            slept_s = self._clock() - end_s
            self._owed_s -= slept_s
            self.seconds_added += slept_s


class CudaDevice(DeviceClock):
    """The current stream of a CUDA device."""

    def spin(self, cycles: int) -> None:
        """Keep the stream busy for so many clock cycles."""
        with torch.cuda.device(self._device):
            spin_on_device(cycles)


class _Execution(NamedTuple):
    """One product on the stream whose times are not read yet, between three marks."""

    key: Hashable
    chi: float
    begin: Any
    end: Any
    delayed: Any
    expected_s: float
    spun_s: float


class DeviceDelay(Delay):
    """Enqueues (χ − 1)× the device time of a product as a spinning kernel, right behind it.

    So streams and their overlaps behave as on a slow device. How long a product will take is known from earlier ones
    with the same key: device events, read when the device has passed them, so only the first execution of a key waits
    for the device. What an estimate or the calibration got wrong is added to, or taken off, a later delay.
    """

    def __init__(self, device: CudaDevice) -> None:
        super().__init__()
        self._device = device
        self._cycles_per_s = 0.0
        self._begin: Any = None
        self._times_s: dict[Hashable, deque[float]] = {}
        self._unread: deque[_Execution] = deque()

    def begins(self) -> None:
        if self._chi > 1.0:
            if not self._cycles_per_s:
                self._calibrate()
            self._begin = self._device.mark()

    def ends(self, key: Hashable = None) -> None:
        if self._begin is None:
            return
        end = self._device.mark()
        self._read_what_has_passed()
        if key not in self._times_s:
            self._device.wait_for(end)
            self._times_s[key] = deque([self._device.seconds(self._begin, end)], maxlen=_MOST_KEPT)
        expected_s = statistics.median(self._times_s[key])
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

    def _read_what_has_passed(self) -> None:
        while self._unread and self._device.has_passed(self._unread[0].delayed):
            key, chi, begin, end, delayed, expected_s, spun_s = self._unread.popleft()
            product_s, delay_s = self._device.seconds(begin, end), self._device.seconds(end, delayed)
            self._device.recycle(begin, end, delayed)
            self._times_s[key].append(product_s)
            if chi == self._chi:
                self._owed_s += (chi - 1.0) * (product_s - expected_s) - (delay_s - spun_s)

    def _calibrate(self) -> None:
        """Measure how fast the spinning kernel spins; waits for the device."""
        self._device.spin(1)  # loads the kernel
        begin = self._device.mark()
        self._device.spin(_CALIBRATION_CYCLES)
        end = self._device.mark()
        self._device.wait_for(end)
        self._cycles_per_s = _CALIBRATION_CYCLES / self._device.seconds(begin, end)
        self._device.recycle(begin, end)


class Slowdown:
    """The base of what slows this rank: a delay on the CPU, and one for each GPU that it computes on, of one χ."""

    def __init__(self, cpu: CpuDelay | None = None) -> None:
        self._cpu = cpu or CpuDelay()
        self._devices: dict[torch.device, DeviceDelay] = {}

    def delay_on(self, device: torch.device) -> Delay:
        """Return the delay for products on ``device``."""
        if device.type != "cuda":
            return self._cpu
        if device not in self._devices:
            self._devices[device] = DeviceDelay(CudaDevice(device))
            self._devices[device].chi = self._cpu.chi
        return self._devices[device]

    @property
    def chi(self) -> float:
        """The skewness χ ≥ 1 in force."""
        return self._cpu.chi

    @chi.setter
    def chi(self, chi: float) -> None:
        for delay in self._all:
            delay.chi = chi
        self._chi_has_changed()

    def _chi_has_changed(self) -> None:
        """Do what a new χ asks for besides."""

    @property
    def num_products(self) -> int:
        """How often something was slowed: products, or forwards and backwards of whole layers."""
        return sum(delay.num_products for delay in self._all)

    @property
    def seconds_added(self) -> float:
        """How many seconds that was in all."""
        return sum(delay.seconds_added for delay in self._all)

    @property
    def _all(self) -> list[Delay]:
        return [self._cpu, *self._devices.values()]
