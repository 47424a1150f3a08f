"""How long a slow rank is held up after what it executed, and how: by sleeping, or by work on a device's stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from zeroresize.injection.device_delay import CudaDevice, DeviceDelay

#: Delays shorter than this are carried to the next product: sleeping takes some 60 to 100 µs however short it is.
SHORTEST_SLEEP_S = 100e-6


class Delay(Protocol):
    """A delay makes what lies between ``begins`` and ``ends`` take ``chi`` times as long.

    Attributes:
        chi: the straggling skewness χ ≥ 1 in force; a change drops what is still owed.
        num_products: how many products were slowed.
        seconds_added: how many seconds they were slowed by in all.
    """

    chi: float
    num_products: int
    seconds_added: float

    def begins(self) -> None:
        """Note that a product begins."""

    def ends(self, key: Hashable = None) -> None:
        """Delay what follows a product; ``key`` tells apart products that may take different times."""


class HostDelay:
    """Sleeps (χ − 1)× the time of a product, right after it.

    A sleep ends late. The overshoot is taken off the next delays, so that the slowdown is exact on average.

    Args:
        clock: returns the wall time, in seconds.
        sleep: sleeps for so many seconds.
        work_clock: returns the time that a product is measured by, in seconds; None for wall time. With
            ``time.thread_time``, products that lose their core to another process for a while are not held up the
            longer for it.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        work_clock: Callable[[], float] | None = None,
    ) -> None:
        self._clock, self._sleep, self._work_clock = clock, sleep, work_clock or clock
        self._chi = 1.0
        self._owed_s = 0.0
        self._start_s: float | None = None
        self.num_products = 0
        self.seconds_added = 0.0

    @property
    def chi(self) -> float:
        return self._chi

    @chi.setter
    def chi(self, chi: float) -> None:
        if chi != self._chi:
            self._chi = chi
            self._owed_s = 0.0

    def begins(self) -> None:
        self._start_s = self._work_clock() if self._chi > 1.0 else None

    def ends(self, key: Hashable = None) -> None:
        if self._start_s is None:
            return
        self._owed_s += (self._chi - 1.0) * (self._work_clock() - self._start_s)
        end_s = self._clock()
        self._start_s = None
        self.num_products += 1
        if self._owed_s < SHORTEST_SLEEP_S:
            return
        self._sleep(self._owed_s)
        slept_s = self._clock() - end_s
        self._owed_s -= slept_s
        self.seconds_added += slept_s


class Delays:
    """The delays of one rank: one on the host, one for each GPU that it computes on, all with the same χ."""

    def __init__(
        self,
        host: HostDelay | None = None,
        make_device_delay: Callable[[torch.device], Delay] = lambda device: DeviceDelay(CudaDevice(device)),
    ) -> None:
        self._host = host or HostDelay()
        self._make_device_delay = make_device_delay
        self._devices: dict[torch.device, Delay] = {}

    def on(self, device: torch.device) -> Delay:
        """Return the delay for products on ``device``."""
        if device.type != "cuda":
            return self._host
        if device not in self._devices:
            self._devices[device] = self._make_device_delay(device)
            self._devices[device].chi = self.chi
        return self._devices[device]

    @property
    def chi(self) -> float:
        """The skewness χ ≥ 1 in force."""
        return self._host.chi

    @chi.setter
    def chi(self, chi: float) -> None:
        for delay in self._all:
            delay.chi = chi

    @property
    def num_products(self) -> int:
        """How many products were slowed, on whatever device."""
        return sum(delay.num_products for delay in self._all)

    @property
    def seconds_added(self) -> float:
        """How many seconds they were slowed by in all."""
        return sum(delay.seconds_added for delay in self._all)

    @property
    def _all(self) -> list[Delay]:
        return [self._host, *self._devices.values()]


class Delayed:
    """The base of what slows a rank by ``delays``, and tells of them."""

    def __init__(self, delays: Delays | None) -> None:
        self._delays = delays or Delays()

    @property
    def chi(self) -> float:
        """The skewness χ ≥ 1 in force."""
        return self._delays.chi

    @chi.setter
    def chi(self, chi: float) -> None:
        self._delays.chi = chi

    @property
    def num_products(self) -> int:
        """How often something was slowed: products, or forwards and backwards of whole layers."""
        return self._delays.num_products

    @property
    def seconds_added(self) -> float:
        """How many seconds that was in all."""
        return self._delays.seconds_added
