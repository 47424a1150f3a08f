"""vit_examples/minimal.py, which README shows first: it runs as it stands and relieves its straggler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_minimal_example_relieves_its_straggler():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [*torchrun, "-m", "vit_examples.minimal"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"(?m)^zeroresize\.\S+: step \d+: rank 1 (?:is \S+ times slower|lends \S+ %)", result.stderr)
    assert lines, f"what README shows first is not seen: {result.stderr}"
    computed = [int(share) for share in re.findall(r"rank 1 computes (\d+)% of an even share", result.stdout)]
    assert computed[0] == 100, "nothing is known before the first exchange"
    assert min(computed) <= 70, "in equal times a rank that is four times as slow as the other does 40 %, or nearly"
