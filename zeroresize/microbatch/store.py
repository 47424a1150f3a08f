"""Where planners leave the plans of iterations, and executors fetch them (DynaPipe, section 3: instruction store)."""

from __future__ import annotations

import json
import logging
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zeroresize.microbatch.planners_report import PlannersReport

logger = logging.getLogger(__name__)

_PLAN, _FAILURE = b"P", b"F"
_PLANS, _REPORTS, _PROGRESS = "plan/", "planners/", "progress"
#: zlib's fastest level makes a plan a few times smaller in about a millisecond.
_LEVEL = 1
#: Seconds between two questions for a plan: they begin at the first and double up to the second.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.001, 0.05
#: Seconds between two looks at what planners say while a plan is waited for.
_LOOK_S = 0.25
#: Seconds within which a store has to answer.
ANSWER_S = 30.0


class StoreError(RuntimeError):
    """Tells that an instruction store cannot be reached, or does not take what it was given."""


class PlanningError(RuntimeError):
    """Tells that there is no plan of an iteration, and why."""


class InstructionStore(ABC):
    """Keeps the plans of iterations from when they are made until they have been carried out.

    Several processes, of any hosts, open the same store by its address. A plan is text, kept compressed; every executor
    reads it. Whoever is waiting asks again and again, up to 20 times a second: of what stores can do that is what
    several readers of one plan, lost connections and servers that were restarted leave intact.

    A subclass keeps bytes by names: it implements the abstract methods that begin with an underscore, each of which
    raises :class:`StoreError` where the store cannot be reached or does not answer in time.

    Attributes:
        address: by which :func:`~zeroresize.microbatch.open_store.open_store` opens it elsewhere; it may hold a
            password.
        warn_after_s: seconds after which a wait for a plan is warned of; may be set.
        silent_s: seconds without a sign of life after which planners count as dead; may be set.
    """

    address: str
    warn_after_s: float = 10.0
    silent_s: float = 120.0

    @property
    def shown_address(self) -> str:
        """Return the address as messages show it, without a password."""
        return self.address

    def put(self, iteration: int, text: str) -> None:
        """Leave the plan of an iteration; one that was left before is replaced, and one that is over is not kept.

        Raises:
            StoreError: if the store cannot be reached, or the plan is larger than it takes.
        """
        self._put(iteration, _PLAN + zlib.compress(text.encode(), _LEVEL), f"leave the plan of iteration {iteration}")

    def fail(self, iteration: int, kind: str, text: str) -> None:
        """Leave an error in place of the plan of an iteration, which :meth:`get` raises.

        Args:
            kind: the name of the error's class.

        Raises:
            StoreError: if the store cannot be reached.
        """
        failure = json.dumps({"kind": kind, "text": text})
        self._put(iteration, _FAILURE + failure.encode(), f"say why iteration {iteration} cannot be planned")

    def get(self, iteration: int, timeout_s: float, *, warns: bool = True) -> str:
        """Wait for the plan of an iteration and return it.

        A plan that is late is waited for, with a warning after :attr:`warn_after_s` seconds and whenever twice as many
        have passed: since when, and what planners say. Planners learn of the wait: they plan this iteration next.

        Args:
            timeout_s: seconds to wait at most.
            warns: whether to warn; of many ranks that wait for the same plan it is enough that one does.

        Raises:
            ValueError: what the planner raised, if it was one, naming the iteration; and for an iteration that is over,
                or that comes after the last.
            PlanningError: if its planner failed otherwise, there are no planners any more that could make it, or it
                does not come in time.
            StoreError: if the store cannot be reached.
        """
        wait = _Wait(iteration, self.warn_after_s, self.silent_s)
        purpose = f"fetch the plan of iteration {iteration}"
        pause_s = _LEAST_PAUSE_S
        while True:
            is_looking = wait.is_look_due()
            if is_looking:
                self._announce(iteration, purpose)
            reports = self._reports(purpose) if is_looking else []
            value = self._get(f"{_PLANS}{iteration}", purpose)  # after the reports: planners that end have left it
            if value is not None:
                return _plan_of(iteration, value)
            if is_looking:
                wait.hear(reports)
            if wait.seconds > timeout_s:
                raise PlanningError(
                    f"no plan of iteration {iteration} came to {self.shown_address} within {timeout_s:g} s: "
                    f"{wait.words()}"
                )
            if wait.is_warning_due() and warns:
                logger.warning(
                    "the plan of iteration %d has been waited for since %.1f s, at %s: %s. Training goes on when it "
                    "comes, or fails after %g s",
                    iteration,
                    wait.seconds,
                    self.shown_address,
                    wait.words(),
                    timeout_s,
                )
            time.sleep(pause_s)
            pause_s = min(2.0 * pause_s, _MOST_PAUSE_S)

    def forget(self, before_iteration: int) -> None:
        """Drop the plans of the iterations before this one, which are over: planners may go on as far ahead of it.

        Raises:
            StoreError: if the store cannot be reached.
        """
        purpose = f"drop the plans before iteration {before_iteration}"
        self._set(_PROGRESS, str(before_iteration).encode(), purpose)
        over = [iteration for iteration in self._iterations(purpose) if iteration < before_iteration]
        self._delete([f"{_PLANS}{iteration}" for iteration in over], purpose)

    def renew(self, iteration: int) -> None:
        """Drop all plans, and what planners have said: others plan from this iteration on. Planners are closed before.

        Raises:
            StoreError: if the store cannot be reached.
        """
        purpose = f"drop the plans from iteration {iteration} on"
        self._delete(self._names(purpose), purpose)
        self._set(_PROGRESS, str(iteration).encode(), purpose)

    def progress(self) -> int | None:
        """Return the iteration that executors have come to; None while they have not said."""
        return self._progress("say how far executors are")

    def iterations(self) -> list[int]:
        """Return the iterations whose plans, or errors in place of them, are there, rising."""
        return self._iterations("say which plans are there")

    def report(self, report: PlannersReport) -> None:
        """Say what the planners of a host do, in place of what they said before.

        Raises:
            StoreError: if the store cannot be reached.
        """
        self._set(f"{_REPORTS}{report.host}", report.to_json().encode(), "keep what planners say")

    def reports(self) -> list[PlannersReport]:
        """Return what the planners of each host last said of themselves, by the numbers of hosts."""
        return self._reports("say what planners do")

    @abstractmethod
    def close(self) -> None:
        """Leave the store; whoever made it takes it with what it holds. Planners are closed before."""

    def _progress(self, purpose: str) -> int | None:
        value = self._get(_PROGRESS, purpose)
        return None if value is None else int(value)

    def _iterations(self, purpose: str) -> list[int]:
        names = self._names(purpose)
        return sorted(int(name.removeprefix(_PLANS)) for name in names if name.startswith(_PLANS))

    def _reports(self, purpose: str) -> list[PlannersReport]:
        names = [name for name in self._names(purpose) if name.startswith(_REPORTS)]
        values = [self._get(name, purpose) for name in names]
        reports = [PlannersReport.from_json(value.decode()) for value in values if value is not None]
        return sorted(reports, key=lambda report: report.host)

    def _put(self, iteration: int, value: bytes, purpose: str) -> None:
        self._set(f"{_PLANS}{iteration}", value, purpose)
        if iteration < (self._progress(purpose) or 0):  # it was dropped while it was planned
            self._delete([f"{_PLANS}{iteration}"], purpose)

    def _announce(self, iteration: int, purpose: str) -> None:
        """Tell planners that this iteration is waited for, also where a restarted server has lost how far training is.

        Raises:
            ValueError: if executors are beyond it.
        """
        progress = self._progress(purpose)
        if progress is not None and progress > iteration:
            raise ValueError(
                f"the plan of iteration {iteration} is wanted, but plans before iteration {progress} were dropped: "
                "ranks have to ask for the same iterations; where training is resumed, make a new store and planners"
            )
        if progress != iteration:
            self._set(_PROGRESS, str(iteration).encode(), purpose)

    @abstractmethod
    def _set(self, name: str, value: bytes, purpose: str) -> None:
        """Keep a value under a name; errors say that the store is away with what was wanted of it, ``purpose``."""

    @abstractmethod
    def _get(self, name: str, purpose: str) -> bytes | None:
        """Return the value of a name; None if there is none."""

    @abstractmethod
    def _delete(self, names: Iterable[str], purpose: str) -> None:
        """Drop values, those that are there."""

    @abstractmethod
    def _names(self, purpose: str) -> list[str]:
        """Return all names that have values."""


@dataclass
class _Wait:
    """A wait for the plan of an iteration."""

    iteration: int
    next_warning_s: float
    silent_s: float
    began: float = field(default_factory=time.monotonic)
    _next_look_s: float = _LOOK_S
    _reports: list[PlannersReport] = field(default_factory=list)
    _last_beats: dict[int, tuple[int, float]] = field(default_factory=dict)  # by host, with when it was first seen

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def is_look_due(self) -> bool:
        if self.seconds < self._next_look_s:
            return False
        self._next_look_s = self.seconds + _LOOK_S
        return True

    def is_warning_due(self) -> bool:
        if self.seconds < self.next_warning_s:
            return False
        self.next_warning_s = 2.0 * self.seconds
        return True

    def hear(self, reports: list[PlannersReport]) -> None:
        """Look at what planners say; raises if the plan cannot come."""
        self._reports = reports
        for report in reports:
            if report.is_beyond(self.iteration):
                raise ValueError(
                    f"the plan of iteration {self.iteration} is wanted, but planners plan up to iteration {report.last}"
                )
            beat, since = self._last_beats.get(report.host, (None, 0.0))
            if beat != report.beat:
                self._last_beats[report.host] = report.beat, time.monotonic()
            elif report.plans(self.iteration) and time.monotonic() - since > self.silent_s:
                raise PlanningError(
                    f"iteration {self.iteration} cannot be planned: the planners of host {report.host} have given no "
                    f"sign of life for {time.monotonic() - since:.0f} s"
                )
            if report.plans(self.iteration) and (report.error is not None or report.has_ended):
                raise PlanningError(f"iteration {self.iteration} cannot be planned: {report}")

    def words(self) -> str:
        return "; ".join(map(str, self._reports)) or "no planners have said anything yet"


def _plan_of(iteration: int, value: bytes) -> str:
    kind, content = value[:1], value[1:]
    if kind == _PLAN:
        return zlib.decompress(content).decode()
    failure: Mapping[str, str] = json.loads(content)
    error = ValueError if failure["kind"] == ValueError.__name__ else PlanningError
    text = failure["text"].removeprefix(f"iteration {iteration}: ")  # it is named already
    raise error(f"iteration {iteration} cannot be planned: {text}")
