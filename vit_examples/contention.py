"""Real contention: this process keeps to one core (or its GPU) and shares it with competing processes.

The operating system shares a core fairly, so with χ − 1 competitors this process is χ times slower in everything it
computes; while it waits for others, nobody slows it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Self

import torch

_COMPETITOR = Path(__file__).with_name("competitor.py")
#: Seconds in which a competitor is at work; on a GPU it imports torch before.
_START_LIMIT_S = {"cpu": 30.0, "cuda": 180.0}


class Contention:
    """While active, this process runs on one core, against χ − 1 others that only compute.

    All threads of the process are pinned, and so is whatever it starts meanwhile (data loading workers too: start them
    before). PyTorch gets one thread, since each would draw its own share of the core. With a GPU nothing is pinned:
    the competitors launch kernels on the same device, which the driver shares among processes by time.

    Competitors die with this process, however it ends, and with the thread that started them.

    Args:
        core_index: the number of the core among those that this process may use, modulo how many they are.
        device: ``cpu``, or the CUDA device to compete for.
    """

    def __init__(self, *, core_index: int, device: torch.device | str = "cpu") -> None:
        self._core_index, self._device = core_index, torch.device(device)
        self._competitors: list[subprocess.Popen[bytes]] = []
        self._cores_of_threads: dict[int, set[int]] = {}
        self._before: tuple[list[int], int] = [], 1  # cores of this process, and threads of torch

    @property
    def chi(self) -> float:
        """The skewness χ ≥ 1 in force, a whole number. Setting it returns when all competitors are at work."""
        return 1.0 + len(self._competitors)

    @chi.setter
    def chi(self, chi: float) -> None:
        number = round(chi) - 1
        if number == len(self._competitors) and all(competitor.poll() is None for competitor in self._competitors):
            return
        self._stop_competitors()
        for _ in range(number):
            self._start_competitor()
        for competitor in self._competitors:
            assert competitor.stdout is not None
            if not select.select([competitor.stdout], [], [], _START_LIMIT_S[self._device.type])[0] or (
                not competitor.stdout.read(1)
            ):
                self._stop_competitors()
                raise RuntimeError(f"a competitor for {self._device} did not start; its output says why")

    @property
    def pids(self) -> list[int]:
        """The process ids of the competitors."""
        return [competitor.pid for competitor in self._competitors]

    def __enter__(self) -> Self:
        if self._device.type == "cpu":
            self._pin()
        atexit.register(self.close)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the competitors and give all threads their cores back."""
        atexit.unregister(self.close)
        self._stop_competitors()
        cores, num_threads = self._before
        if self._cores_of_threads:
            for thread in _threads_of_this_process():
                _set_cores(thread, self._cores_of_threads.get(thread, set(cores)))
            self._cores_of_threads = {}
            torch.set_num_threads(num_threads)

    def _pin(self) -> None:
        if not hasattr(os, "sched_setaffinity"):
            raise RuntimeError(
                f"straggler.kind=contend needs to pin processes to cores, which {sys.platform} cannot: use kind=sleep"
            )
        self._before = sorted(os.sched_getaffinity(0)), torch.get_num_threads()
        torch.set_num_threads(1)
        # Again and again, since a thread not pinned yet may start another.
        while new := [thread for thread in _threads_of_this_process() if thread not in self._cores_of_threads]:
            for thread in new:
                self._cores_of_threads[thread] = set(self._before[0])
                with contextlib.suppress(ProcessLookupError):
                    self._cores_of_threads[thread] = os.sched_getaffinity(thread)
                _set_cores(thread, {self._core})

    @property
    def _core(self) -> int:
        cores, _ = self._before
        return cores[self._core_index % len(cores)]

    def _start_competitor(self) -> None:
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            command = [sys.executable, str(_COMPETITOR), "--gpu", str(index)]
        else:
            command = [sys.executable, "-I", "-S", str(_COMPETITOR), "--core", str(self._core)]
        # In this process's session, so that the scheduler shares the core with it one to one.
        command += ["--parent", str(os.getpid())]
        competitor = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._competitors.append(competitor)

    def _stop_competitors(self) -> None:
        for competitor in self._competitors:
            competitor.kill()
        for competitor in self._competitors:
            competitor.communicate()
        self._competitors = []


def _threads_of_this_process() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _set_cores(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.sched_setaffinity(thread, cores)
