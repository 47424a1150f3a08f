"""Ranks that a command starts end with it, however it ends; who does not come is named."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest

from zeroresize.commands import ranks
from zeroresize.commands.errors import CommandError
from zeroresize.commands.ranks import Member, StartedRanks, member_of_job

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS")


def meet(member, send, factor):
    send([int(text) for text in member.meet("here", str(factor * member.rank))])


def raise_on_rank_1(member, send):
    if member.rank == 0:
        member.meet("where rank 1 never comes", "")
    raise ValueError("it is broken\nat length")


def be_killed_on_rank_1(member, send):
    if member.rank == 0:
        raise RuntimeError("Connection closed by peer")
    os.kill(os.getpid(), signal.SIGKILL)


def stay(member, send):
    send(os.getpid())
    time.sleep(1000.0)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def all_received(started):
    received = []
    while not started.have_ended:
        received += started.received(60.0)
    return received


@pytest.mark.slow
def test_ranks_meet_and_send():
    with StartedRanks(meet, 2, 7) as started:
        assert all_received(started) == [[0, 7]] * 2


@pytest.mark.slow
def test_a_rank_that_raises_is_named_though_another_waits_for_it():
    with StartedRanks(raise_on_rank_1, 2) as started, pytest.raises(CommandError) as raised:
        all_received(started)
    assert str(raised.value) == "rank 1 failed: ValueError: it is broken"


def test_a_rank_that_was_killed_is_named_though_another_says_first_that_it_failed():
    with StartedRanks(be_killed_on_rank_1, 2) as started, pytest.raises(CommandError) as raised:
        for process in started._processes:
            process.join()
        all_received(started)
    assert str(raised.value) == "rank 1 was ended by SIGKILL"


def test_ranks_end_with_the_block():
    pids = []
    with pytest.raises(KeyboardInterrupt), StartedRanks(stay, 2) as started:
        while len(pids) < 2:
            pids += started.received(60.0)
        raise KeyboardInterrupt
    assert not any(map(is_alive, pids))


STARTS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_ranks import stay
from zeroresize.commands.ranks import StartedRanks

if __name__ == "__main__":
    with StartedRanks(stay, 2) as started:
        pids = []
        while len(pids) < 2:
            pids += started.received(60.0)
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_ranks_end_with_a_command_that_is_killed(tmp_path):
    program = tmp_path / "starts.py"
    program.write_text(STARTS)
    command = [sys.executable, str(program), os.path.dirname(__file__)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    pids = list(map(int, said.split()))
    assert len(pids) == 2
    while any(map(is_alive, pids)):  # until the time limit of tests
        time.sleep(0.05)


@pytest.fixture
def environment(monkeypatch):
    """Sets these variables of a job alone."""

    def set_alone(**variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_alone()
    monkeypatch.setattr(ranks, "LIMIT", timedelta(seconds=0.5))
    return set_alone


def test_no_job_is_none(environment):
    assert member_of_job() is None
    environment(SLURM_NTASKS="1")
    assert member_of_job() is None


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_a_rank_that_does_not_come_is_named(environment):
    environment(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    member = member_of_job()
    assert (member.rank, member.num_ranks, member.local_rank) == (0, 3, 0)
    member.store.set("the start/2", "")
    with pytest.raises(CommandError, match=r"^rank 1 of 3 did not come to the start within 0.5 s: "):
        member.meet("the start", "")
    member.nodes = ["near", "far", "near"]
    with pytest.raises(CommandError, match=r"^ranks 1, 2 of 3 \(on far, near\) did not come to the end within 0.5 s: "):
        member.meet("the end", "")


def test_a_first_rank_that_does_not_come_is_named(environment):
    port = free_port()
    environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    with pytest.raises(
        CommandError, match=rf"^rank 1: rank 0's store does not answer at 127.0.0.1:{port} within 0.5 s"
    ):
        member_of_job()


def test_slurm_tells_the_rank_and_scontrol_the_first_machine(environment, tmp_path, monkeypatch):
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment(**slurm, SLURM_JOB_ID="7", PATH=str(tmp_path))
    with pytest.raises(CommandError, match=r"^'scontrol show hostnames node\[1-2\]' names no machine: set MASTER_ADDR"):
        member_of_job()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames node[1-2]" ] && echo 127.0.0.1 && echo elsewhere\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("MASTER_PORT", free_port())
    member = member_of_job()
    assert (member.rank, member.num_ranks, member.local_rank) == (0, 2, 0)
    assert isinstance(member, Member) and member.store.host == "127.0.0.1"
    monkeypatch.setenv("SLURM_PROCID", "first")
    with pytest.raises(CommandError, match=r"^SLURM_PROCID='first' is in the environment: a whole number is needed"):
        member_of_job()
