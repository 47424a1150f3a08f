"""The planners of a run: processes that plan iterations ahead of training (DynaPipe, section 3), and who asks them.

:class:`Planners` are those of a node, :class:`RunPlanners` those of a run.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from zeroresize.comm.collectives import group_rank, require_group, time_limit
from zeroresize.microbatch.planning_process import (
    IterationPlanner,
    Plan,
    PlanningError,
    begin_process,
    begun_path,
    failure_value,
    path_of,
    plan_in_process,
)
from zeroresize.microbatch.store import SharedStore, StoreError
from zeroresize.policy.microbatches.plan import IterationPlan
from zeroresize.resharding.agreement import agreed, let_others_know, make_alike, meet_over
from zeroresize.utils.checked import checked, integer, real
from zeroresize.utils.texts import duration_text

logger = logging.getLogger(__name__)

#: What something in the store belongs to: the number of a series of plans, and an iteration.
Place = tuple[int, int]

#: A fork of the training process would have its threads' locks and its GPU.
_START_METHOD = "spawn"
#: How often an iteration's planner may fail until it counts as one that cannot be planned.
_MOST_FAILURES = 3
#: Seconds between two looks at deadlines; for which an end is waited for; and that the start of a process may take:
#: on a loaded machine its imports take a minute.
_TICK_S, _END_S, _START_S = 0.5, 2.0, 600.0
#: Of how many iterations the seconds of planning are kept.
_NUM_KEPT = 10_000
#: Of the group's time limit, what waiting for a plan may take: ranks that have theirs wait for the others meanwhile.
_SHARE_OF_LIMIT = 0.5


def _tell(given: Mapping[str, Any], error: ValueError) -> None:
    given["store"].new_series()  # as the other ranks do
    let_others_know(given["process_group"], given["device"], error)


@checked(
    tell=_tell,
    first=integer(0),
    num_workers=integer(1),
    ahead=integer(1),
    timeout_s=real(above=0.0),
)
class RunPlanners:
    """Plans the iterations of a run on the first rank of each node, for all ranks, which fetch them once an iteration.

    Its constructor, :meth:`plan` and :meth:`restart` are collective.

    Args:
        planner: of iterations.
        store: which all ranks share.
        process_group: the ranks that carry out the plans.
        device: of the model, where the group cannot send numbers from the CPU.
        first, last: the iterations that are planned; None for no last one, and for ``last < first`` none are.
        num_workers: processes of each node that plan at once.
        ahead: how many iterations may be planned beyond the one that is under way; None for twice as many as there are
            processes on all nodes, at least 4.
        timeout_s: seconds to wait for a plan at most, those not counted in which the node's processes start; None for
            half of the group's time limit. A process that plans one iteration for more than a quarter of it is
            replaced; to start it has ten minutes.

    Attributes:
        planner: the one in force.

    Raises:
        ValueError: for numbers that are not allowed, a planner that cannot be pickled, and a group that this rank is
            not in; the other ranks may raise a RuntimeError then.
    """

    def __init__(
        self,
        planner: IterationPlanner,
        store: SharedStore,
        process_group: ProcessGroup | DeviceMesh,
        device: torch.device,
        *,
        first: int = 0,
        last: int | None = None,
        num_workers: int = 1,
        ahead: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        process_group = require_group(process_group)
        self.planner = planner
        self._store, self._last, self._progress, self._series = store, last, first, store.new_series()
        self._is_first = group_rank(process_group) == 0
        self._timeout_s = timeout_s or _SHARE_OF_LIMIT * time_limit(process_group).total_seconds()
        self._meet = meet_over(process_group, device)
        self._planners: Planners | None = None

        def start() -> None:
            if store.is_first_of_node and not self.is_over(first):
                options: dict[str, Any] = {"num_workers": num_workers, "ahead": ahead}
                options["deadline_s"] = self._timeout_s / (_MOST_FAILURES + 1)
                self._planners = Planners(planner, store, series=self._series, first=first, last=last, **options)
                weakref.finalize(self, self._planners.close)

        agreed(self._meet, start, what="the planners of a run")

    def plan(self, iteration: int, batch: str) -> IterationPlan:
        """Return the plan of an iteration, the same on all ranks, before anything of it runs; collective.

        It costs one exchange of a few numbers. The plans of iterations before are dropped, so iterations rise.

        Args:
            batch: the fingerprint of the lengths of this iteration's samples, as this rank has them.

        Raises:
            ValueError: for a plan of another model, of other samples or of another iteration, an iteration that is over
                or comes after the last, and what the planner raised, if it was one. The other ranks raise a
                RuntimeError then, if they have no such error themselves.
            RuntimeError: if there is no plan, the store cannot be reached, another rank has failed, ranks have
                different plans, or a rank does not come.
        """

        def planned() -> tuple[str, IterationPlan]:
            self._advance(iteration)
            text = self._store.get(self._series, iteration, self._timeout_s, self._doing, warns=self._is_first)
            return text, self._checked(text, iteration, batch)

        what = f"the plan of iteration {iteration}"
        return make_alike(self._meet, planned, lambda made: made[0], what)[1]

    def is_over(self, iteration: int) -> bool:
        """Whether no iteration from this one on is planned."""
        return self._last is not None and self._last < iteration

    def restart(self, planner: IterationPlanner, first: int) -> None:
        """Plan otherwise from an iteration on; what was planned of it and of later ones is dropped; collective.

        Raises:
            ValueError: for a planner that cannot be pickled.
            RuntimeError: if that is so on another rank, or one does not come; on all ranks that live.
        """
        planners, series = self._planners, self._store.new_series()
        restart = partial(planners.restart, planner, series, first) if planners else lambda: None
        agreed(self._meet, restart, what="the planners of a run")
        self.planner, self._progress, self._series = planner, first, series

    def seconds(self) -> dict[int, float]:
        """Return how long each iteration took to plan, of the last 10,000 that this node has planned."""
        return {} if self._planners is None else dict(self._planners.seconds.copy())

    def close(self) -> None:
        """End the planners of this node; whoever waits for a plan of theirs gets an error."""
        if self._planners is not None:
            self._planners.close()

    def _advance(self, iteration: int) -> None:
        if self.is_over(iteration):
            raise ValueError(f"the plan of iteration {iteration} is wanted, but planners plan up to {self._last}")
        if iteration < self._progress:
            raise ValueError(
                f"the plan of iteration {iteration} is wanted, but plans before iteration {self._progress} were "
                "dropped; where training is resumed, make new planners"
            )
        self._progress = iteration
        if self._planners is not None:
            self._planners.advance(iteration)

    def _doing(self) -> str:
        return "this rank has no planners" if self._planners is None else self._planners.doing()

    def _checked(self, text: str, iteration: int, batch: str) -> IterationPlan:
        """The plan that a text describes, if it is the wanted one."""
        plan, model = IterationPlan.from_json(text), self.planner.fingerprint
        if plan.iteration != iteration:
            raise ValueError(f"the plan of iteration {iteration} is wanted, and this is one of {plan.iteration}")
        if plan.model != model:
            raise ValueError(
                f"the plan of iteration {iteration} was made for another model, with other costs, or with other "
                f"options: its fingerprint is {plan.model}, that of this rank {model}; planners and executors need the "
                "same"
            )
        if plan.batch != batch:
            raise ValueError(
                f"the plan of iteration {iteration} was made for other samples: the fingerprint of their lengths is "
                f"{plan.batch}, that of this rank's {batch}; planners and executors have to read the same data, in the "
                "same order"
            )
        return plan


class Planners:
    """Processes on this node that plan iterations ahead of the ranks, and leave the plans in a store.

    Iterations are planned in their order, each by whichever process has nothing to do. A process that dies, or does not
    end within the deadline, is replaced with a warning, and its iteration is planned again; if that happens three
    times, or ``plan`` raises, the ranks get the error in place of the plan. Nothing is skipped. The processes have no
    part of this one, no GPU, and one thread each. All of them end with it, however it does.

    Args:
        plan: a function of a module, or an object that can be pickled. What it returns may depend on the iteration
            alone; ``random`` and ``numpy.random`` are seeded by its number. The text of a ValueError reaches the ranks.
        store: where plans go. Of several nodes each plans the iterations whose number is its own modulo theirs.
        series: of the plans, in the store.
        first, last, num_workers, ahead: as of :class:`RunPlanners`.
        deadline_s: seconds that planning an iteration may take, once its process has started.

    Attributes:
        seconds: iterations, and how long each took to plan.
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
        self._ahead = max(4, 2 * num_workers * store.num_nodes) if ahead is None else ahead
        pickled = _pickled(plan)
        self.seconds: deque[tuple[int, float]] = deque(maxlen=_NUM_KEPT)
        self._store, self._last, self._deadline_s = store, last, deadline_s
        self._name = f"the planners of node {store.node}"
        self._folder = Path(tempfile.mkdtemp(prefix="zeroresize-planners-"))
        self._wanted = self._current = self._series_of(pickled, series, first)  # as is asked for; as the thread plans
        self._workers = [_Worker(self._folder) for _ in range(num_workers)]
        self._left: set[Place] = set()  # of which something is in the store
        self._failures: Counter[Place] = Counter()
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
        """Plan otherwise from an iteration on, as another series of plans."""
        self._wanted = self._series_of(_pickled(plan), series, first)
        self._wake.set()

    def doing(self) -> str:
        """Return what they do, in words."""
        tasks = [(worker, task) for worker in self._workers if (task := worker.task) is not None]
        words = ", ".join(
            f"iteration {task.place[1]} for {duration_text(task.seconds)}{', and start for it' * worker.is_starting}"
            for worker, task in tasks
        )
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
                for worker in self._workers:
                    self._hear(worker)
                self._forget()
                self._hand_out()
                if any(worker.is_starting for worker in self._workers):
                    self._store.tell_start()
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

    def _window(self) -> list[Place]:
        """Of which this node may leave something now and has not, rising."""
        store, begin = self._store, self._current.progress
        end = begin + self._ahead + 1 if self._last is None else min(begin + self._ahead, self._last) + 1
        iterations = range(begin + (store.node - begin) % store.num_nodes, end, store.num_nodes)
        places = [(self._current.number, iteration) for iteration in iterations]
        return [place for place in places if place not in self._left]

    def _hear(self, worker: _Worker) -> None:
        """Leave what has come of a task; what was not planned is planned again, but not for ever."""
        task, outcome = worker.task, worker.outcome(self._deadline_s)
        if task is None or outcome is None:
            return
        worker.task = None
        if not isinstance(outcome, str):
            self.seconds.append((task.place[1], outcome[0]))
            if task.place[0] == self._wanted.number:  # else nobody waits for it any more
                self._leave(task.place, outcome[1])
            return
        worker.kill()
        self._failures[task.place] += 1
        text = f"{outcome} while it planned iteration {task.place[1]}"
        if self._failures[task.place] < _MOST_FAILURES:
            logger.warning("one of %s %s: another takes its place, and plans it again", self._name, text)
        else:
            text = f"{_MOST_FAILURES} of {self._name} have failed, the last {text}"
            self._leave(task.place, failure_value(PlanningError.__name__, text))

    def _leave(self, place: Place, value: bytes) -> None:
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
                worker.start(self._current.path, place, self._wake.set)


@dataclass(eq=False)
class _Series:
    """What is planned: the file of the pickled function, the number in the store, and where ranks have come to."""

    path: Path
    number: int
    progress: int


@dataclass(eq=False)
class _Task:
    """What a process plans, by the function of which file, and what comes of it."""

    path: Path
    place: Place
    began: float
    future: Future[float]
    begun: float  # when its process had started; infinite as long as it starts for it

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def has_begun(self) -> bool:
        """Whether the process has imported what it needs."""
        if self.begun == math.inf and begun_path(self.path, self.place[1]).exists():
            self.begun = time.monotonic()
        return self.begun < math.inf


class _Worker:
    """One process, in a pool of its own, so that it is known which iteration has killed or stopped it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool: ProcessPoolExecutor | None = None
        self._processes: list[BaseProcess] = []
        self.task: _Task | None = None

    def start(self, path: Path, place: Place, when_done: Callable[[], object]) -> None:
        """Plan an iteration; :meth:`outcome` tells of all that fails."""
        now = time.monotonic()
        self.task = _Task(path, place, now, Future(), math.inf if self._pool is None else now)
        begun_path(path, place[1]).unlink(missing_ok=True)
        try:
            if self._pool is None:
                context = multiprocessing.get_context(_START_METHOD)
                self._pool = ProcessPoolExecutor(
                    1, mp_context=context, initializer=begin_process, initargs=(self._folder,)
                )
            with _without_program():
                self.task.future = self._pool.submit(plan_in_process, path, place[1])
            self._processes = list((self._pool._processes or {}).values())
            self.task.future.add_done_callback(lambda _: when_done())
        except Exception as error:  # no memory, no processes
            self.task.future = Future()
            self.task.future.set_exception(error)

    @property
    def is_starting(self) -> bool:
        """Whether its process imports what it needs."""
        task = self.task
        return task is not None and not task.future.done() and not task.has_begun()

    def outcome(self, deadline_s: float) -> tuple[float, bytes] | str | None:
        """Return the seconds and what was planned, or in words why nothing comes; None while that is not known."""
        task = self.task
        if task is None:
            return None
        if not task.future.done():
            if task.has_begun():
                return f"took longer than {deadline_s:g} s" if time.monotonic() - task.begun > deadline_s else None
            return f"did not start within {_START_S:g} s" if task.seconds > _START_S else None
        path = path_of(task.path, task.place[1])
        try:
            seconds, value = task.future.result(), path.read_bytes()
            path.unlink()
            begun_path(task.path, task.place[1]).unlink(missing_ok=True)
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
_RUNNING: weakref.WeakSet[Planners] = weakref.WeakSet()


def _end_all() -> None:
    for planners in list(_RUNNING):
        planners.close()


# Before that of concurrent.futures, which waits for tasks, and earlier than by atexit, which comes after it.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]
