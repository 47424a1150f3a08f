"""Launch files for eight GPUs check themselves where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "launch"


def run(script, *arguments):
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.slow
def test_dry_run_checks_the_model_on_eight_ranks():
    for arguments, parameters in (
        (["launch_8gpu.sh"], "1,208,870,928"),
        (["slurm_8gpu.sbatch", "--config", "vit_3b"], "2,719,276,048"),
    ):
        finished = run(*arguments, "--dry-run")
        assert finished.returncode == 0, finished.stderr
        assert "8 ranks" in finished.stdout and parameters in finished.stdout


def test_outside_slurm_the_right_command_is_named():
    finished = run("slurm_8gpu.sbatch")
    assert finished.returncode == 2
    assert "--dry-run" in finished.stderr


def test_one_node_is_launched_over_loopback(tmp_path):
    """The interpreter is one that says what it was asked to run."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    (tmp_path / "srun").write_text('#!/bin/sh\nshift\n"$@"\n')
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    inside_slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_GPUS_ON_NODE": "8"}
    for script, variables in (("launch_8gpu.sh", {}), ("slurm_8gpu.sbatch", inside_slurm)):
        environment = {**os.environ, **variables, "PYTHON": str(python), "PATH": path}
        said = subprocess.check_output(["bash", SCRIPTS / script, "--seed", "3"], env=environment, text=True)
        expected = "-m vit_examples.one_node --nproc-per-node 8 -m vit_examples.train --config vit_1b --seed 3\n"
        assert said == expected
