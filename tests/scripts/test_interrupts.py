"""Ctrl-C ends a program of this project with one line and status 130, and all processes that it has started."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import vit_examples

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, time
from pathlib import Path

from scripts.bench.common import results_of_ranks, run


def wait(rank, folder, tell):
    Path(folder, f"rank {os.getpid()}").touch()
    time.sleep(600)


if __name__ == "__main__":
    run(lambda: results_of_ranks(wait, 2, sys.argv[1], 1))
"""


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_program_with_ranks_ends_with_one_line_and_leaves_none(tmp_path):
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").write_text("import scripts")
    (package / "waits.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "program.waits", str(tmp_path)]
    process = subprocess.Popen(
        command, env=environment, cwd=tmp_path, text=True, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        while len(ranks := list(tmp_path.glob("rank *"))) < 2 and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said = process.communicate(timeout=60)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    lines = [line for line in said.splitlines() if not line.startswith("waits, ")]  # of progress
    assert (process.returncode, lines) == (130, ["interrupted"])
    assert len(ranks) == 2 and not any(is_alive(int(rank.name.split()[1])) for rank in ranks)


def test_other_errors_are_told_as_ever_and_one_rank_speaks_for_all(monkeypatch, capsys):
    error = ValueError("wrong")
    vit_examples.end_program(ValueError, error, None)
    assert "ValueError: wrong" in capsys.readouterr().err
    for rank, said in (("1", ""), ("0", "interrupted\n")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            vit_examples.end_program(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert (ended.value.code, capsys.readouterr().err) == (130, said)
