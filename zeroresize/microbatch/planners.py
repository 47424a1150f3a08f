"""The planners of a host: processes that plan iterations ahead of training, while it goes on (DynaPipe, section 3)."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from weakref import WeakSet

import numpy as np
import torch

from zeroresize.microbatch.shared_store import (
    MOST_BYTES,
    PlanningError,
    SharedStore,
    StoreError,
    failure_value,
    plan_value,
)
from zeroresize.utils.value_checks import at_least

logger = logging.getLogger(__name__)

#: ``plan(iteration)`` returns the text of an iteration's plan, the same in whatever process it is called.
Plan = Callable[[int], str]

#: For planners: one thread each, and no GPU.
_LIMITS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"),
    "CUDA_VISIBLE_DEVICES": "",
}
#: A fork of the training process would have its threads' locks and its GPU.
_START_METHOD = "spawn"
#: How often an iteration's planner may fail until it counts as one that cannot be planned.
MOST_FAILURES = 3
#: Seconds between two looks at deadlines; between two of a planner at its parent; and for which an end is waited for.
_TICK_S, _LOOK_S, _END_S = 0.5, 0.5, 2.0
#: Of how many iterations the seconds of planning are kept.
_NUM_KEPT = 10_000


class Planners:
    """Processes on this host that plan iterations ahead of the ranks, and leave the plans in a store.

    Iterations are planned in their order, each by whichever process has nothing to do. What ``plan`` returns may depend
    on the iteration alone; ``random`` and ``numpy.random`` are seeded by its number. A process that dies, or does not
    end within the deadline, is replaced with a warning, and its iteration is planned again; if that happens three
    times, or ``plan`` raises, the ranks get the error in place of the plan. Nothing is skipped.

    The processes have no part of this one, no GPU, and one thread each. All of them end with it, however it does.

    Args:
        plan: returns the text of an iteration's plan; a function of a module, or an object that can be pickled. It
            reads the lengths of the iteration's mini-batch itself. A ValueError tells of bad input: its text reaches
            the ranks as it is.
        store: where plans go. Of several hosts each plans the iterations whose number is its own modulo theirs.
        series: of the plans, in the store.
        first, last: the iterations that are planned; None for no last one.
        num_workers: how many processes plan at once.
        ahead: how many iterations may be planned beyond the one that is under way; None for twice as many as there are
            processes on all hosts, at least 4.
        deadline_s: seconds that planning an iteration may take, with the start of a process.

    Raises:
        ValueError: for numbers that are not allowed, or a ``plan`` that cannot be pickled.
    """

    def __init__(
        self,
        plan: Plan,
        store: SharedStore,
        *,
        series: int,
        first: int,
        last: int | None = None,
        num_workers: int = 1,
        ahead: int | None = None,
        deadline_s: float = 300.0,
    ) -> None:
        at_least("first", first, 0)
        if last is not None:
            at_least("last", last, first)
        at_least("num_workers", num_workers, 1)
        self._ahead = max(4, 2 * num_workers * store.num_hosts) if ahead is None else ahead
        at_least("ahead", self._ahead, 1)
        pickled = _pickled(plan)
        self._store, self._last, self._deadline_s = store, last, deadline_s
        self._name = f"the planners of host {store.host}"
        self._folder = Path(tempfile.mkdtemp(prefix="zeroresize-planners-"))
        self._wanted = self._current = self._series_of(pickled, series, first)  # as is asked for; as the thread plans
        self._workers = [_Worker() for _ in range(num_workers)]
        self._left: set[tuple[int, int]] = set()  # series and iterations of which something is in the store
        self._failures: Counter[tuple[int, int]] = Counter()
        self._seconds: deque[tuple[int, float]] = deque(maxlen=_NUM_KEPT)
        self._wake, self._is_closing = threading.Event(), threading.Event()
        self._maker = os.getpid()
        self._thread = threading.Thread(target=self._run, daemon=True, name="zeroresize, planners")
        self._thread.start()
        _RUNNING.add(self)

    def advance(self, iteration: int) -> None:
        """Say which iteration ranks have come to: those before it are over."""
        self._wanted.progress = max(iteration, self._wanted.progress)
        self._wake.set()

    def restart(self, plan: Plan, series: int, first: int) -> None:
        """Plan otherwise from an iteration on, as another series of plans.

        Raises:
            ValueError: for a ``plan`` that cannot be pickled.
        """
        self._wanted = self._series_of(_pickled(plan), series, first)
        self._wake.set()

    def seconds(self) -> dict[int, float]:
        """Return how long each iteration took to plan, by its number, of the last 10,000 that this host has planned."""
        return dict(self._seconds.copy())

    def doing(self) -> str:
        """Return what they do, in words."""
        tasks = [task for worker in self._workers if (task := worker.task) is not None]
        words = ", ".join(f"iteration {task.place[1]} for {task.seconds:.1f} s" for task in tasks)
        return f"{self._name} ({len(self._workers)}) plan {words or 'nothing'}"

    def close(self) -> None:
        """End the processes, whatever they do; whoever waits for a plan of theirs gets an error."""
        if os.getpid() != self._maker:  # a fork of the training process
            return
        self._is_closing.set()
        self._wake.set()
        self._thread.join(_END_S)
        for worker in self._workers:  # if the thread waits for the store
            worker.kill()

    def _series_of(self, pickled: bytes, number: int, first: int) -> _Series:
        path = self._folder / str(number)
        path.write_bytes(pickled)
        return _Series(path, number, first)

    def _run(self) -> None:
        end = "have ended"
        try:
            while not self._is_closing.is_set():
                self._hear()
                self._forget()
                self._hand_out()
                self._wake.wait(_TICK_S)
                self._wake.clear()
        except StoreError as error:
            end = f"stop: {error}"
            logger.warning("%s %s", self._name, end)
        except Exception as error:
            end = f"have failed: {error!r}"
            logger.exception("%s have failed", self._name)
        finally:
            for worker in self._workers:
                worker.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._current = self._wanted
            with suppress(StoreError):  # whoever waits hears of that
                for place in self._window():
                    self._leave(place, failure_value(PlanningError.__name__, f"{self._name} {end}"))

    def _window(self) -> list[tuple[int, int]]:
        """The series and the iterations of which this host may leave something now and has not, rising."""
        store, begin = self._store, self._current.progress
        end = begin + self._ahead + 1 if self._last is None else min(begin + self._ahead, self._last) + 1
        iterations = range(begin + (store.host - begin) % store.num_hosts, end, store.num_hosts)
        places = [(self._current.number, iteration) for iteration in iterations]
        return [place for place in places if place not in self._left]

    def _hear(self) -> None:
        for worker in self._workers:
            task, outcome = worker.task, worker.outcome(self._deadline_s)
            if task is None or outcome is None:
                continue
            worker.task = None
            if isinstance(outcome, str):
                worker.kill()
                self._failed(task.place, outcome)
            else:
                self._seconds.append((task.place[1], outcome[0]))
                if task.place[0] == self._wanted.number:  # else nobody waits for it any more
                    self._leave(task.place, outcome[1])

    def _failed(self, place: tuple[int, int], how: str) -> None:
        """What was not planned is planned again, but not for ever."""
        self._failures[place] += 1
        text = f"{how} while it planned iteration {place[1]}"
        if self._failures[place] < MOST_FAILURES:
            logger.warning("one of %s %s: another takes its place, and plans it again", self._name, text)
        else:
            text = f"{MOST_FAILURES} of {self._name} have failed, the last {text}"
            self._leave(place, failure_value(PlanningError.__name__, text))

    def _leave(self, place: tuple[int, int], value: bytes) -> None:
        self._store.put(*place, value)
        self._left.add(place)

    def _forget(self) -> None:
        """From here on what is wanted now is planned, and the rest is dropped."""
        if self._wanted is not self._current:
            self._current.path.unlink()
            self._current = self._wanted
        number, progress = self._current.number, self._current.progress
        over = {place for place in self._left if place[0] != number or place[1] < progress}
        self._store.drop(over)
        self._left -= over

    def _hand_out(self) -> None:
        """Give each planner that has nothing to do the next iteration that has no plan."""
        taken = [worker.task.place for worker in self._workers if worker.task is not None]
        missing = (place for place in self._window() if place not in taken)
        idle = [worker for worker in self._workers if worker.task is None]
        for worker, place in zip(idle, missing, strict=False):
            if not self._is_closing.is_set():
                worker.start(_Task(self._current.path, place), self._wake.set)


@dataclass(eq=False)
class _Series:
    """What is planned: the file of the pickled function, the number in the store, and where ranks have come to."""

    path: Path
    number: int
    progress: int


@dataclass(eq=False)
class _Task:
    """What a process plans: with the function of this file, the place of a series and an iteration in the store."""

    path: Path
    place: tuple[int, int]
    future: Future[float] = field(default_factory=Future)
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class _Worker:
    """One process, in a pool of its own, so that it is known which iteration has killed or stopped it."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._processes: list[BaseProcess] = []
        self.task: _Task | None = None

    def start(self, task: _Task, when_done: Callable[[], object]) -> None:
        """Plan an iteration; :meth:`outcome` tells of all that fails."""
        self.task = task
        try:
            if self._pool is None:
                context = multiprocessing.get_context(_START_METHOD)
                self._pool = ProcessPoolExecutor(
                    1, mp_context=context, initializer=_begin, initargs=(task.path.parent,)
                )
            with _without_program():
                task.future = self._pool.submit(_plan, task.path, task.place[1])
            self._processes = list((self._pool._processes or {}).values())
            task.future.add_done_callback(lambda _: when_done())
        except Exception as error:  # no memory, no processes
            task.future = Future()
            task.future.set_exception(error)

    def outcome(self, deadline_s: float) -> tuple[float, bytes] | str | None:
        """Return the seconds and what was planned, or in words why nothing comes; None while that is not known."""
        task = self.task
        if task is None:
            return None
        if not task.future.done():
            return f"took longer than {deadline_s:g} s" if task.seconds > deadline_s else None
        path = _path_of(task.path, task.place[1])
        try:
            seconds, value = task.future.result(), path.read_bytes()
            path.unlink()
        except Exception as error:
            return f"ended, as where memory runs out ({type(error).__name__}: {error}),"
        return seconds, value

    def kill(self) -> None:
        """End the process, whatever it does; the next task starts another one."""
        pool, self._pool = self._pool, None
        for process in self._processes:
            process.kill()
            process.join(_END_S)
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _without_program() -> Iterator[None]:
    """Processes that start meanwhile do not run this one's program again, which need not be made for that."""
    program, stand_in = sys.modules["__main__"], ModuleType("__main__")
    vars(stand_in).update((name, value) for name, value in vars(program).items() if name not in vars(stand_in))
    vars(stand_in).pop("__file__", None)
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _pickled(plan: Plan) -> bytes:
    try:
        return pickle.dumps(plan)
    except Exception as error:
        raise ValueError(
            f"the function that plans cannot be given to other processes ({error}): it has to be one of a module, or "
            "an object that can be pickled"
        ) from error


#: In this process; they end with it.
_RUNNING: WeakSet[Planners] = WeakSet()


def _end_all() -> None:
    for planners in list(_RUNNING):
        planners.close()


# Before that of concurrent.futures, which waits for tasks, and earlier than by atexit, which comes after it.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]


# What follows runs in the planners' processes.


def _begin(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the training process ends this one
    os.environ.update(_LIMITS)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()


def _end_with_parent(folder: Path) -> None:
    parent, training = os.getppid(), multiprocessing.parent_process()
    while os.getppid() == parent and (training is None or training.is_alive()):
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _plan(path: Path, iteration: int) -> float:
    """Plan an iteration, leave what comes of it in a file, and return the seconds.

    What goes through the pool's pipes is so short that no process is killed in the midst of writing it: the pool would
    wait for the rest.
    """
    random.seed(iteration)  # what is drawn in planning is the same whichever process does it
    np.random.seed(iteration % 2**32)
    began = time.perf_counter()
    try:
        text = _loaded(path)(iteration)
        if not isinstance(text, str):
            raise TypeError(f"the function that plans has returned {type(text).__name__}: text is needed")
        value = plan_value(text)
        if len(value) > MOST_BYTES:
            raise PlanningError(f"its plan has {len(value)} bytes, and a store takes {MOST_BYTES} at most")
    except (ValueError, PlanningError) as error:
        value = failure_value(type(error).__name__, str(error))
    except BaseException as error:  # also of a program that wants to exit
        value = failure_value(type(error).__name__, f"{error!r}\n{traceback.format_exc()}")
    _path_of(path, iteration).write_bytes(value)
    return time.perf_counter() - began


@functools.lru_cache(maxsize=1)
def _loaded(path: Path) -> Plan:
    try:
        plan: Plan = pickle.loads(path.read_bytes())
    except Exception as error:
        raise PlanningError(
            f"processes cannot load the function that plans ({type(error).__name__}: {error}): it has to be one of a "
            "module, or an object of a class of a module, and not of the program that is run"
        ) from error
    return plan


def _path_of(path: Path, iteration: int) -> Path:
    """The file in which what came of an iteration is left, beside that of the function."""
    return path.with_suffix(f".{iteration}")
