"""Real contention: this process keeps to one core (or its GPU) and shares it with competing processes.

The operating system shares a core fairly, so with χ − 1 competitors this process is χ times slower in everything it
computes; while it waits for others, nobody slows it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import torch

logger = logging.getLogger(__name__)

_COMPETITOR = Path(__file__).with_name("competitor.py")
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

    Raises:
        RuntimeError: on entering, where the operating system cannot pin processes (macOS).
    """

    def __init__(self, *, core_index: int, device: torch.device | str = "cpu") -> None:
        self._core_index = core_index
        self._device = torch.device(device)
        self._competitors: list[subprocess.Popen[bytes]] = []
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as competitors write to it
        self._cores: list[int] = []
        self._cores_of_threads: dict[int, set[int]] = {}
        self._num_torch_threads = 1
        self._owner = 0

    @property
    def chi(self) -> float:
        """The skewness χ ≥ 1 in force, a whole number. Setting it returns when all competitors are at work.

        Raises:
            RuntimeError: if a competitor cannot start.
        """
        return 1.0 + len(self._competitors)

    @chi.setter
    def chi(self, chi: float) -> None:
        number = round(chi) - 1
        if number == len(self._competitors) and all(competitor.poll() is None for competitor in self._competitors):
            return
        self._stop_competitors()
        try:
            self._competitors = [self._start_competitor() for _ in range(number)]
            for competitor in self._competitors:
                self._wait_until_at_work(competitor)
        except BaseException:
            self._stop_competitors()
            raise

    @property
    def pids(self) -> list[int]:
        """The process ids of the competitors."""
        return [competitor.pid for competitor in self._competitors]

    def __enter__(self) -> Contention:
        self._owner = os.getpid()
        if self._device.type == "cpu":
            self._pin()
        atexit.register(self.close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the competitors and give all threads their cores back."""
        if os.getpid() != self._owner:  # a forked child: the competitors and the cores are its parent's
            return
        atexit.unregister(self.close)
        self._stop_competitors()
        if self._cores:
            for thread in _threads_of_this_process():
                _set_cores(thread, self._cores_of_threads.get(thread, set(self._cores)))
            self._cores, self._cores_of_threads = [], {}
            torch.set_num_threads(self._num_torch_threads)

    def _pin(self) -> None:
        if not hasattr(os, "sched_setaffinity"):
            raise RuntimeError(
                f"straggler.kind=contend needs to pin processes to cores, which {sys.platform} cannot: use kind=sleep"
            )
        self._cores = sorted(os.sched_getaffinity(0))
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if num_local_ranks > len(self._cores):
            logger.warning("%d ranks on %d cores: they slow each other too", num_local_ranks, len(self._cores))
        self._num_torch_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        # Again and again, since a thread not pinned yet may start another.
        while new := [thread for thread in _threads_of_this_process() if thread not in self._cores_of_threads]:
            for thread in new:
                self._cores_of_threads[thread] = _cores_of(thread) or set(self._cores)
                _set_cores(thread, {self._core})

    @property
    def _core(self) -> int:
        return self._cores[self._core_index % len(self._cores)]

    def _start_competitor(self) -> subprocess.Popen[bytes]:
        if self._device.type == "cuda":
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            command = [sys.executable, str(_COMPETITOR), "--gpu", str(index)]
        else:
            command = [sys.executable, "-I", "-S", str(_COMPETITOR), "--core", str(self._core)]
        # In this process's session, so that the scheduler shares the core with it one to one.
        return subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )

    def _wait_until_at_work(self, competitor: subprocess.Popen[bytes]) -> None:
        assert competitor.stdout is not None
        limit_s = _START_LIMIT_S[self._device.type]
        ready, _, _ = select.select([competitor.stdout], [], [], limit_s)
        if not ready or not competitor.stdout.read(1):
            reason = f"it ended with code {competitor.wait()}" if ready else f"nothing heard for {limit_s:g} s"
            self._errors.seek(0)
            reason += "".join(f": {line}" for line in self._errors.read().decode().splitlines()[-1:])
            raise RuntimeError(f"a competitor for {self._device} did not start: {reason}")

    def _stop_competitors(self) -> None:
        for competitor in self._competitors:
            if competitor.poll() is not None:
                logger.warning("a competitor had ended by itself, with code %d", competitor.returncode)
            competitor.kill()
        for competitor in self._competitors:
            competitor.wait()
            if competitor.stdout is not None:
                competitor.stdout.close()
        self._competitors = []


def _threads_of_this_process() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _cores_of(thread: int) -> set[int] | None:
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:
        return None


def _set_cores(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.sched_setaffinity(thread, cores)
