"""Carries out a model's switches on this rank: at once, or beside what it computes.

Weights stay the same all step long, so those of the next strategy can travel while the present one trains. Nobody reads
the gradients before the optimizer's step, so those of a strategy that was left can travel while the next one trains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar

from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_size
from zeroresize.comm.exchange import Meet
from zeroresize.comm.groups import destroy_side_group, make_side_group
from zeroresize.plan.strategy import Strategy
from zeroresize.resharding.agreement import NotEnoughMemoryError, make_alike, meet_prepared
from zeroresize.resharding.transaction import (
    Participants,
    prepare_in_one_meeting,
    receive_transaction,
    run_transaction,
)
from zeroresize.strategy.placement.placement import Placement, held_bytes
from zeroresize.strategy.switching.placements import Placements, next_group_number
from zeroresize.strategy.switching.switch import Switch, SwitchReport

#: The placement to which the weights go; None where they stay.
_FindAfter = Callable[[], Placement | None]
_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])
_AT_ONCE = (
    "two threads called a SwitchableModel, or its trainer, at once: one thread of each rank has to make its calls"
)


class OneThread:
    """Lets one thread at a time make calls; one that comes meanwhile fails afterwards, together with other ranks."""

    def __init__(self, meet: Meet) -> None:
        self._meet, self._lock, self._num_late = meet, threading.RLock(), 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._num_late += 1
            with self._lock:
                self._num_late -= 1
                meet_prepared(self._meet, RuntimeError(_AT_ONCE), "a switch")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        is_late = self._num_late > 0
        self._lock.release()
        if is_late and isinstance(error, RuntimeError) and _AT_ONCE not in str(error):  # ranks began with other threads
            raise RuntimeError(f"{_AT_ONCE}; {error}") from error


def by_one_thread(method: _MethodT) -> _MethodT:
    """Let a method be called by one thread at a time, by its object's ``one_thread``."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with self.one_thread:
            return method(self, *args, **options)

    return call  # type: ignore[return-value]


class Switcher:
    """Switches this rank between the placements of a model; all methods but those that discard are collective.

    What travels beside training does so over a process group of its own, made when it is first needed.

    Args:
        job: all ranks of it.
    """

    def __init__(self, placements: Placements, job: Participants) -> None:
        self._placements, self._job = placements, job
        self._side_group: ProcessGroup | None = None
        #: Weights that travel, with the placement that they leave and the one to which they go.
        self._coming: tuple[Placement, Placement, Switch] | None = None
        #: Gradients that travel to the optimizer's strategy.
        self._returning: Switch | None = None

    def prefetch(self, before: Placement, strategy: Strategy, optimizer_placement: Placement) -> bool:
        """Let the weights travel to a strategy from now on; :meth:`switch` puts it in force.

        Returns:
            Whether they do: they do not where memory for a second set of weights does not suffice on some rank.
        """
        self.discard_coming()
        switch = self._prepare_beside(lambda: self._placements[strategy], before, optimizer_placement, False)
        if switch is None:
            return False
        # What is on its way sends first over the same links, so that ranks pair the same messages.
        earlier = () if self._returning is None else (self._returning.wait,)
        switch.start(self._job.device, *earlier)
        self._coming = before, self._placements[strategy], switch
        return True

    def switch(
        self,
        before: Placement,
        strategy: Strategy,
        optimizer_placement: Placement,
        *,
        gradients: bool,
        in_background: bool,
    ) -> SwitchReport:
        """Put a strategy in force, and send the gradients of the one before to the optimizer's strategy."""
        begin, held = time.perf_counter(), held_bytes(list(self._placements.values()))

        def find_after() -> Placement:
            after = self._placements[strategy]
            leaves = before not in (optimizer_placement, after)
            if leaves and not gradients and any(master.grad is not None for master in before.masters.values()):
                raise ValueError(
                    "switch_to(gradients=False) would lose gradients: there are some; abandon() drops them"
                )
            return after

        if self._coming is None and self._returning is None and not in_background:
            done = [self._run(find_after, before, optimizer_placement, gradients)]
        else:
            done = self._switch_beside(find_after, before, optimizer_placement, gradients, in_background)
        return SwitchReport.of(done, begin, held)

    def discard_coming(self) -> None:
        """Give up weights that :meth:`prefetch` has sent, once they do not travel any more."""
        if self._coming is not None:
            self._coming[2].wait()
            self._coming = None

    def discard(self) -> None:
        """Give up what is under way, once nothing of it travels any more."""
        self.discard_coming()
        if self._returning is not None:
            self._returning.wait()
            self._returning = None

    def close(self) -> None:
        """Give up what is under way, and destroy the group over which it travels."""
        self.discard()
        if self._side_group is not None and self._side_group is not self._job.process_group:
            destroy_side_group(self._side_group)
        self._side_group = None

    def _switch_beside(
        self,
        find_after: Callable[[], Placement],
        before: Placement,
        optimizer: Placement,
        gradients: bool,
        in_background: bool,
    ) -> list[Switch]:
        """Do a switch of which a part travels, or has travelled, beside training; return what has ended with it."""
        after = make_alike(
            self._job.meet,
            find_after,
            lambda after: [after.strategy.as_dict(), gradients, in_background],
            "where the switch leads",
        )
        done: list[Switch] = []
        if self._returning is not None:
            returned, self._returning = self._returning, None
            done.append(self._end(returned))
        if self._coming is not None and self._coming[:2] != (before, after):
            self.discard_coming()
        returning = None
        gradients = gradients and before not in (optimizer, after)
        # The optimizer's strategy adds to its gradients itself while it trains.
        if gradients and in_background and after is not optimizer:
            returning = self._prepare_beside(lambda: None, before, optimizer, True)
        at_once = gradients and returning is None
        if self._coming is None:
            done.append(self._run(lambda: after, before, optimizer, at_once))
        else:
            if at_once:
                done.append(self._run(lambda: None, before, optimizer, True))
            (*_, coming), self._coming = self._coming, None
            done.append(self._end(coming))
        if returning is not None:
            returning.start(self._job.device)
            self._returning = returning
        return done

    def _run(self, find_after: _FindAfter, before: Placement, optimizer: Placement, gradients: bool) -> Switch:
        """Do a switch now."""
        make = partial(self._made, find_after, before, optimizer, gradients, self._job.process_group)
        return run_transaction(make, self._job, in_two_meetings=True)

    def _prepare_beside(
        self, find_after: _FindAfter, before: Placement, optimizer: Placement, gradients: bool
    ) -> Switch | None:
        """What may start beside training; None where memory does not suffice for it and for training."""
        if self._side_group is None:
            group, number = self._job.process_group, next_group_number(self._job)
            members = range(group_size(group))
            self._side_group = group if len(members) == 1 else make_side_group(group, members, number)
        make = partial(self._made, find_after, before, optimizer, gradients, self._side_group, is_beside=True)
        with suppress(NotEnoughMemoryError):
            return prepare_in_one_meeting(make, self._job)
        return None

    def _made(
        self,
        find_after: _FindAfter,
        before: Placement,
        optimizer: Placement,
        gradients: bool,
        group: ProcessGroup,
        *,
        is_beside: bool = False,
    ) -> Switch:
        """This rank's part of a switch."""
        after = find_after()
        is_cast_there = optimizer.is_mixed and after is optimizer
        leaves = before not in (optimizer, after)
        ends = before, None if is_cast_there else after, optimizer if gradients and leaves else None
        route = self._placements.route(*ends)
        return Switch(route, before, after, optimizer, group, self._job.device, is_beside=is_beside)

    def _end(self, switch: Switch) -> Switch:
        """Wait for a switch that is under way, and put it in force."""
        receive_transaction(switch, self._job)
        switch.commit()
        return switch
