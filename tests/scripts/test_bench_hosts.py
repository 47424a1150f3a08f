"""scripts/bench/hosts.py in small, on every host that is installed: what it tells, not what it measures."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.transformers
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("host", ["dtensor", "transformers", "colossalai", "deepspeed", "megatron"])
def test_a_host_alone_and_balanced_are_told_side_by_side(tmp_path, host):
    if host in ("colossalai", "deepspeed", "megatron") and importlib.util.find_spec(host) is None:
        pytest.skip(f"{host} is not installed")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "scripts.bench.hosts", "--host", host, "--quick"]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    undisturbed, disturbed = json.loads((tmp_path / "runs" / "bench" / f"hosts_{host}.json").read_text())["results"]
    assert undisturbed["chi"] == 1.0 and disturbed["chi"] == 4.0
    assert list(undisturbed["of_host"]) == ["host", "host again", "off", "exact"]
    assert undisturbed["of_host"]["host"] == [1.0, 1.0, 1.0]
    assert list(disturbed["to_bound"]) == ["homogeneous", "host, nobody slow", "host", "off", "exact"]
    assert disturbed["of_homogeneous"]["homogeneous"][0] == 1.0 and disturbed["to_bound"]["homogeneous"] <= 1.0
