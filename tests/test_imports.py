"""What is imported by whom."""

import subprocess
import sys

import pytest

import zeroresize as zr

pytestmark = pytest.mark.versions

SEEN = "import sys, zeroresize; print([name for name in sys.argv[1:] if name in sys.modules])"
#: What takes long to import, and is for those who ask for it.
OF_OTHERS = [
    *(f"torch.{name}" for name in ("_dynamo", "distributed.fsdp", "distributed.tensor")),
    "zeroresize.balancer",
]


def test_what_takes_long_is_imported_by_those_only_who_ask_for_it():
    command = [sys.executable, "-c", SEEN, *OF_OTHERS]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_pipelines_need_neither_a_compiler_nor_torchs_schedules():
    script = "import zeroresize as zr, zeroresize.pipeline; zr.StageBalancer; " + SEEN
    command = [sys.executable, "-c", script, "torch._dynamo", "torch.distributed.pipelining"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "[]"


def test_what_is_public_is_there():
    assert all(hasattr(zr, name) for name in zr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'StageBalancers'"):
        _ = zr.StageBalancers
