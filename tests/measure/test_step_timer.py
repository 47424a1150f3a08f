"""Busy time and product time: what counts, what does not, and when it can be read."""

import itertools
import math
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from zeroresize.config import BalanceConfig
from zeroresize.measure import rank_monitor
from zeroresize.measure.clocks import CpuClock, clock_for
from zeroresize.measure.step_timer import LayerTimer, StepTimer
from zeroresize.plan.group import Workshares


def one_step(clock, timer, spared_share=0.5):
    """1 s of other work, a product of 2 s of which 1.5 s are multiplication, a wait of 4 s."""
    timer.begin_step(Workshares(spared_share))
    clock.advance(1.0)
    timer.product_begins()
    clock.advance(0.5)
    timer.gemm_begins(())
    clock.advance(1.5)
    timer.gemm_ends(())
    timer.product_ends()
    timer.wait_begins()
    clock.advance(4.0)
    timer.wait_ends()


def test_busy_time_leaves_out_waits_and_splits_products(clock, timer):
    for _ in range(2):
        one_step(clock, timer)
        (times,) = timer.end_step()
        assert (times.busy_s, times.gemm_s, times.gather_fill_s, times.shares.spared) == (3.0, 1.5, 0.5, 0.5)
        timer.product_begins()  # between two steps nothing counts
        clock.advance(100.0)
        timer.product_ends()
    timer.begin_step()
    clock.advance(3.0)
    (times,) = timer.end_step()
    assert (times.busy_s, times.outside_s) == (3.0, 0.0), "without a product nothing is outside"


def test_what_lies_before_the_first_product_is_outside_but_for_its_waits(clock, timer):
    timer.begin_step()
    clock.advance(3.0)
    timer.wait_begins()  # as for a batch that another rank sends
    clock.advance(2.0)
    timer.wait_ends()
    clock.advance(1.0)
    for _ in range(2):
        timer.product_begins()
        clock.advance(1.0)
        timer.product_ends()
        clock.advance(10.0)
    timer.wait_begins()
    clock.advance(5.0)
    timer.wait_ends()
    timer.backward_ends()
    clock.advance(7.0)
    timer.product_begins()  # of the next forward
    timer.product_ends()
    timer.backward_ends()
    clock.advance(60.0)  # the optimizer's step
    timer.wait_begins()  # as for the norm of all gradients
    clock.advance(3.0)
    timer.wait_ends()
    clock.advance(40.0)
    (times,) = timer.end_step()
    assert (times.outside_s, times.wait_s, times.busy_s) == (4.0 + 7.0, 10.0, 4.0 + 22.0 + 7.0 + 100.0)
    assert (times.inside.busy_s, times.update_s) == (122.0, 100.0)


def test_step_that_the_device_has_not_passed_is_read_at_the_next_end(clock, timer):
    clock.passed = 0.0
    one_step(clock, timer, 0.25)
    assert timer.end_step() == []
    clock.passed = clock.now
    one_step(clock, timer, 0.75)
    assert timer.end_step()[0].shares.spared == 0.25


def test_a_wait_belongs_to_the_plan_in_force_or_to_none(clock, timer, monkeypatch):
    """On a device an interval of one step holds the step before, or none."""
    monkeypatch.setattr(rank_monitor, "StepTimer", lambda clock: timer)
    measured = rank_monitor.RankMonitor({}, BalanceConfig(update_every=1))
    seen = []
    for wait_s, spared_share, device_keeps_up in (
        (1.0, 0.0, True), (2.0, 0.0, True), (3.0, 0.5, True), (4.0, 0.5, True), (5.0, 0.5, False)
    ):  # fmt: skip
        clock.passed = clock.now if seen and device_keeps_up else -1.0
        measured.begin_step(Workshares(spared_share), is_forced=False)
        clock.advance(1.0)
        timer.wait_begins()
        clock.advance(wait_s)
        timer.wait_ends()
        measured.end_step()
        measured.learn()
        seen.append(measured.wait_s)
    nothing_read, of_another_plan = math.nan, math.nan
    assert seen == pytest.approx([nothing_read, 1.0, of_another_plan, 3.0, nothing_read], nan_ok=True)


def test_waiting_for_a_late_rank_is_not_busy_time_whoever_calls_the_collective_or_in_which_thread(run_ranks):
    """The late rank sleeps before each collective; the other's busy time does not see it, nor does it lose its own.

    A checkpoint saved in the background waits for its collectives while this thread computes.
    """

    def measure(rank, group):
        x, timer, busy = torch.ones(4), StepTimer(CpuClock()), {}
        collectives = {
            "async all_reduce": lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
            "all_gather": lambda: dist.all_gather([torch.empty(4) for _ in range(2)], x, group=group),
            "broadcast": lambda: dist.broadcast(x, src=0, group=group),
            "barrier": lambda: dist.barrier(group=group),
        }
        for name, collective in collectives.items():
            dist.barrier(group=group)
            timer.begin_step()
            time.sleep(0.3 if rank == 1 else 0.05)
            collective()
            busy[name] = timer.end_step()[0].busy_s
        background = dist.new_group([0, 1])
        dist.barrier(group=group)
        timer.begin_step()
        thread = threading.Thread(target=dist.barrier, kwargs={"group": background})
        if rank == 0:
            thread.start()
        time.sleep(0.3)
        in_background_s = timer.end_step()[0].busy_s
        if rank == 1:
            thread.start()
        thread.join()
        return busy, in_background_s

    (early, beside_early_s), (late, beside_late_s) = run_ranks(measure, 2)
    for name in early:
        if name != "broadcast":  # its source waits for nobody
            assert early[name] < 0.2, name
        assert early[name] >= 0.05
        assert 0.3 <= late[name] < 0.5, name
    assert min(beside_early_s, beside_late_s) >= 0.3


def test_what_happens_beside_the_main_stream_is_not_counted(clock, timer):
    timer.begin_step()
    clock.on_main_stream = False
    timer.wait_begins()
    clock.advance(5.0)
    timer.wait_ends()
    assert timer.end_step()[0].busy_s == 5.0


def test_a_timer_may_be_closed_at_any_line_of_what_it_is_called_for():
    """The garbage collector closes that of a balancer which was dropped, wherever it runs."""
    timer_file = StepTimer.wait_ends.__code__.co_filename

    def closed_at(number):
        timer, lines = StepTimer(CpuClock()), 0

        def trace(frame, event, _):
            nonlocal lines
            if frame.f_code.co_filename != timer_file:
                return None
            lines += event == "line"
            if event == "line" and lines == number:
                sys.settrace(None)
                timer.close()
            return trace

        tracer = sys.gettrace()
        sys.settrace(trace)
        try:
            timer.begin_step()
            timer.product_begins()
            timer.wait_begins()
            timer.wait_ends()
            timer.gemm_begins(())
            timer.gemm_ends(())
            timer.product_ends()
            timer.wait_begins()
            timer.wait_ends()
            timer.backward_ends()
            timer.end_step()
        finally:
            sys.settrace(tracer)
        return lines >= number

    assert next(number for number in itertools.count(1) if not closed_at(number)) > 50


def test_a_step_of_any_number_of_products_is_measured_in_little_memory_layer_by_layer(clock, timer):
    """With as many marks as without names; half of each product multiplies."""
    probes = [LayerTimer(timer, name) for name in ("up", "down")]
    timer.begin_step()
    for _ in range(20_000):
        for probe, seconds in zip(probes, (0.25, 0.5), strict=True):
            clock.advance(0.5)
            probe.product_begins()
            clock.advance(seconds / 2)
            probe.gemm_begins(())
            clock.advance(seconds / 2)
            probe.gemm_ends(())
            probe.product_ends()
    assert len(timer._step.marks) < 10_000
    num_marks = timer._step.num_marks
    (times,) = timer.end_step()
    assert num_marks == 2 + 4 * 2 * 20_000
    assert times.layers == {"up": 5_000.0, "down": 10_000.0} and times.gemm_s == times.gather_fill_s == 7_500.0


@pytest.mark.gpu
def test_device_events_tell_products_and_waits_apart():
    device = torch.device("cuda")
    timer = StepTimer(clock_for(device))
    x = torch.randn(4096, 4096, device=device)
    for _ in range(2):
        timer.begin_step()
        timer.product_begins()
        timer.gemm_begins(())
        y = x @ x
        timer.gemm_ends(())
        y.index_select(1, torch.arange(0, 4096, 2, device=device))
        timer.product_ends("layer")
        timer.wait_begins()
        torch.cuda._sleep(100_000_000)
        timer.wait_ends()
        timer.end_step()
        torch.cuda.synchronize()
    timer.begin_step()
    times = timer.end_step()[0]
    timer.close()
    assert times.gemm_s > 0 and times.gather_fill_s > 0
    assert times.layers["layer"] == pytest.approx(times.gemm_s + times.gather_fill_s)
    assert times.busy_s < 0.05, "the wait of some 50 ms is left out"
