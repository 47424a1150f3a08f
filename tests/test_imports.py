"""What is imported by whom."""

import subprocess
import sys

import pytest

import zeroresize as zr

pytestmark = pytest.mark.versions

SEEN = "import sys, zeroresize; print('zeroresize.pipeline.pipeline' in sys.modules)"


@pytest.mark.slow
def test_pipelines_are_imported_by_those_only_who_ask_for_them():
    """They need newer releases of torch than the rest."""
    ended = subprocess.run([sys.executable, "-c", SEEN], check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == "False"


def test_what_is_public_is_there():
    assert all(hasattr(zr, name) for name in zr.__all__)
    with pytest.raises(AttributeError, match="no attribute 'StageBalancers'"):
        _ = zr.StageBalancers
