"""Launch files for eight GPUs check themselves where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


def run(script, *arguments):
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["bash", str(SCRIPTS / script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        (["launch_8gpu.sh"], "1,208,870,928"),
        (["slurm_8gpu.sbatch"], "1,208,870,928"),
        (["slurm_8gpu.sbatch", "--config", "vit_3b"], "2,719,276,048"),
    ],
)
def test_dry_run_checks_the_model_on_eight_ranks(arguments, parameters):
    finished = run(*arguments, "--dry-run")
    assert finished.returncode == 0, finished.stderr
    assert "one of 8 ranks" in finished.stdout
    assert parameters in finished.stdout


def test_dry_run_refuses_what_eight_gpus_cannot_share():
    finished = run("launch_8gpu.sh", "--dry-run", "--set", "model.num_heads=4")
    assert finished.returncode == 2
    assert "model.num_heads=4 does not divide by the 8" in finished.stderr


def test_outside_slurm_the_right_command_is_named():
    finished = run("slurm_8gpu.sbatch")
    assert finished.returncode == 2
    assert "--dry-run" in finished.stderr
