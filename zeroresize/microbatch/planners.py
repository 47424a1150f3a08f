"""The planners of a host: processes that plan iterations ahead of training, while it goes on (DynaPipe, section 3)."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType

from zeroresize.microbatch import planner_process
from zeroresize.microbatch.planner import Plan
from zeroresize.microbatch.planners_report import PlannersReport
from zeroresize.microbatch.planning_task import PlanningTask
from zeroresize.microbatch.store import InstructionStore, StoreError

logger = logging.getLogger(__name__)

#: For planners: one thread each, and no GPU.
_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
    "CUDA_VISIBLE_DEVICES": "",
}
_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from zeroresize.microbatch.planner_process import main
main(int(sys.argv[1]))
"""
#: Seconds until a process that ended early is started again: at first, and doubling up to the second.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.5, 30.0
#: How often in a row it may end before it has begun to work.
_MOST_FALSE_STARTS = 3
#: Seconds for which planners have to end by themselves.
_END_S = 2.0
#: Of how many iterations the seconds of planning are kept.
_NUM_KEPT = 10_000


class Planners:
    """Processes on this host that plan iterations ahead of the executors, and leave the plans in a store.

    ::

        with Planners(plan, store, first=0, num_workers=4) as planners:
            for iteration in range(num_iterations):
                plan = source.plan(iteration, batch)  # of a PlanSource
                ...

    Iterations are planned in their order, each by whichever process has nothing to do. What ``plan`` returns may depend
    on the iteration alone; ``random`` and ``numpy.random`` are seeded by its number. A process that dies is replaced
    with a warning, and its iteration is planned again; if an iteration costs three of them, or ``plan`` raises, the
    executors get the error in place of the plan. Nothing is skipped.

    The processes are children of one that imports what ``plan`` needs, once, beside training: they have no part of this
    process, no GPU, and one thread each. All of them end with this process, however it does.

    Args:
        plan: returns the text of an iteration's plan; a function of a module, or an object that can be pickled. It
            reads the lengths of the iteration's mini-batch itself. A ValueError tells of bad input: its text reaches
            the executors as it is.
        store: where plans go; what is planned at all follows from how far executors are and what is there already.
        first, last: the iterations that are planned; None for no last one. Training may be resumed at any.
        num_workers: how many processes plan at once.
        ahead: how many iterations may be planned beyond the one that is under way; None for twice as many as there are
            processes on all hosts, at least 4.
        host, num_hosts: where several hosts have planners, the number of this one and how many they are: each plans the
            iterations whose number is ``host`` modulo ``num_hosts``.

    Raises:
        ValueError: for numbers that are not allowed, or a ``plan`` that cannot be pickled.
    """

    def __init__(
        self,
        plan: Plan,
        store: InstructionStore,
        *,
        first: int,
        last: int | None = None,
        num_workers: int = 1,
        ahead: int | None = None,
        host: int = 0,
        num_hosts: int = 1,
    ) -> None:
        ahead = max(4, 2 * num_workers * num_hosts) if ahead is None else ahead
        self._task = PlanningTask(store.address, first, last, num_workers, ahead, host, num_hosts)
        self._keeper = _Keeper(self._task, _pickled(plan), store)
        thread = threading.Thread(target=self._keeper.run, daemon=True, name="zeroresize, planners")
        thread.start()
        self._close = weakref.finalize(self, _close, self._keeper, thread)

    def seconds(self) -> dict[int, float]:
        """Return how long each iteration took to plan, by its number, of the last 10,000 that this host has planned."""
        return self._keeper.seconds()

    @property
    def process_id(self) -> int | None:
        """Return the process whose children plan; None while there is none."""
        process = self._keeper.process
        return None if process is None else process.pid

    def stop(self) -> None:
        """Plan nothing any more, until :meth:`go_on`: behind it no plan comes to the store."""
        self._keeper.stop()

    def go_on(self, plan: Plan, first: int) -> None:
        """Plan again once it was stopped, otherwise, from an iteration on; what is in the store is not planned again.

        Raises:
            ValueError: for an iteration behind the last, or a ``plan`` that cannot be pickled.
        """
        self._keeper.go_on(replace(self._task, first=first), _pickled(plan))

    def close(self) -> None:
        """End the processes, whatever they do; whoever waits for a plan of theirs gets an error."""
        self._close()

    def __enter__(self) -> Planners:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Keeper:
    """Starts the process whose children plan, hears it, and starts it again where it ends early; in a thread."""

    def __init__(self, task: PlanningTask, pickled: bytes, store: InstructionStore) -> None:
        self._task, self._pickled, self._store = task, pickled, store
        self._is_stopping, self._has_stopped = False, threading.Event()
        self._wake = threading.Event()  # from the pause before another start
        self.reason: str | None = None  # why nothing can be planned any more
        self._seconds: deque[tuple[int, float]] = deque(maxlen=_NUM_KEPT)
        # Not the other lock: the process is heard while a plan larger than a pipe is sent to it under that.
        self._seconds_lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._is_broken = False
        self._is_closing = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        pause_s, num_false_starts = _LEAST_PAUSE_S, 0
        while True:
            try:
                if not self._start():
                    return
            except OSError as error:  # no memory, no processes, no files
                num_false_starts += 1
                if num_false_starts >= _MOST_FALSE_STARTS:
                    self._give_up(f"their process cannot be started: {error}")
                    return
                self._pause(pause_s)
                continue
            began = time.monotonic()
            is_ready = self._listen()
            self._has_stopped.set()
            assert self.process is not None
            code = self.process.wait()
            if self._is_closing.is_set() or self._is_broken:
                return
            num_false_starts = 0 if is_ready else num_false_starts + 1
            if num_false_starts >= _MOST_FALSE_STARTS:
                self._give_up(f"their process has ended {num_false_starts} times as it began, last with code {code}")
                return
            if is_ready and time.monotonic() - began > _MOST_PAUSE_S:
                pause_s = _LEAST_PAUSE_S
            logger.warning(
                "the process of the planners of host %d has ended with code %d: it is started again in %g s",
                self._task.host,
                code,
                pause_s,
            )
            self._pause(pause_s)
            pause_s = min(2.0 * pause_s, _MOST_PAUSE_S)

    def _pause(self, seconds: float) -> None:
        if not self._is_closing.is_set():
            self._wake.wait(seconds)
            self._wake.clear()

    def seconds(self) -> dict[int, float]:
        with self._seconds_lock:
            return dict(self._seconds)

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            self._has_stopped.clear()
            self._send(planner_process.STOP)
            process = self.process
        if not self._has_stopped.wait(_END_S) and process is not None:
            process.kill()  # with its children; another one waits for what comes
            process.wait()

    def go_on(self, task: PlanningTask, pickled: bytes) -> None:
        with self._lock:
            if self.reason is not None:
                raise StoreError(f"the planners of host {task.host} cannot plan: {self.reason}")
            self._task, self._pickled, self._is_stopping = task, pickled, False
            self._wake.set()
            self._send((task, pickled))

    def end(self) -> None:
        with self._lock:
            self._is_closing.set()
            self._wake.set()
            self._send(None)
            process = self.process
        if process is None:
            return
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> bool:
        with self._lock:
            if self._is_closing.is_set():
                return False
            self._control, self.process = start_process()
            if not self._is_stopping:
                self._send((self._task, self._pickled))
        return True

    def _send(self, message: object) -> None:
        if self._control is not None:
            with suppress(OSError):  # one that has ended is seen when it is heard
                self._control.send(message)

    def _listen(self) -> bool:
        """Hear the process until it ends, and return whether it has begun to work."""
        assert self._control is not None
        is_ready = False
        with suppress(EOFError, OSError):
            while True:
                kind, value = self._control.recv()
                if kind == planner_process.READY:
                    is_ready = True
                elif kind == planner_process.PLANNED:
                    with self._seconds_lock:
                        self._seconds.append(value)
                elif kind == planner_process.STOPPED:
                    self._has_stopped.set()
                elif kind == planner_process.WARNING:
                    logger.warning("%s", value)
                elif kind == planner_process.BROKEN:
                    self._is_broken, self.reason = True, value
                    logger.error("the planners of host %d cannot plan: %s", self._task.host, value)
        self._control.close()
        return is_ready

    def _give_up(self, why: str) -> None:
        logger.error("the planners of host %d cannot plan: %s", self._task.host, why)
        self.reason = why
        task = self._task
        report = PlannersReport(task.host, task.num_hosts, task.first, task.last, task.num_workers, error=why)
        with suppress(StoreError):  # whoever waits there hears of that
            self._store.report(report)


def start_process() -> tuple[Connection, subprocess.Popen[bytes]]:
    """Start a process of this Python whose children plan, and return the connection to it."""
    here, there = multiprocessing.Pipe()
    with there:
        arguments = [str(there.fileno()), json.dumps(sys.path)]
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **_ENVIRONMENT},
            pass_fds=[there.fileno()],
        )
    return here, process


def _pickled(plan: Plan) -> bytes:
    try:
        return pickle.dumps(plan)
    except Exception as error:
        raise ValueError(
            f"the function that plans cannot be given to other processes ({error}): it has to be one of a module, or "
            "an object that can be pickled"
        ) from error


def _close(keeper: _Keeper, thread: threading.Thread) -> None:
    keeper.end()
    thread.join(_END_S)
