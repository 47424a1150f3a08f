"""Real contention: competitors take their share of a core and never outlive what started them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vit_examples import contention
from vit_examples.contention import Contention
from vit_examples.stragglers import StragglerConfig, stragglers

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin processes")

COMPETITOR = Path(contention.__file__).with_name("competitor.py")


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_end(pids, limit_s=5.0):
    deadline = time.monotonic() + limit_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def cpu_seconds(pid):
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def keep_busy(cpu_s):
    """Wall seconds that it takes to compute for ``cpu_s`` seconds."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    while time.process_time() - begin_cpu_s < cpu_s:
        sum(range(10_000))
    return time.perf_counter() - begin_s


@pytest.fixture(autouse=True)
def cores_are_given_back():
    before = os.sched_getaffinity(0)
    yield
    assert os.sched_getaffinity(0) == before


def test_a_pinned_loop_takes_chi_times_as_long():
    with Contention(core_index=0) as rank:
        for chi in (2.0, 3.0):
            rank.chi = chi
            before = [cpu_seconds(pid) for pid in rank.pids]
            wall_s = keep_busy(0.3)
            shares = [cpu_seconds(pid) - cpu_s for pid, cpu_s in zip(rank.pids, before, strict=True)]
            # Whoever else is at work on this machine makes all slower, but keeps the shares alike.
            assert shares == [pytest.approx(0.3, rel=0.3)] * round(chi - 1)
            assert wall_s > 0.85 * chi * 0.3


def test_all_threads_are_pinned_and_get_their_cores_back():
    stop, thread_ids = threading.Event(), []

    def wait():
        thread_ids.append(threading.get_native_id())
        stop.wait()

    def cores():
        return [os.sched_getaffinity(thread) for thread in (os.getpid(), *thread_ids)]

    threads = [threading.Thread(target=wait) for _ in range(2)]
    threads[0].start()
    torch.set_num_threads(2)
    allowed = sorted(os.sched_getaffinity(0))
    try:
        with Contention(core_index=len(allowed) + 1) as rank:
            core = allowed[1 % len(allowed)]
            threads[1].start()
            while len(thread_ids) < 2:
                time.sleep(0.01)
            rank.chi = 2.0
            assert cores() == [{core}] * 3
            assert os.sched_getaffinity(rank.pids[0]) == {core}
            assert torch.get_num_threads() == 1
        assert cores() == [set(allowed)] * 3
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
        stop.set()


def test_changes_and_exit_leave_no_competitor_and_dead_ones_are_replaced():
    seen = []
    with pytest.raises(KeyError), Contention(core_index=0) as rank:
        for chi in (3.0, 2.0, 1.0, 2.0, 2.0):
            if chi == rank.chi:
                os.kill(*rank.pids, signal.SIGINT)  # Ctrl-C is for the rank alone
                time.sleep(0.2)
                assert all(map(is_running, rank.pids))
                os.kill(*rank.pids, signal.SIGKILL)
                assert all_end(rank.pids)
            rank.chi = chi
            assert rank.chi == chi and len(rank.pids) == chi - 1
            assert all(map(is_running, rank.pids))
            assert all_end(set(seen) - set(rank.pids), limit_s=0)
            seen += rank.pids
        raise KeyError
    assert len(set(seen)) == 5
    assert all_end(seen, limit_s=0)


def started_in_a_child(pipe, how_to_end):
    rank = Contention(core_index=0)
    rank.__enter__()
    rank.chi = 3.0
    pipe.send(rank.pids)
    how_to_end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_competitors_die_with_their_parent(number):
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=started_in_a_child, args=(sender, signal.pause if number else lambda: None))
    process.start()
    pids = receiver.recv()
    if number:
        assert all(map(is_running, pids))
        os.kill(process.pid, number)
    process.join(10)
    assert len(pids) == 2 and all_end(pids)


def test_what_cannot_start_or_pin_is_an_error(monkeypatch, tmp_path):
    command = [sys.executable, COMPETITOR, "--parent", "1", "--core", str(min(os.sched_getaffinity(0)))]
    ended = subprocess.run(command, capture_output=True, timeout=10)
    assert (ended.returncode, ended.stdout) == (0, b"."), "without its parent it ends at once"
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit(7)")
    with monkeypatch.context() as patch:
        patch.setattr(contention, "_COMPETITOR", broken)
        with pytest.raises(RuntimeError, match="a competitor for cpu did not start"), Contention(core_index=0) as rank:
            rank.chi = 2.0
    with monkeypatch.context() as patch:
        patch.delattr(os, "sched_setaffinity")
        with pytest.raises(RuntimeError, match=r"kind=contend needs to pin.*use kind=sleep"), Contention(core_index=0):
            pass


def test_a_run_contends_on_stragglers_and_pins_every_rank(run_ranks):
    def contended(rank, group):
        allowed = sorted(os.sched_getaffinity(0))
        host = SimpleNamespace(model=nn.Linear(4, 4), tp_group=group, num_ranks=2)
        config = StragglerConfig(kind="contend", schedule="round_robin", chi=3.0)
        pids = []
        run = SimpleNamespace(config=SimpleNamespace(straggler=config), host=host, balancer=None)
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
        with stragglers(run) as set_epoch:
            cores, before = os.sched_getaffinity(0), children.read_text().split()
            for epoch in range(2):
                set_epoch(epoch)
                pids.append([int(pid) for pid in children.read_text().split() if pid not in before])
        assert cores == {allowed[rank % len(allowed)]}
        assert sorted(os.sched_getaffinity(0)) == allowed
        assert all_end([pid for of_epoch in pids for pid in of_epoch], limit_s=0)
        return [len(of_epoch) for of_epoch in pids]

    assert run_ranks(contended, 2) == [[2, 0], [0, 2]]


@pytest.mark.gpu
def test_competitors_slow_a_gpu():
    matrix = torch.rand(4096, 4096, device="cuda", dtype=torch.float16)

    def seconds():
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        for _ in range(3000):  # many turns of the processes
            matrix @ matrix
        torch.cuda.synchronize()
        return time.perf_counter() - begin_s

    seconds()
    with Contention(core_index=0, device="cuda") as rank:
        plain_s = seconds()
        rank.chi = 2.0
        assert 1.6 * plain_s < seconds() < 2.6 * plain_s
        rank.chi = 1.0
        assert seconds() < 1.2 * plain_s
