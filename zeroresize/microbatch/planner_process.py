"""The process under which a host's planners run: it hands out iterations, leaves plans in the store, replaces the dead.

It has nothing of the training process but a connection, and ends with it. It imports what planning needs once; planners
are forked from it, so one that died is replaced at once.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections import Counter
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from zeroresize.microbatch.open_store import open_store
from zeroresize.microbatch.planner import Plan, Planner
from zeroresize.microbatch.planners_report import PlannersReport
from zeroresize.microbatch.planning_task import PlanningTask
from zeroresize.microbatch.store import InstructionStore, StoreError

#: Seconds between two questions how far executors are, and between two signs of life.
_TICK_S, _BEAT_S = 0.1, 1.0
#: How many planners an iteration may cost until it counts as one that cannot be planned.
MOST_DEATHS = 3

#: What it tells the training process, with a value: it works; an iteration was planned, with the seconds; a warning;
#: and why planning cannot go on, whoever tries again.
READY, PLANNED, WARNING, BROKEN = "ready", "planned", "warning", "broken"
#: It is told to stop planning, and says that nothing is planned any more; it may then be given another task.
STOP, STOPPED = "stop", "stopped"


def main(handle: int) -> None:
    """Plan as the training process says until it closes the connection, or ends.

    Args:
        handle: of the connection to it, by which a :class:`PlanningTask` and the pickled function come, :data:`STOP`,
            or None for the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the training process ends and closes the connection
    maker, control = os.getppid(), Connection(handle)
    with suppress(EOFError, OSError):  # nobody is there any more
        while (message := control.recv()) is not None:
            if message == STOP:
                control.send((STOPPED, None))
                continue
            task, pickled = message
            if not _carry_out(task, pickled, control, maker):
                return


def _carry_out(task: PlanningTask, pickled: bytes, control: Connection, maker: int) -> bool:
    """Plan until something else is told; False where nothing else can be planned either."""
    try:
        store = open_store(task.address)
        try:
            plan = pickle.loads(pickled)
        except Exception as error:
            text = (
                f"processes cannot load the function that plans ({type(error).__name__}: {error}): it has to be one of "
                "a module, or an object of a class of a module, and not of the program that is run"
            )
            store.report(_report(task, error=text))
            control.send((BROKEN, text))
            return False
        control.send((READY, None))
        _PlanningProcess(task, plan, store, control, maker).run()
    except StoreError as error:
        with suppress(OSError):
            control.send((WARNING, f"the planners of host {task.host} stop: {error}"))
        return False
    return os.getppid() == maker


class _PlanningProcess:
    """What :func:`main` does once all is there."""

    def __init__(
        self, task: PlanningTask, plan: Plan, store: InstructionStore, control: Connection, maker: int
    ) -> None:
        self._task, self._plan, self._store, self._control, self._maker = task, plan, store, control, maker
        self._planners: list[Planner] = []
        self._deaths: Counter[int] = Counter()  # by iteration
        self._next_tick = self._next_beat = time.monotonic()

    def run(self) -> None:
        try:
            for _ in range(self._task.num_workers):
                self._add_planner()
            while self._is_wanted():
                self._hear()
                self._hand_out()
                self._beat()
        finally:
            for planner in self._planners:
                planner.kill()
        self._store.report(_report(self._task, has_ended=True))

    def _is_wanted(self) -> bool:
        """Wait until there is something to do; False where nobody wants plans any more."""
        ready = wait([self._control, *self._connections()], timeout=max(0.0, self._next_tick - time.monotonic()))
        return self._control not in ready and os.getppid() == self._maker

    def _connections(self) -> list[Connection]:
        return [planner.connection for planner in self._planners]

    def _add_planner(self) -> None:
        self._planners.append(Planner(self._plan, [self._control, *self._connections()]))

    def _hear(self) -> None:
        for planner in list(self._planners):
            if not planner.connection.poll():
                continue
            iteration = planner.iteration
            try:
                planned = planner.receive()
            except EOFError:
                self._replace(planner)
                continue
            assert iteration is not None
            if planned.text is None:
                self._store.fail(iteration, planned.error, planned.reason)
            else:
                self._leave(iteration, planned.text)
            self._tell(PLANNED, (iteration, planned.seconds))
            self._deaths.pop(iteration, None)

    def _leave(self, iteration: int, text: str) -> None:
        """Leave a plan, or say why the store does not take it; where it takes neither it is away."""
        try:
            self._store.put(iteration, text)
        except StoreError as error:
            self._store.fail(iteration, type(error).__name__, str(error))

    def _replace(self, planner: Planner) -> None:
        """Let another planner plan what this one, which has died, was planning."""
        how = planner.kill()
        self._planners.remove(planner)
        self._add_planner()
        if planner.iteration is None:
            self._warn(f"a planner of host {self._task.host} ended {how} with nothing to do: another takes its place")
            return
        self._deaths[planner.iteration] += 1
        what = f"ended {how} while it planned iteration {planner.iteration}"
        if self._deaths[planner.iteration] < MOST_DEATHS:
            self._warn(f"a planner of host {self._task.host} {what}: another takes its place, and plans it again")
            return
        text = f"{MOST_DEATHS} planners have died of it, the last {what}"
        self._store.fail(planner.iteration, "EOFError", text)

    def _hand_out(self) -> None:
        """Give each planner that has nothing to do the next iteration that has no plan."""
        idle = [planner for planner in self._planners if planner.iteration is None]
        if not idle and time.monotonic() < self._next_tick:
            return
        self._next_tick = time.monotonic() + _TICK_S
        taken = {*self._store.iterations(), *self._under_way()}
        missing = (iteration for iteration in self._task.wanted(self._store.progress()) if iteration not in taken)
        for planner, iteration in zip(idle, missing, strict=False):
            planner.start(iteration)

    def _under_way(self) -> dict[int, float]:
        return {planner.iteration: planner.seconds for planner in self._planners if planner.iteration is not None}

    def _beat(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + _BEAT_S
            self._store.report(_report(self._task, under_way=self._under_way()))

    def _warn(self, text: str) -> None:
        self._tell(WARNING, text)

    def _tell(self, kind: str, value: object) -> None:
        with suppress(OSError):  # the training process has ended: this is noticed before anything else is done
            self._control.send((kind, value))


def _report(task: PlanningTask, **values: Any) -> PlannersReport:
    beat = time.monotonic_ns()
    return PlannersReport(task.host, task.num_hosts, task.first, task.last, task.num_workers, beat, **values)
