"""What NVML tells of a GPU, by a module that stands in for it; nothing fails or waits where it does."""

import sys
import threading
import types

import pytest
import torch

from zeroresize.measure.gpu_state import GpuReader
from zeroresize.policy.slowness.surroundings import GpuState

DEVICE = torch.device("cuda", 0)


class Nvml:
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    nvmlClocksThrottleReasonSwPowerCap, nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x4, 0x80
    nvmlClocksThrottleReasonSwThermalSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 0x20, 0x40

    def __init__(self):
        self.reasons, self.num_read = 0, 0
        self.nvmlInit = lambda: None
        self.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
        self.nvmlDeviceGetTemperature = lambda handle, sensor: 87
        self.nvmlDeviceGetClockInfo = lambda handle, clock: 990
        self.nvmlDeviceGetMaxClockInfo = lambda handle, clock: 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        assert handle == "GPU-8-4-4"
        self.num_read += 1
        return self.reasons


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    properties = types.SimpleNamespace(uuid="8-4-4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def nvml(monkeypatch):
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return nvml


def read(reader):
    reader.read()
    reader.thread.join(10.0)
    return reader.read()


@pytest.mark.parametrize(
    ("reasons", "throttled"), [(0, ""), (0x1, ""), (0x4, "power"), (0x80, "power"), (0x20, "heat"), (0x44, "heat")]
)
def test_what_throttles_the_temperature_and_the_clock(nvml, reasons, throttled):
    nvml.reasons = reasons
    assert read(GpuReader(DEVICE)) == GpuState(throttled, 87.0, 0.5)


def test_nobody_waits_for_nvml_and_what_it_told_long_ago_is_not_known(nvml):
    goes_on = threading.Event()
    reader = GpuReader(DEVICE)
    assert read(reader) is not None
    reader.thread.join(10.0)
    nvml.nvmlDeviceGetClockInfo = lambda handle, clock: goes_on.wait(10.0) and 990
    reader.read()
    num_read = nvml.num_read
    assert [reader.read() for _ in range(5)] == [None] * 5 and nvml.num_read <= num_read + 1
    goes_on.set()
    reader.thread.join(10.0)
    assert reader.read().clock == 0.5
    reader.thread.join(10.0)


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTemperature"])
def test_where_nvml_fails_nothing_is_known(nvml, fails):
    def fail(*_):
        raise RuntimeError("no driver")

    setattr(nvml, fails, fail)
    reader = GpuReader(DEVICE)
    assert [read(reader) for _ in range(3)] == [None] * 3
    assert nvml.num_read <= 1


def test_where_nvml_is_missing_or_there_is_no_gpu_nothing_is_known(nvml, monkeypatch):
    reader = GpuReader(torch.device("cpu"))
    assert reader.read() is None and not reader.thread.is_alive()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read(GpuReader(DEVICE)) is None
