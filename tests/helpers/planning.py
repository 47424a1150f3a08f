"""Functions that plan, for tests of planners, and planners that start fast."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest

from helpers.stores import start_forkserver
from zeroresize.microbatch import planners


def text_of(iteration):
    """A plan."""
    return f"plan of iteration {iteration}"


def drawn_text(iteration):
    """A plan that is drawn at random; the later ones take less."""
    time.sleep(random.random() * 0.02)
    return f"{iteration} {random.random()} {np.random.rand()}"


def limits_text(iteration):
    """What a planner may use."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    return json.dumps({name: os.environ.get(name) for name in names})


def stop_at_1(iteration):
    """A planner stands still with iteration 1."""
    if iteration == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return text_of(iteration)


@dataclass(frozen=True)
class RecordedPlan:
    """Plans as :func:`text_of`, and leaves a line with the process in a file of the iteration's name.

    Attributes:
        slow: iterations that take until there is a file ``go`` in the folder.
        deadly, stopped: iterations that kill or stop the process.
        invalid, broken: iterations that raise a ValueError, or another error.
    """

    folder: Path
    slow: tuple[int, ...] = ()
    deadly: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    invalid: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()

    def __call__(self, iteration):
        with (self.folder / f"{iteration}.pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        while iteration in self.slow and not (self.folder / "go").exists():
            time.sleep(0.01)
        if iteration in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if iteration in self.stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        if iteration in self.invalid:
            raise ValueError("sample 3 has 17 tokens: at most 16 fit")
        if iteration in self.broken:
            raise KeyError("no such shape")
        return text_of(iteration)

    def process_ids(self, iteration):
        """The processes that have begun to plan an iteration, in their order."""
        path = self.folder / f"{iteration}.pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def begun(self):
        """The iterations that were begun, rising."""
        return sorted(int(path.stem) for path in self.folder.glob("*.pids"))

    def go(self):
        """Let the slow iterations end."""
        (self.folder / "go").touch()


class Unloadable:
    """What can be pickled, and not be loaded elsewhere."""

    def __call__(self, iteration):
        return text_of(iteration)

    def __reduce__(self):
        return _raise, ("the file of lengths is not on this host",)


class SlowToLoad:
    """Takes two seconds to load, as where imports take long."""

    def __call__(self, iteration):
        return text_of(iteration)

    def __reduce__(self):
        return _loaded_slowly, ()


def _loaded_slowly():
    time.sleep(2.0)
    return SlowToLoad()


def _raise(text):
    raise OSError(text)


def fork_planners(monkeypatch):
    """Let planners start at once in this process and its forks: from one process that has imported everything."""
    start_forkserver()
    monkeypatch.setattr(forkserver._forkserver, "ensure_running", lambda: None)  # a fork cannot ask for it
    monkeypatch.setattr(planners, "_START_METHOD", "forkserver")


def error_of(call):
    """The name of the class and the text of what is raised, within 10 s."""
    began = time.monotonic()
    with pytest.raises(Exception) as caught:
        call()
    assert time.monotonic() - began < 10.0
    return type(caught.value).__name__, str(caught.value)


def wait_until(condition, limit_s=10.0):
    """Wait until a condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def is_alive(process_id):
    """Whether there is such a process, and no mere rest of it that its parent has not asked for."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
