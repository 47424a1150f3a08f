"""What NVML tells of this rank's GPU, if nvidia-ml-py is installed: what throttles it, its temperature, its clock."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from typing import Any

import torch

from zeroresize.policy.slowness.surroundings import GpuState

logger = logging.getLogger(__name__)

#: It is read no more often than once in so many seconds.
_EVERY_S = 2.0


class GpuReader:
    """Reads the state of a device at times; nothing is known of others than CUDA's, or where NVML fails, for good.

    Args:
        nvml: what stands in for the module ``pynvml``.

    Attributes:
        thread: reads the state, or has read it.
    """

    def __init__(self, device: torch.device, nvml: Any = None) -> None:
        self._device, self._nvml, self._read_at = device, nvml, -_EVERY_S
        self._handle: Any = None
        self._state: GpuState | None = None
        self._is_over = device.type != "cuda"
        self.thread = threading.Thread()

    def read(self) -> GpuState | None:
        """Return the state, as of some seconds ago; None where it is not known. Nothing waits for NVML."""
        if not self._is_over and not self.thread.is_alive() and time.monotonic() >= self._read_at + _EVERY_S:
            self._read_at = time.monotonic()
            self.thread = threading.Thread(target=self._read, daemon=True)
            self.thread.start()
        return self._state

    def _read(self) -> None:
        try:
            if self._handle is None:
                self._nvml = self._nvml or importlib.import_module("pynvml")
                self._nvml.nvmlInit()
                uuid = torch.cuda.get_device_properties(self._device).uuid
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._state = self._of_now()
        except Exception as error:
            logger.info("why a GPU is slow is not asked any more: %s", error)
            self._state, self._is_over = None, True

    def _of_now(self) -> GpuState:
        nvml, handle = self._nvml, self._handle
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        heat = nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        power = nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
        return GpuState(
            throttled="heat" if reasons & heat else "power" if reasons & power else "",
            celsius=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            clock=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            / nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        )
