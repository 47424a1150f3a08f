"""The process that keeps the job's store is stopped: nobody waits for it for ever, and processes end as usual."""

import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import pipelines, strategies
from helpers.virtual_training import Run

from zeroresize.comm import rendezvous, words
from zeroresize.comm.groups import CpuGroup, WeightGroup, destroy_side_group, free_group_number, make_side_group
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.pipeline import repack
from zeroresize.plan.strategy import Strategy
from zeroresize.strategy import SwitchableModel
from zeroresize.utils import torch_private

LIMIT = datetime.timedelta(seconds=2)
STORE_IS_GONE = "the job's store cannot be reached"


@pytest.fixture(autouse=True)
def reports_are_not_waited_for(monkeypatch):
    """They cannot be read here."""
    monkeypatch.setattr(words, "WAIT_S", 0.2)


class Job:
    """This rank's view of a job whose store is kept by rank 0, or by a process of its own, as torchrun keeps it."""

    def __init__(self, rank, num_ranks, *, keeper_is_rank_0, limit=LIMIT):
        self.rank = rank
        port_and_pid = torch.zeros(2, dtype=torch.int64)
        if rank == 0:
            port_and_pid[:] = torch.tensor(self._keep_here() if keeper_is_rank_0 else self._keep_elsewhere())
        dist.broadcast(port_and_pid, 0)
        port, self.keeper = port_and_pid.tolist()
        store = self._server if keeper_is_rank_0 and rank == 0 else dist.TCPStore("127.0.0.1", port, timeout=LIMIT)
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)

    def _keep_here(self):
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
        return self._server.port, os.getpid()

    def _keep_elsewhere(self):
        fork = multiprocessing.get_context("fork")
        here, there = fork.Pipe()

        def keep():
            there.send(self._keep_here())
            time.sleep(100)

        fork.Process(target=keep, daemon=True).start()
        return here.recv()

    def stop_keeper(self):
        """On all ranks; whoever keeps the store goes on only after :meth:`end`."""
        dist.all_reduce(torch.ones(1))
        if self.rank == 0:
            os.kill(self.keeper, signal.SIGSTOP)
        time.sleep(0.3)

    def end(self):
        if self.keeper != os.getpid():
            time.sleep(1.0)  # until the other ranks are here, too
            os.kill(self.keeper, signal.SIGCONT)


def known_groups():
    """The names of all process groups that torch knows here."""
    return sorted(torch_private.known_groups().values())


def error_of(call, limit=LIMIT):
    """What ``call()`` raises, within the time limit and some seconds."""
    began = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        assert time.monotonic() - began < limit.total_seconds() + 6
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_epoch_end_names_the_rank_that_is_stopped(run_ranks):
    def train(rank, group):
        job = Job(rank, 3, keeper_is_rank_0=True)
        run = Run(dist.group.WORLD, chi={1: 4.0}, mode="mig", update_every=3)
        run.steps(8)
        job.stop_keeper()
        message = error_of(run.balancer.epoch_end) if rank else ""
        job.end()
        return message

    for text in run_ranks(train, 3, timeout_s=30)[1:]:
        at = "balancer.epoch_end(), after 8 calls of balancer.step()"
        assert f"ranks [0] of the group did not come to {at}: nothing came within 2 s" in text
        assert STORE_IS_GONE in text


@pytest.mark.parametrize("mode", ["mig", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_balancer_needs_no_store_once_it_is_made(run_ranks, mode):
    def train(rank, group):
        job = Job(rank, 2, keeper_is_rank_0=False)
        run = Run(dist.group.WORLD, chi={1: 4.0}, mode=mode, update_every=3)
        run.steps(4)
        job.stop_keeper()
        run.steps(10)
        run.balancer.epoch_end()
        run.balancer.load_state_dict(run.balancer.state_dict())
        run.steps(10)
        run.balancer.close()
        job.end()
        return run.balancer._num_steps

    assert run_ranks(train, 2, timeout_s=30) == [24, 24]


@pytest.mark.slow
def test_making_a_balancer_ends_in_an_error(run_ranks):
    def train(rank, group):
        job = Job(rank, 2, keeper_is_rank_0=False)
        job.stop_keeper()
        message = error_of(lambda: Run(dist.group.WORLD))
        job.end()
        return message

    for text in run_ranks(train, 2, timeout_s=30):
        assert text.startswith(f"{STORE_IS_GONE}: the process that keeps it, usually rank 0's or torchrun's own, ")
        assert "did not come to agree on what to balance within 2 s" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: CpuGroup(dist.group.WORLD, {}),
        lambda: WeightGroup(dist.group.WORLD, torch.device("cpu")),
        lambda: make_side_group(dist.group.WORLD, [1, 0], 0),
    ],
    ids=["numbers", "weights", "any"],
)
def test_connecting_ends_in_an_error_where_the_store_stops_after_all_have_come(run_ranks, monkeypatch, make):
    connect = Rendezvous.connect

    def train(rank, group):
        job = Job(rank, 2, keeper_is_rank_0=False)

        def connect_stopped(self, make, *destroy):
            def stop_and_make():
                job.stop_keeper()
                return make()

            return connect(self, stop_and_make, *destroy)

        monkeypatch.setattr(Rendezvous, "connect", connect_stopped)
        message = error_of(make)
        job.end()
        assert known_groups() == [dist.group.WORLD.group_name]
        return message

    for text in run_ranks(train, 2, timeout_s=30):
        assert "but could not be connected within " in text and STORE_IS_GONE in text


#: Of the groups whose ranks make further ones; the job's own time limit is much longer.
GROUP_LIMIT = datetime.timedelta(seconds=5)


class PatientJob(Job):
    """A job that waits for minutes, with a group of all its ranks that waits for seconds."""

    def __init__(self, rank, num_ranks):
        super().__init__(rank, num_ranks, keeper_is_rank_0=False, limit=datetime.timedelta(minutes=5))
        self.group = dist.new_group(list(range(num_ranks)), timeout=GROUP_LIMIT)

    def fails_while_the_store_is_stopped(self, call, goes_on):
        """The error of ``call()`` while the store's keeper is stopped, which leaves no group behind.

        When the keeper runs again, a group that comes too late is given up, and ``goes_on()`` is possible.
        """
        known = known_groups()
        self.stop_keeper()
        message = error_of(call, GROUP_LIMIT)
        assert known_groups() == known
        self.end()
        dist.all_reduce(torch.ones(1))
        time.sleep(1.0)  # for what comes too late
        assert known_groups() == known
        goes_on()
        return message


def assert_store_is_named(text):
    assert STORE_IS_GONE in text and "did not come to make a process group of ranks [" in text, text
    assert "within 2.5 s, half of the time limit of their process group" in text, text


@pytest.mark.slow
def test_repacking_ends_in_an_error_and_leaves_everything_as_it_was(run_ranks):
    def train(rank, group):
        job = PatientJob(rank, 3)
        training = pipelines.pipeline_of(job.group)
        optimizer = torch.optim.AdamW(training.parameters())
        pipelines.train_step(training, optimizer, 0)
        before, boundaries = pipelines.held(training, optimizer), training.boundaries

        def goes_on():
            assert training.boundaries == boundaries and training.process_group is job.group
            pipelines.assert_same(pipelines.held(training, optimizer), before)
            pipelines.train_step(training, optimizer, 1)
            report = repack(training, optimizer, num_stages=2)
            assert report.is_released == (rank not in report.remaining)
            if not report.is_released:
                pipelines.train_step(training, optimizer, 2)

        return job.fails_while_the_store_is_stopped(lambda: repack(training, optimizer, num_stages=2), goes_on)

    for text in run_ranks(train, 3, timeout_s=40):
        assert "nothing has moved or changed: ranks [0, 1] of the group failed" in text, text
        assert_store_is_named(text)


@pytest.mark.slow
def test_making_and_extending_a_switchable_model_end_in_errors(run_ranks):
    replicas, divided, halves = Strategy(4), Strategy(1, 2, 2), Strategy(2, 2, ranks=(0, 3, 1, 2))

    def train(rank, group):
        job = PatientJob(rank, 4)
        models = []

        def make():
            layers = strategies.layers_of()
            models.append(SwitchableModel(layers, strategies=[replicas, divided], process_group=job.group))

        messages = [job.fails_while_the_store_is_stopped(make, make)]
        (model,) = models

        def goes_on():
            assert model.strategies == [replicas, divided]
            model.add(halves)
            model.switch_to(halves)
            strategies.assert_holds(model, strategies.whole_tensors(strategies.layers_of()))
            model.collect()

        messages.append(job.fails_while_the_store_is_stopped(lambda: model.add(halves), goes_on))
        return messages

    for texts in run_ranks(train, 4, timeout_s=60):
        for text in texts:
            assert_store_is_named(text)


@pytest.mark.slow
def test_a_group_that_comes_too_late_is_destroyed(run_ranks, monkeypatch):
    connect, come_too_late = Rendezvous.connect, []
    monkeypatch.setattr(rendezvous, "_GRACE", datetime.timedelta(seconds=0.2))  # torch waits for the store, too

    def train(rank, group):
        job = PatientJob(rank, 2)
        known = known_groups()

        def connect_stopped(self, make, destroy):
            def stop_and_make():
                job.stop_keeper()
                return make()

            def see_and_destroy(made):
                come_too_late.append(dist.get_process_group_ranks(made))
                destroy(made)

            return connect(self, stop_and_make, see_and_destroy)

        monkeypatch.setattr(Rendezvous, "connect", connect_stopped)
        message = error_of(lambda: make_side_group(job.group, [1, 0], 0), GROUP_LIMIT)
        monkeypatch.setattr(Rendezvous, "connect", connect)
        job.end()
        begin = time.monotonic()
        while not come_too_late or known_groups() != known:
            assert time.monotonic() - begin < 10.0
            time.sleep(0.1)
        assert come_too_late == [[1, 0]]
        made = make_side_group(job.group, [1, 0], free_group_number())
        dist.all_reduce(torch.ones(1), group=made)
        destroy_side_group(made)
        assert known_groups() == known
        return message

    for text in run_ranks(train, 2, timeout_s=40):
        assert "but could not be connected within 2.5 s, half of the time limit" in text and STORE_IS_GONE in text


PROGRAM = """
import os, signal, sys
rank, folder, *sys.path[:0] = int(sys.argv[1]), *sys.argv[2:]
import datetime, time, torch, torch.distributed as dist
torch.set_num_threads(1)
limit = datetime.timedelta(seconds=3)
port_file = os.path.join(folder, "port")
if rank == 0:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
    with open(port_file + ".new", "w") as file:
        file.write(str(store.port))
    os.rename(port_file + ".new", port_file)
else:
    while not os.path.exists(port_file):
        time.sleep(0.02)
    with open(port_file) as file:
        store = dist.TCPStore("127.0.0.1", int(file.read()), timeout=datetime.timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
from helpers.virtual_training import Run
group = dist.new_group([0, 1], timeout=limit)
run = Run(group, mode="mig", update_every=3)
run.steps(4)
dist.all_reduce(torch.ones(1))
if rank == 0:
    time.sleep(0.3)  # until rank 1 has all that it waits for
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1.0)
run.balancer.epoch_end()
"""


@pytest.mark.slow
def test_a_process_that_waited_in_vain_for_the_store_ends_by_itself(tmp_path):
    """The thread that still waits for an answer does not keep it."""
    root = Path(__file__).parents[2]
    paths = [root / "tests", root]
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path, *paths], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        _, printed = ranks[1].communicate(timeout=60)
        assert ranks[1].returncode == 1
        assert "RuntimeError: ranks [0] of the group did not come to balancer.epoch_end()" in printed
        assert STORE_IS_GONE in printed
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
