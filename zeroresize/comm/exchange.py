"""Small vectors of numbers, one a rank: exchanged while training goes on, or by all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_ranks
from zeroresize.comm.groups import CpuGroup
from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.comm.words import Whereabouts, require_same_whereabouts

#: A wait that ends before this part of the time limit has not ended by it.
_EARLY = 0.9
_POSTED, _MET = 0, 1  # tags: the two kinds of exchange never wait for each other
#: ``meet(*numbers)`` returns the numbers of every rank, in the order of the ranks; collective. A rank may give fewer
#: than another, as where it has failed: the rest counts as zeros.
Meet = Callable[..., Sequence[Sequence[float]]]
#: Sends numbers to every rank and returns those of every rank; all ranks give equally many.
Exchanging = Callable[[Sequence[float]], Sequence[Sequence[float]]]

#: How many numbers travel with their count, in one exchange.
_AT_ONCE = 4


def gather(values: Sequence[float], exchange: Exchanging) -> list[list[float]]:
    """Return the values of every rank, in the order of the ranks, however many each has; collective.

    Every exchange has one length on all ranks, also where they are at different places of a program: gloo ends the
    process if ranks send unequally many numbers.
    """
    table = exchange([float(len(values)), *_padded(values[:_AT_ONCE], _AT_ONCE)])
    counts = [int(count) for count, *_ in table]
    num_left = max(counts) - _AT_ONCE
    rest = exchange(_padded(values[_AT_ONCE:], num_left)) if num_left > 0 else [[]] * len(table)
    return [[*row[1:], *further][:count] for row, further, count in zip(table, rest, counts, strict=True)]


def meet_by(exchange: Exchanging) -> Meet:
    """Return a :data:`Meet` by exchanges of equally many numbers."""

    def meet(*numbers: float) -> Sequence[Sequence[float]]:
        return [_padded(row, len(numbers)) for row in gather(numbers, exchange)]

    return meet


def _padded(values: Sequence[float], length: int) -> list[float]:
    return [*values, *[0.0] * (length - len(values))]


class Exchange:
    """Numbers that the ranks of a group send each other, with each rank's whereabouts.

    Numbers are posted at one update and waited for at the next. They are waited for, never polled, so every rank sees
    the same table at the same update. ``counts_forwards``: whether all ranks make equally many; replicas need not.
    """

    def __init__(self, group: CpuGroup, *, counts_forwards: bool = True) -> None:
        self.group, self._counts_forwards = group, counts_forwards
        self.where, self.ranks, self.words = group.where, group.ranks, group.words
        self._posted: _PendingNumbers | None = None

    def post(self, numbers: Sequence[float]) -> None:
        """Send this rank's numbers; all ranks must send equally many."""
        if self._posted is not None:
            raise RuntimeError("post() was called twice without collect() in between")
        self._posted = _PendingNumbers(self.group, numbers, _POSTED)

    def collect(self) -> list[list[float]] | None:
        """Return what every rank has posted, in the order of the group; None if nothing was; collective."""
        if self._posted is None:
            return None
        posted, self._posted = self._posted, None  # cleared even if waiting fails, so a state can still be saved
        return self._received(posted)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers at once, however many each has, in the order of the group; collective."""
        return gather(numbers, self._exchange)

    def meet(self, *numbers: float) -> Sequence[Sequence[float]]:
        """Return the numbers of every rank, as a :data:`~zeroresize.comm.exchange.Meet` does; collective."""
        return meet_by(self._exchange)(*numbers)

    def close(self) -> None:
        """Leave the group."""
        self._posted = None
        self.words.close()
        self.group.close()

    def _exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        return self._received(_PendingNumbers(self.group, numbers, _MET))

    def _received(self, pending: _PendingNumbers) -> list[list[float]]:
        """Every rank's numbers, without the whereabouts, which must be the same on all ranks."""
        table = pending.wait()
        num_of_place = Whereabouts.NUM_NUMBERS
        places = [Whereabouts.of_numbers(numbers[:num_of_place]) for numbers in table]
        self.words.last_heard = places
        try:
            require_same_whereabouts(places, counts_forwards=self._counts_forwards)
        except RuntimeError as error:
            self.words.fail(str(error), waits=False)
            raise
        self.words.withdraw()
        return [numbers[num_of_place:] for numbers in table]


class GatheredNumbers:
    """Numbers that are gathered on every rank by a collective, and asked for rather than waited for.

    A collective does not tell who did not come, but its cost grows with the number of ranks, not with its square.
    """

    def __init__(self, group: CpuGroup, numbers: Sequence[float]) -> None:
        sent = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._parts = [torch.empty_like(sent) for _ in range(group.size)]
        self._work = group.allgather(self._parts, sent)

    @property
    def has_ended(self) -> bool:
        """Whether the numbers of all ranks are there, or something has failed."""
        return bool(self._work.is_completed())

    def has_ended_within(self, seconds: float) -> bool:
        """Wait so long at most for the end."""
        ends_at = time.monotonic() + seconds
        while not self.has_ended and time.monotonic() < ends_at:
            time.sleep(0.001)
        return self.has_ended

    def take(self) -> list[list[float]]:
        """Return the numbers of every rank, in the order of the group, once it has ended."""
        self._work.wait()
        return [part.tolist() for part in self._parts]


class _PendingNumbers:
    """Numbers on their way from every rank to every other, behind the whereabouts of their sender.

    They travel from rank to rank, since a collective could not tell who did not come.
    """

    def __init__(self, group: CpuGroup, numbers: Sequence[float], tag: int) -> None:
        self._group, self._started_at = group, str(group.where)
        sent = torch.tensor([*group.where.as_numbers(), *numbers], dtype=torch.float64, device="cpu")
        self._parts = [sent if peer == group.rank else torch.empty_like(sent) for peer in range(group.size)]
        self._received: dict[int, dist.Work] = {}
        self._sent: dict[int, dist.Work] = {}
        self._failures: dict[int, RuntimeError] = {}
        self._awaited: list[int] = []  # what has not come yet, in the order of the waits
        for peer in (*range(group.rank), *range(group.rank + 1, group.size)):
            try:
                self._received[peer] = group.recv([self._parts[peer]], peer, tag)
                self._sent[peer] = group.send([sent], peer, tag)
            except RuntimeError as error:  # it has left
                self._failures[peer] = error

    def wait(self) -> list[list[float]]:
        """Wait for every rank's numbers and return them, in the order of the group."""
        began, limit_s = time.monotonic(), self._group.time_limit.total_seconds()
        with self._group.words.waiting("the numbers of the other ranks", lambda: self._awaited):
            for works in (self._received, self._sent):
                self._awaited = list(works)
                for peer, work in works.items():
                    left_s = began + limit_s - time.monotonic()
                    try:
                        work.wait(timedelta(seconds=max(left_s, 0.001)))
                    except RuntimeError as error:
                        self._failures.setdefault(peer, error)
                    self._awaited.remove(peer)
                if self._failures:  # gloo's time limit closes all connections: what is sent fails with all
                    raise self._not_all_came(time.monotonic() - began) from next(iter(self._failures.values()))
        return [part.tolist() for part in self._parts]

    def _not_all_came(self, waited_s: float) -> RuntimeError:
        limit_s, words, missing = self._group.time_limit.total_seconds(), self._group.words, sorted(self._failures)
        if waited_s < _EARLY * limit_s:
            why = f"a connection closed after {waited_s:.1f} s, before the time limit of {limit_s:g} s"
        else:
            why = f"nothing came within {limit_s:g} s, the time limit of their process group (timeout=...)"
        number = self._group.where.num_work_changes
        announced = f" (profile_next() or load_state_dict() was called {number} times here)" if number else ""
        return RuntimeError(
            f"{words.named(missing)} did not come to {self._started_at}: {why}. One of them may have died, failed "
            f"before, let go of its Balancer, made other calls{announced}, or be busy for longer, as with a checkpoint"
            f"{words.fail(f'ranks {missing} did not come')}"
        )


def ranks_with_replicas(
    process_group: ProcessGroup, data_parallel_group: ProcessGroup | None, exchange: Exchange
) -> tuple[int, ...]:
    """Gather the ranks of all replicas of a group, counted over the whole world; collective over all replicas.

    ``data_parallel_group`` holds the ranks with the same shards; None if that is not known. Returned are replica by
    replica the ranks of each; none if not all ranks of the group know theirs.
    """
    known = group_ranks(data_parallel_group) if data_parallel_group is not None else []
    peers_of_ranks = [list(map(int, ranks)) for ranks in exchange.gather([float(rank) for rank in known])]
    if not all(peers_of_ranks):
        return ()
    members = group_ranks(process_group)
    replicas: Sequence[tuple[int, ...]] = list(zip(*peers_of_ranks, strict=False))
    ranks = tuple(rank for replica in replicas for rank in replica)
    are_whole = (
        len({len(peers) for peers in peers_of_ranks}) == 1
        and tuple(members) in replicas
        and len(set(ranks)) == len(ranks)
    )
    if are_whole:  # for this replica: others may see it differently
        rendezvous = Rendezvous(process_group, "agree on who the replicas are", sorted(ranks))
        are_whole = len(set(rendezvous.exchange("replicas", str(ranks)))) == 1
    if not are_whole:
        raise ValueError(
            f"the data-parallel groups of the ranks {members} of the job make no whole replicas of their "
            f"tensor-parallel group: they hold the ranks {peers_of_ranks}. Wanted are groups of one size, each of "
            "ranks that hold the same shards, in the same order of replicas"
        )
    return ranks
