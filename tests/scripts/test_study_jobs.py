"""A study's runs as jobs: what is submitted, on one node and on several, and where nodes are wanted back."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("yaml")

from scripts.study import jobs
from scripts.study.__main__ import all_rows
from scripts.study.grid import Study, read_study

#: Ends by SIGTERM, after a while in which it writes a file.
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.3)
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "began").touch()
time.sleep(60)
"""


@pytest.fixture
def study(tmp_path: Path) -> Study:
    grid = tmp_path / "grid.yaml"
    shared = "{host: torch, training.epochs: 1, training.max_steps_per_epoch: 2, output.save_every: 0}"
    grid.write_text(f"config: demo\nshared: {shared}\ncells:\n  Rd: {{balance.mode: zero-rd}}\n")
    return read_study(grid, tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_in_a_process_of_its_own_trains_a_cell(study: Study, tmp_path: Path) -> None:
    (cell,) = study.cells
    job = jobs.Jobs(tmp_path / "jobs", "local").submit(study, cell)
    try:
        assert job.exception() is None
    finally:
        job.cancel()
    assert all_rows(study, tmp_path / "none.csv")[cell.key]["steps"] == 2


def test_slurm_is_asked_for_the_nodes_that_a_job_names(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("srun", ""), ("sbatch", f'cp "$1" {tmp_path}/script; echo Submitted batch job 7')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    parameters = {"nodes": 2, "gpus_per_node": 1, "slurm_partition": "large"}
    jobs.Jobs(tmp_path / "jobs", None, parameters).submit(study, study.cells[0])
    asked = (tmp_path / "script").read_text().splitlines()
    for line in ("nodes=2", "gpus-per-node=1", "partition=large", "cpus-per-task=1", "time=1440"):
        assert f"#SBATCH --{line}" in asked
    for num_nodes in (0, 3):
        with pytest.raises(ValueError, match=f"cell 'Rd': 2 ranks do not divide evenly among {num_nodes} nodes"):
            jobs.Jobs(tmp_path / "jobs", "slurm", {"nodes": num_nodes}).submit(study, study.cells[0])


def test_ranks_on_several_nodes_meet_at_the_first(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    place = SimpleNamespace(rank=1, master_addr="node7", master_port=29001)
    monkeypatch.setattr(jobs.submitit.helpers, "TorchDistributedEnvironment", lambda: place)
    monkeypatch.setattr(jobs, "started", lambda command, *_: commands.append(command))
    with pytest.raises(TypeError):  # nothing was started
        jobs.Training(study, study.cells[0], 2)()
    for option in ("--nnodes=2", "--node-rank=1", "--nproc-per-node=1", "--master-addr=node7", "--master-port=29001"):
        assert option in commands[0]
    assert commands[0][-1] == "--set=output.progress=false"


def test_ranks_save_before_a_job_gives_its_nodes_back(study: Study, tmp_path: Path) -> None:
    training = jobs.Training(study, study.cells[0], 1)
    training.process = subprocess.Popen([sys.executable, "-c", SAVES, str(tmp_path)])
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    again = training.checkpoint().function
    assert (tmp_path / "saved").exists()
    assert (again.cell, again.num_nodes, again.process) == (study.cells[0], 1, None)
    training.process.wait()


@pytest.mark.parametrize("parameters", [{"gpu": 8}, {"nodes": "two"}])
def test_what_submitit_does_not_know_is_an_error(tmp_path: Path, parameters: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"^--job: "):
        jobs.Jobs(tmp_path, "debug", parameters)
