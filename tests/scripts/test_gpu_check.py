"""What scripts/gpu_check.py finds on CPUs, where it judges no times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import gpu_check

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_small_check_on_cpus_passes_and_is_written_down(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "scripts.gpu_check", "--small", "--chi", "2"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "runs" / "bench" / "gpu_check.json").read_text())
    judged = {what: is_met for what, *_, is_met in result["checks"]}
    assert judged == {
        "weights, float64": True,
        "there and back, float32": True,
        "moves, float32": None,
        "there and back, bfloat16": True,
        "moves, bfloat16": None,
        "nobody is slow": None,
        "χ = 2": None,
    }


def test_what_is_not_as_it_must_be_fails():
    checks = [("a", "", "", True), ("b", "", "", None)]
    assert not gpu_check.has_failed(checks) and gpu_check.has_failed([*checks, ("c", "", "", False)])
