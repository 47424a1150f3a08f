"""What is imported by whom."""

import subprocess
import sys

import pytest

import zeroresize as zr

pytestmark = pytest.mark.versions

#: What takes long to import, and is for those who ask for it; pipelines need the first two neither.
OF_OTHERS = [
    *(f"torch.{name}" for name in ("_dynamo", "distributed.pipelining", "distributed.fsdp", "distributed.tensor")),
    "zeroresize.balancer",
]
SEEN = """
import sys, zeroresize as zr
print([name for name in sys.argv[1:] if name in sys.modules])
import zeroresize.pipeline; zr.StageBalancer
print([name for name in sys.argv[1:3] if name in sys.modules])
"""


def test_what_takes_long_is_imported_by_those_only_who_ask_for_it():
    command = [sys.executable, "-c", SEEN, *OF_OTHERS]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == ["[]", "[]"]


def test_what_is_public_is_there():
    assert all(hasattr(zr, name) for name in zr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'StageBalancers'"):
        _ = zr.StageBalancers
