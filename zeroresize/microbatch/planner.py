"""One planner: a process that plans an iteration after another, as it is told."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

#: ``plan(iteration)`` returns the text of an iteration's plan, the same in whatever process it is called.
Plan = Callable[[int], str]

#: Linux: the signal that this process gets when the one that made it ends.
_PR_SET_PDEATHSIG = 1
#: Seconds between the end of a process's connection and its own.
_DYING_S = 1.0


@dataclass(frozen=True)
class Planned:
    """Describe what became of an iteration.

    Attributes:
        text: its plan; None where there is none.
        seconds: how long planning took.
        error, reason: the name of the class of what was raised otherwise, and what it said.
    """

    text: str | None
    seconds: float
    error: str = ""
    reason: str = ""


class Planner:
    """A process forked from this one, which knows what this one has imported; it ends with this one.

    Args:
        plan: makes the plans.
        not_its: connections of this process that are none of the planner's.

    Attributes:
        connection: by which what it has done comes: see :meth:`receive`.
        iteration: what it plans; None while it has nothing to do.
        is_alive: whether it has not been seen to have died.
    """

    def __init__(self, plan: Plan, not_its: Iterable[Connection]) -> None:
        fork = multiprocessing.get_context("fork")
        self.connection, there = fork.Pipe()
        args = plan, there, os.getpid(), [*not_its, self.connection]
        self._process = fork.Process(target=_work, args=args, daemon=True, name="zeroresize, planner")
        self._process.start()
        there.close()
        self.iteration: int | None = None
        self.is_alive = True
        self._began = 0.0

    @property
    def seconds(self) -> float:
        """Return how long it has planned its iteration."""
        return time.monotonic() - self._began

    def start(self, iteration: int) -> None:
        """Let it plan an iteration; one that has died since is noticed by :meth:`receive`."""
        self.iteration, self._began = iteration, time.monotonic()
        with suppress(OSError):
            self.connection.send(iteration)

    def receive(self) -> Planned:
        """Return what it has done, once its connection is ready.

        Raises:
            EOFError: if it has died.
        """
        try:
            planned: Planned = self.connection.recv()
        except (EOFError, OSError) as error:
            self.is_alive = False
            raise EOFError from error
        self.iteration = None
        return planned

    def kill(self) -> str:
        """End the process, whatever it does, and return how it has ended: in words, of one that had died before."""
        self._process.join(0.0 if self.is_alive else _DYING_S)
        self._process.kill()
        self._process.join()
        self.connection.close()
        code = self._process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                name = signal.Signals(-code).name
                return f"by {name}, as where memory runs out" if name == "SIGKILL" else f"by {name}"
        return f"with code {code}"


def _work(plan: Plan, connection: Connection, maker: int, not_its: Iterable[Connection]) -> None:
    for other in not_its:
        other.close()
    with suppress(Exception):  # elsewhere it notices when it has planned an iteration
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(EOFError, OSError):
        while os.getppid() == maker:
            connection.send(_planned(plan, connection.recv()))


def _planned(plan: Plan, iteration: int) -> Planned:
    random.seed(iteration)  # what is drawn in planning is the same whichever process does it
    np.random.seed(iteration % 2**32)
    began = time.perf_counter()
    try:
        text = plan(iteration)
        if not isinstance(text, str):
            raise TypeError(f"the function that plans has returned {type(text).__name__}: text is needed")
    except Exception as error:
        is_input = isinstance(error, ValueError)
        reason = str(error) if is_input else f"{error!r}\n{traceback.format_exc()}"
        return Planned(None, time.perf_counter() - began, "ValueError" if is_input else type(error).__name__, reason)
    return Planned(text, time.perf_counter() - began)
