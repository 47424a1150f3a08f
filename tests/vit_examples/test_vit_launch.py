"""A training that somebody starts ends with them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vit_examples.launch import started

PARENT = """
import sys, time
from pathlib import Path
from vit_examples.launch import started
child = (
    "import pathlib, sys, time; alive = pathlib.Path(sys.argv[1])\\n"
    "while True: alive.touch(); time.sleep(0.1)"
)
with started([sys.executable, "-c", child, sys.argv[1]], Path(sys.argv[1]).with_suffix(".log")) as process:
    process.wait()
"""


def is_touched(file: Path) -> bool:
    before = file.stat().st_mtime_ns
    time.sleep(1.0)
    return file.stat().st_mtime_ns != before


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.skipif(sys.platform != "linux", reason="other systems tell nobody that a parent was killed")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_training_does_not_outlive_a_study_that_is_killed(tmp_path: Path, end: signal.Signals) -> None:
    alive = tmp_path / "alive"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(alive)], cwd=Path(__file__).parents[2])
    for _ in range(300):
        if alive.exists():
            break
        time.sleep(0.1)
    assert is_touched(alive)
    parent.send_signal(end)
    parent.wait()
    assert not is_touched(alive)


def test_what_is_left_running_is_stopped_at_the_end_of_the_block(tmp_path: Path) -> None:
    with started([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log") as process:
        assert process.poll() is None
    assert process.poll() is not None
