"""What NVML tells of this rank's GPU, if nvidia-ml-py is installed: what throttles it, its temperature, its clock."""

from __future__ import annotations

import importlib
import logging
import threading
from typing import Any

import torch

from zeroresize.policy.slowness.surroundings import GpuState

logger = logging.getLogger(__name__)


class GpuReader:
    """Reads the state of a device; nothing is known of others than CUDA's, or where NVML fails, for good.

    Attributes:
        thread: reads the state, or has read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_over = device, device.type != "cuda"
        self._nvml: Any = None
        self._handle: Any = None
        self._state: GpuState | None = None
        self.thread = threading.Thread()

    def read(self) -> GpuState | None:
        """Return the state at the last call, None where it is not known, and read it again. Nothing waits for NVML."""
        if self._is_over or self.thread.is_alive():
            return None
        state, self._state = self._state, None
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        return state

    def _read(self) -> None:
        try:
            if self._nvml is None:
                nvml: Any = importlib.import_module("pynvml")
                nvml.nvmlInit()
                uuid = torch.cuda.get_device_properties(self._device).uuid
                self._handle, self._nvml = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"), nvml
            nvml = self._nvml
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
            heat = nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
            power = nvml.nvmlClocksThrottleReasonSwPowerCap | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
            throttled = "heat" if reasons & heat else "power" if reasons & power else ""
            celsius = float(nvml.nvmlDeviceGetTemperature(self._handle, nvml.NVML_TEMPERATURE_GPU))
            clock, most = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo
            share = clock(self._handle, nvml.NVML_CLOCK_SM) / most(self._handle, nvml.NVML_CLOCK_SM)
            self._state = GpuState(throttled, celsius, share)
        except Exception as error:
            logger.info("why a GPU is slow is not asked any more: %s", error)
            self._is_over = True
