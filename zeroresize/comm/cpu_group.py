"""A second process group of the same ranks, on CPU, to agree on what to do and to exchange numbers."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import explain_failures
from zeroresize.comm.failure_reports import FailureReports
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.comm.wait_warnings import WaitWarnings
from zeroresize.comm.waiting_note import WaitingNote
from zeroresize.comm.whereabouts import Whereabouts
from zeroresize.utils.alike import alike, at_fault, by_rank, lists_by_rank

#: Why the ranks of a CpuGroup meet, for errors.
PURPOSE = "agree on what to balance"
_FIRST_AGREEMENT = "agreement 1"
#: The tag of a message that no rank sends.
_NEVER_SENT = 2**31 - 1


def let_others_fail(process_group: ProcessGroup, error: Exception) -> None:
    """Let the ranks that make a :class:`CpuGroup` fail at once, in place of making it on this rank, which cannot.

    A later attempt meets them again, as this one counts.
    """
    Rendezvous(process_group, PURPOSE).fail(_FIRST_AGREEMENT, error)


class NotAllCameError(RuntimeError):
    """Some ranks did not take part in an exchange.

    Attributes:
        ranks: the ranks that did not, counted within the group.
        waited_s: seconds for which they were waited for.
    """

    def __init__(self, ranks: Sequence[int], waited_s: float) -> None:
        super().__init__(f"nothing came from ranks {list(ranks)} of the group")
        self.ranks, self.waited_s = list(ranks), waited_s


class CpuGroup:
    """A gloo group of the same ranks, for numbers; also a :class:`~zeroresize.comm.collectives.Channel` between them.

    It synchronises no device and puts nothing between the host's collectives. Making it is collective over
    ``process_group`` only, by a :class:`~zeroresize.comm.rendezvous.Rendezvous`. After that the job's store only serves
    to explain failures.

    Args:
        process_group: the group of these ranks.
        agreement: the values that must be the same on all of them, by name.
        ranks: the ranks of the new group where they are others, counted over the whole world: ``process_group`` with
            its replicas.
        where: this rank's whereabouts where another group keeps them up to date; None for new ones.
        explains: whether errors of other transfers over ``process_group`` tell what each rank was doing, by ``where``.

    Attributes:
        rank, size: this rank within the new group, and how many ranks that has.
        ranks: the new group's ranks, counted over the whole world.
        whose: what errors call these ranks, such as "the group".
        time_limit: how long every wait may last.
        where: this rank's whereabouts, for errors of waits here and of the layers' collectives over ``process_group``.
        reports: the reports of failures.
        waiting: the note of what a rank waits for, where that takes long.
        wait_warnings: warn of long waits for other ranks.

    Raises:
        ValueError: on every rank, if the ranks do not agree; it names what differs and where.
        RuntimeError: if not all ranks come within the time limit of ``process_group``.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        agreement: Mapping[str, str | list[str]],
        ranks: Sequence[int] | None = None,
        where: Whereabouts | None = None,
        *,
        explains: bool = True,
    ) -> None:
        rendezvous = self._rendezvous = Rendezvous(process_group, PURPOSE, ranks)
        self.rank, self.size, self.time_limit = rendezvous.rank, rendezvous.size, rendezvous.time_limit
        self.ranks, self.whose = rendezvous.ranks, rendezvous.whose
        self._num_agreements = 0
        self.require_agreement(agreement)
        ends = self._rendezvous.store, self.rank, self.size, self.time_limit
        # A process that ends while gloo's threads live can abort. Dropping the group, also at exit, ends them.
        self._gloo: list[Any] = [self._rendezvous.connect(lambda: dist.ProcessGroupGloo(*ends))]
        self.waiting = WaitingNote(rendezvous)
        self.close = weakref.finalize(self, _close, self._gloo, self.waiting)
        self.where = where or Whereabouts()
        self.reports = FailureReports(self._rendezvous, self.where)
        self.wait_warnings = WaitWarnings(rendezvous, self.where, self.reports, self.waiting)
        if ranks is None and explains:
            explain_failures(process_group, self.reports)

    def start_sending(self, numbers: Sequence[float], tag: int) -> PendingNumbers:
        """Start sending ``numbers`` to every rank and receiving as many of each; numbers of one ``tag`` keep order."""
        return PendingNumbers(
            self._gloo[0], self.rank, self.size, numbers, tag, self.time_limit, self.wait_warnings.during
        )

    def start_gathering(self, numbers: Sequence[float]) -> GatheredNumbers:
        """Start sending ``numbers`` to every rank, by a collective that nobody has to wait for."""
        return GatheredNumbers(self._gloo[0], self.size, numbers)

    def abort(self) -> None:
        """End what is under way, with an error on the ranks that wait for it; the group is of no use afterwards.

        A wait that ends by its time limit closes gloo's connections, which its own ``abort()`` does not. A rank that
        has closed its connection cannot be waited for, so each of the others is tried.
        """
        for offset in range(1, self.size):
            with suppress(RuntimeError):
                never_sent = self._gloo[0].recv([torch.empty(1)], (self.rank + offset) % self.size, _NEVER_SENT)
                never_sent.wait(timedelta(milliseconds=1))

    def broadcast(self, tensor: Tensor, root: int, /) -> dist.Work:
        """Start filling ``tensor`` on every rank with that of rank ``root`` within the new group; collective."""
        return self._gloo[0].broadcast(tensor, root)

    def send(self, tensors: list[Tensor], receiver: int, tag: int, /) -> dist.Work:
        """Start sending tensors to rank ``receiver`` within the new group."""
        return self._gloo[0].send(tensors, receiver, tag)

    def recv(self, tensors: list[Tensor], sender: int, tag: int, /) -> dist.Work:
        """Start filling tensors from rank ``sender`` within the new group."""
        return self._gloo[0].recv(tensors, sender, tag)

    def require_agreement(self, agreement: Mapping[str, str | list[str]]) -> None:
        """Compare values by name, over the store; collective.

        Raises:
            ValueError: on every rank, if the ranks do not agree; it names what differs and where.
            RuntimeError: if not all ranks come within the time limit of ``process_group``.
        """
        self._num_agreements += 1
        messages = self._rendezvous.exchange(
            _FIRST_AGREEMENT if self._num_agreements == 1 else f"agreement {self._num_agreements}",
            json.dumps(dict(agreement)),
        )
        agreements = [json.loads(message) for message in messages]
        for what in agreements[0]:
            values = [agreement_there.get(what) for agreement_there in agreements]
            groups = alike(values)
            if len(groups) > 1:
                are_lists = all(isinstance(value, list) for value in values)
                detail = lists_by_rank(values) if are_lists else by_rank(values)
                raise ValueError(f"the ranks of {self.whose} do not agree on {what}: {detail}{at_fault(groups)}")


def _close(gloo: list[Any], waiting: WaitingNote) -> None:
    waiting.close()
    gloo.clear()


class GatheredNumbers:
    """Numbers that are gathered on every rank, and asked for rather than waited for.

    It does not tell who did not come, as :class:`PendingNumbers` does, which only a wait can end. Its cost grows with
    the number of ranks, not with its square.
    """

    def __init__(self, gloo: Any, size: int, numbers: Sequence[float]) -> None:
        sent = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._parts = [torch.empty_like(sent) for _ in range(size)]
        self._work = gloo.allgather([self._parts], [sent])

    @property
    def has_ended(self) -> bool:
        """Whether the numbers of all ranks are there, or something has failed."""
        return bool(self._work.is_completed())

    def take(self) -> list[list[float]]:
        """Return the numbers of every rank, in the order of the group, once it has ended.

        Raises:
            RuntimeError: if a rank has died, or did not send its numbers within the time limit.
        """
        self._work.wait()
        return [part.tolist() for part in self._parts]


class PendingNumbers:
    """Numbers on their way from every rank to every other.

    They travel from rank to rank, since a collective could not tell who did not come.
    """

    def __init__(
        self,
        gloo: Any,
        rank: int,
        size: int,
        numbers: Sequence[float],
        tag: int,
        time_limit: timedelta,
        warned_of: Callable[[str, Callable[[], Sequence[int]]], AbstractContextManager[None]],
    ) -> None:
        sent = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._parts: list[Tensor] = [sent if peer == rank else torch.empty_like(sent) for peer in range(size)]
        self._received: dict[int, Any] = {}
        self._sent: dict[int, Any] = {}
        self._failures: dict[int, RuntimeError] = {}
        self._time_limit, self._warned_of = time_limit, warned_of
        self._awaited: list[int] = []  # what has not come yet, in the order of the waits
        for peer in range(size):
            if peer != rank:
                try:
                    self._received[peer] = gloo.recv([self._parts[peer]], peer, tag)
                    self._sent[peer] = gloo.send([sent], peer, tag)
                except RuntimeError as error:  # it has left
                    self._failures[peer] = error

    def wait(self) -> list[list[float]]:
        """Wait for every rank's numbers and return them, in the order of the group.

        Raises:
            NotAllCameError: if ranks did not send theirs within the time limit, or have died.
        """
        with self._warned_of("the numbers of the other ranks", lambda: self._awaited):
            self._wait()
        return [part.tolist() for part in self._parts]

    def _wait(self) -> None:
        began = time.monotonic()
        deadline = began + self._time_limit.total_seconds()
        for works in (self._received, self._sent):
            self._awaited = list(works)
            for peer, work in works.items():
                try:
                    work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
                except RuntimeError as error:
                    self._failures.setdefault(peer, error)
                self._awaited.remove(peer)
            if self._failures:  # gloo's time limit closes all connections: what is sent fails with all
                waited_s = time.monotonic() - began
                raise NotAllCameError(sorted(self._failures), waited_s) from next(iter(self._failures.values()))
