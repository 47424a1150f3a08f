"""How long a delay is, on a host that sleeps too long and on a device whose clock drifts."""

import pytest
import torch
from helpers.virtual_training import FakeTime

from zeroresize.injection import delay
from zeroresize.injection.delay import CpuDelay, CudaDevice, DeviceDelay


def slept_by(chis, product_s, num_products=1, overshoot_s=0.0, lost_s=0.0, **options):
    """A host's clock, and its delay, after products with one χ after another; some lose their core meanwhile."""
    fake, worked = FakeTime(overshoot_s), FakeTime()
    slow = CpuDelay(clock=fake.clock, sleep=fake.sleep, work_clock=worked.clock if lost_s else None)
    for chi in chis:
        slow.chi = chi
        for _ in range(num_products):
            slow.begins()
            fake.now_s += product_s + lost_s
            worked.now_s += product_s
            slow.ends()
    return fake, slow


@pytest.mark.parametrize("product_s", [20e-6, 300e-6, 5e-3])
@pytest.mark.parametrize("chi", [1.1, 8.0])
def test_delay_is_exact_on_average_though_sleeping_ends_late(product_s, chi):
    fake, slow = slept_by([chi], product_s, num_products := 1000, overshoot_s=80e-6)
    assert fake.now_s == pytest.approx(num_products * product_s * chi, abs=200e-6)
    assert slow.seconds_added == pytest.approx(fake.now_s - num_products * product_s)
    assert slow.num_products == num_products and min(fake.sleeps) >= 100e-6


def test_each_long_product_is_followed_at_once_by_its_own_work_and_a_change_drops_the_debt():
    assert slept_by([3.0, 3.0], 1e-3)[0].sleeps == pytest.approx([2e-3] * 2)
    assert slept_by([3.0, 3.0], 1e-3, lost_s=5e-3)[0].sleeps == pytest.approx([2e-3] * 2)
    assert slept_by([2.0, 1.0, 3.0], 1e-3, overshoot_s=50e-3)[0].sleeps == pytest.approx([1e-3, 2e-3])


class FakeDevice:
    """A stream in virtual time: marks are positions on it, passed only ``lag`` marks later."""

    def __init__(self, lag=12):
        self.now_s, self.lag, self.marks, self.recycled, self.num_waits = 0.0, lag, [], 0, 0
        self.seconds_per_cycle = 1e-9
        self.launch_s = 3e-6

    def run(self, seconds):
        self.now_s += seconds

    def mark(self):
        self.marks.append((len(self.marks), self.now_s))
        return self.marks[-1]

    def seconds(self, begin, end):
        return end[1] - begin[1]

    def has_passed(self, mark):
        return len(self.marks) - mark[0] > self.lag

    def wait_for(self, mark):
        self.num_waits += 1

    def recycle(self, *marks):
        self.recycled += len(marks)

    def spin(self, cycles):
        self.now_s += cycles * self.seconds_per_cycle + self.launch_s


def slowed_on(device, slow, products):
    """Seconds of products and of everything on the stream."""
    begin_s, products_s = device.now_s, 0.0
    for key, seconds in products:
        slow.begins()
        device.run(seconds)
        products_s += seconds
        slow.ends(key)
    return products_s, device.now_s - begin_s


def test_device_delay_is_exact_though_clocks_drift_and_products_vary():
    device = FakeDevice()
    slow = DeviceDelay(device)
    slowed_on(device, slow, [("small", 1e-3)])
    assert device.marks == [] and device.now_s == 1e-3, "nothing without slowness"
    slow.chi = 4.0
    slowed_on(device, slow, [("small", 5e-3), ("large", 9e-3)])  # first executions load kernels
    num_waits = device.num_waits
    device.seconds_per_cycle = 1.3e-9  # the clock falls after calibration
    products = [("small", 50e-6 * (1 + 0.2 * (i % 3))) for i in range(500)] + [("large", 2e-3)] * 200
    products_s, total_s = slowed_on(device, slow, products)
    assert total_s / products_s == pytest.approx(4.0, rel=0.02)
    assert device.num_waits == num_waits == 3  # calibration, and the first execution of either key
    assert slow.num_products == 702
    assert device.recycled > 2000


def test_each_device_has_its_own_delay_with_the_same_chi(monkeypatch):
    monkeypatch.setattr(delay, "CudaDevice", lambda device: FakeDevice())
    slow = delay.Slowdown()
    slow.chi = 2.0
    first, second, host = (slow.delay_on(torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu"))
    assert first is slow.delay_on(torch.device("cuda:0")) and first is not second
    assert [first.chi, second.chi, host.chi] == [2.0] * 3
    slow.chi = 5.0
    assert [first.chi, second.chi, host.chi] == [5.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("chi", [2.0, 8.0])
def test_a_product_on_a_gpu_takes_chi_times_as_long(chi):
    matrix = torch.rand(2048, 2048, device="cuda")
    slow = DeviceDelay(CudaDevice(torch.device("cuda")))

    def device_s(num_products):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(num_products):
            slow.begins()
            matrix @ matrix
            slow.ends("square")
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    device_s(20)
    plain_s = device_s(200)
    slow.chi = chi
    device_s(20)
    assert device_s(200) / plain_s == pytest.approx(chi, rel=0.1)
