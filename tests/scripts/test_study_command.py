"""python -m scripts.study as it is called: what it runs, prints and exits with, and what is left when it is killed."""

from __future__ import annotations

import io
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from helpers.runs import written
from rich.console import Console

pytest.importorskip("yaml")

from scripts.study import __main__ as study
from scripts.study import jobs

Command = Callable[..., tuple[object, str]]

#: A training that does what its cell's name asks for: a result, a mistake, or half of a run unless ``again`` is there.
TRAINING = """
import json, pathlib, sys, time
folder = pathlib.Path(next(one for one in sys.argv if "output.folder" in one).partition("output.folder=")[2])
assert not (folder / "metrics.jsonl").exists(), "of another run"
(folder / "metrics.jsonl").write_text('{"kind": "epoch", "test_accuracy": 0.5}\\n')
if "slow" in folder.parent.name and not (folder.parents[3] / "again").exists():
    time.sleep(60)
if "wrong" in folder.parent.name:
    sys.exit("error (rank 0): this cell cannot train")
summary = {"test_accuracy": 0.5, "mean_step_ms": 120.0, "versions": {"torch": "2"}}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``command(*cells, arguments=())``: runs ``python -m scripts.study`` on a grid of such cells, with two seeds.

    Its exit status (None and a text as of ``sys.exit``) and what it prints.
    """
    grid = tmp_path / "grid.yaml"

    def train_command(config: str, overrides: Sequence[str], num_ranks: int) -> list[str]:
        return [sys.executable, "-c", TRAINING, *overrides]

    def run(*cells: str, arguments: Sequence[str] = ()) -> tuple[object, str]:
        grid.write_text("config: demo\nseeds: [0, 1]\ncells:\n" + "".join(f"  {cell}: {{}}\n" for cell in cells))
        printed = io.StringIO()
        monkeypatch.setattr(study, "plain_console", lambda: Console(file=printed, width=200))
        monkeypatch.setattr(jobs, "train_command", train_command)
        monkeypatch.setattr(sys, "argv", ["study", str(grid), "--output", str(tmp_path / "runs"), *arguments])
        try:
            status: object = study.main()
        except SystemExit as ended:
            status = ended.code
        return status, printed.getvalue()

    return run


def test_the_command_runs_what_is_not_finished_and_tabulates_all(tmp_path: Path, command: Command) -> None:
    assert command("first")[0] is None
    table = tmp_path / "runs" / "grid.csv"
    assert written(table) == [("first", "0"), ("first", "1")]
    assert [row["accuracy_by_epoch"] for row in study.read_table(table)] == ["0.5", "0.5"]
    began_ns = (tmp_path / "runs/grid/first/seed0/metrics.jsonl").stat().st_mtime_ns
    status, printed = command("first", "second")
    assert status is None
    assert written(table) == [(cell, seed) for seed in "01" for cell in ("first", "second")]
    assert (tmp_path / "runs/grid/first/seed0/metrics.jsonl").stat().st_mtime_ns == began_ns
    assert re.search(r"first .* 2 .* 120 ", printed) and re.search(r"second .* 2 .* 120 ", printed)


def test_a_dry_run_says_what_is_done_and_writes_nothing(tmp_path: Path, command: Command) -> None:
    command("first")
    shutil.rmtree(tmp_path / "runs/grid/first/seed1")
    (tmp_path / "runs/grid.csv").unlink()
    before = sorted(tmp_path.rglob("*"))
    status, printed = command("first", "second", arguments=["--dry-run"])
    assert status is None
    assert printed.splitlines()[:4] == [
        "done  first, seed 0",
        "to do  second, seed 0",
        "to do  first, seed 1",
        "to do  second, seed 1",
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_the_table_goes_where_it_is_asked_for_and_counts_from_there(tmp_path: Path, command: Command) -> None:
    table = tmp_path / "elsewhere" / "table.csv"
    assert command("first", arguments=["--csv", str(table)])[0] is None
    assert written(table) == [("first", "0"), ("first", "1")] and not (tmp_path / "runs/grid.csv").exists()
    shutil.rmtree(tmp_path / "runs")  # as on another machine
    _, printed = command("first", arguments=["--csv", str(table), "--dry-run"])
    assert printed.splitlines()[:2] == ["done  first, seed 0", "done  first, seed 1"]


def test_failed_cells_are_the_exit_status_and_run_again(tmp_path: Path, command: Command) -> None:
    for _ in range(2):
        status, printed = command("wrong", "right")
        assert isinstance(status, str)  # sys.exit prints it, and the status is 1
        failed = re.findall(r"error: cell 'wrong', seed (\d) failed with code 1; from .*\n.*this cell cannot", status)
        assert failed == ["0", "1"]
        assert re.search(r"right .* 2 .* 120 ", printed)
        assert written(tmp_path / "runs/grid.csv") == [("right", "0"), ("right", "1")]


@pytest.mark.parametrize("arguments", [["--set", "training.epochs=0"], ["--set", "none.such=1"]])
def test_a_mistake_is_told_before_anything_runs(tmp_path: Path, command: Command, arguments: list[str]) -> None:
    status, _ = command("first", arguments=arguments)
    assert isinstance(status, str) and status.startswith("error: ")
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_is_one_line(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run_study", interrupted)
    status, _ = command("one")
    assert status == 130
    assert capsys.readouterr().err == "interrupted: the same command goes on where it was\n"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody that a parent was killed")
@pytest.mark.parametrize("end", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_study_that_is_killed_within_a_cell_loses_that_cell_only(
    tmp_path: Path, command: Command, end: signal.Signals
) -> None:
    fork = multiprocessing.get_context("fork")
    killed = fork.Process(target=command, args=("first", "slow", "third"))
    killed.start()
    half = tmp_path / "runs/grid/slow/seed0/metrics.jsonl"
    deadline = time.monotonic() + 30
    while not half.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert half.exists()
    os.kill(killed.pid, end)
    killed.join(30)
    assert killed.exitcode not in (None, 0)
    table = tmp_path / "runs/grid.csv"
    assert written(table) == [("first", "0")]
    finished_ns = (tmp_path / "runs/grid/first/seed0/summary.json").stat().st_mtime_ns
    (tmp_path / "again").touch()
    status, _ = command("first", "slow", "third")
    assert status is None
    assert written(table) == [(cell, seed) for seed in "01" for cell in ("first", "slow", "third")]
    assert (tmp_path / "runs/grid/first/seed0/summary.json").stat().st_mtime_ns == finished_ns
