"""zeroresize demo shows a slow rank, and what balancing makes of it; all of it ends with the command."""

import os
import signal
import subprocess
import sys
import time

import pytest

from zeroresize.commands import demo
from zeroresize.commands.__main__ import main
from zeroresize.commands.statuses import statuses_of


@pytest.mark.slow
def test_rank_1_is_slow_and_computes_less_until_it_is_fast_again(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert main(["demo", "--seconds", "40", "--chi", "8", "--folder", str(folder)]) == 0
    (statuses,) = statuses_of([str(folder)]).values()
    advised = [status for status in statuses if status.state == "advice" and status.ranks]
    balanced = [status for status in statuses if status.state == "on" and status.step > advised[-1].step]
    assert any(status.ranks[1].slow_since is not None for status in [*advised, *balanced] if status.ranks)
    assert all(status.ranks[1].share == 1.0 for status in advised)
    assert min(status.ranks[1].share for status in balanced) < 0.8
    assert statuses[-1].state == "ended"
    said = capsys.readouterr().out
    names = [line.partition(":")[0] for line in said.splitlines() if line.startswith("phase ")]
    assert list(dict.fromkeys(names))[:4] == [f"phase {number} of 4" for number in range(1, 5)]
    assert f"zeroresize report {folder}" in said and "χ = 8 on rank 1, mode exact" in said


def test_the_table_is_of_the_phases(capsys):
    steps = demo._Steps(chi=4.0)
    steps.updates = [(0, 0.1)] * 4 + [(1, 0.5)] * 4 + [(2, 0.5)] * 2 + [(2, 0.2)] * 3 + [(3, 0.1)] * 4
    from rich.console import Console

    Console(width=120).print(steps.table())
    even, off, exact, _ = [line.split()[-5:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert even[-3:] == ["100", "ms", "1.00"] and off[-3:] == ["500", "ms", "5.00"]
    assert exact == ["200", "ms", "2.00", "2.50", "times"]  # settled
    steps.updates = []
    steps.table()  # where nothing was measured


def test_a_rank_that_is_killed_ends_it_with_an_error(tmp_path, capsys, monkeypatch):
    received = demo.StartedRanks.received

    def kill_and_receive(started, seconds):
        started._processes[1].kill()
        return received(started, seconds)

    monkeypatch.setattr(demo.StartedRanks, "received", kill_and_receive)
    assert main(["demo", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "zeroresize demo: rank 1 was ended by SIGKILL\n"


@pytest.mark.parametrize("during", ["two ranks start", pytest.param("phase 1 of 4", marks=pytest.mark.slow)])
def test_ctrl_c_ends_all_ranks_without_a_traceback(during, tmp_path):
    command = [sys.executable, "-m", "zeroresize.commands", "demo", "--folder", str(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stdout:
        if line.startswith(during):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.stderr.read() == "zeroresize demo: interrupted\n"
    assert process.wait() == 130
    with pytest.raises(ProcessLookupError):
        while True:  # until nobody of it is left, or the time limit of tests
            os.killpg(process.pid, 0)
            time.sleep(0.05)
