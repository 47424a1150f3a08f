"""Functions that plan, for tests of planners, and planners that start as fast as this process forks."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zeroresize.microbatch import planner_process


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


@dataclass(frozen=True)
class RecordedPlan:
    """Plans as :func:`text_of`, and leaves a line with the process in a file of the iteration's name.

    Attributes:
        slow: iterations that take until there is a file ``go`` in the folder.
        deadly, invalid, broken: iterations that kill the process, raise a ValueError, or another error.
    """

    folder: Path
    slow: tuple[int, ...] = ()
    deadly: tuple[int, ...] = ()
    invalid: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()

    def __call__(self, iteration):
        with (self.folder / f"{iteration}.pids").open("a") as file:
            file.write(f"{os.getpid()}\n")
        while iteration in self.slow and not (self.folder / "go").exists():
            time.sleep(0.01)
        if iteration in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
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


def _raise(text):
    raise OSError(text)


class ForkedProcess:
    """A process forked from this one, to be used by several threads as one that ``subprocess`` has started."""

    def __init__(self, target):
        self._process = multiprocessing.get_context("fork").Process(target=target)
        self._process.start()
        self._lock = threading.Lock()
        self.pid = self._process.pid

    def wait(self, timeout=math.inf):
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._lock:
                code = self._process.exitcode
            if code is not None:
                return code
            time.sleep(0.005)
        raise subprocess.TimeoutExpired("planners", timeout)

    def kill(self):
        with self._lock:
            self._process.kill()


class ReadyProcesses:
    """Processes whose children plan, as copies of this one, which has imported everything.

    They are made at once by the thread that makes this, and wait for what they are to do: a process that is forked by
    one of several threads may hang.
    """

    def __init__(self, number):
        self._ready = []
        for _ in range(number):
            self._ready.append(self._forked())

    def start(self):
        """What :func:`zeroresize.microbatch.planners.start_process` does."""
        return self._ready.pop(0)

    def end(self):
        """End those that were not started."""
        for connection, process in self._ready:
            connection.close()
            process.kill()
            process.wait()

    def _forked(self):
        here, there = multiprocessing.Pipe()
        not_its = [here, *(connection for connection, _ in self._ready)]

        def main():
            for connection in not_its:
                connection.close()
            planner_process.main(there.fileno())

        with there:
            return here, ForkedProcess(main)


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
