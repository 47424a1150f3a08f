"""Where the ranks of a group meet before they have a connection of their own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_ranks, time_limit
from zeroresize.utils.deadline import within
from zeroresize.utils.memory_errors import is_out_of_memory, reason

_T = TypeVar("_T")

#: Added to the time limit, so the store can report it first, and for asking who came.
_GRACE = timedelta(seconds=1)
#: As many as a connection takes, with the one that waits for it.
_NUM_THREADS = 4
#: Begins what a rank leaves in place of a message that memory kept it from.
_RAN_OUT = "\0out of memory: "


class Rendezvous:
    """The ranks' own part of the default group's store, for one purpose.

    It needs no rank outside ``process_group``, only the process that keeps the store, so it is safe under DP × TP.
    (``torch.distributed.new_group`` with local synchronisation is not: it names a group after how many groups a rank
    knows, and hangs where ranks know different ones.) Waits may last as long as those in ``process_group``: a rank that
    is late to one, as after a checkpoint, is late to both.

    Args:
        process_group: the group of these ranks.
        purpose: why they meet, for errors.
        ranks: who meets in place of the group's ranks, counted over the whole world: the group's replicas as well.

    Attributes:
        rank, size: this rank among those that meet, and how many they are.
        ranks: those that meet, counted over the whole world.
        whose: they are, for errors.
        time_limit: of every wait.
        store: shared by the ranks. A call to it can block for ever, so call it only
            :func:`~zeroresize.utils.deadline.within` a limit.
    """

    _num_made: ClassVar[Counter[tuple[str, tuple[int, ...]]]] = Counter()

    def __init__(self, process_group: ProcessGroup, purpose: str, ranks: Sequence[int] | None = None) -> None:
        self.ranks = tuple(group_ranks(process_group) if ranks is None else ranks)
        self.rank = group_rank(process_group) if ranks is None else self.ranks.index(dist.get_rank())
        self.size, self.time_limit = len(self.ranks), time_limit(process_group)
        self.whose = "the group" if ranks is None else "the group and its replicas"
        self._purpose = purpose
        name = f"zeroresize, to {purpose}/{'-'.join(map(str, self.ranks))}/{self._num_made[purpose, self.ranks]}"
        self._num_made[purpose, self.ranks] += 1
        self.store: Any = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())

    def exchange(self, where: str, message: str = "") -> list[str]:
        """Leave a message and wait for those of all ranks.

        Args:
            where: the name of this exchange, used once.

        Raises:
            RuntimeError: if not all ranks come within the time limit, naming those that did not; or if one has no
                memory for it, naming it.
        """
        keys = self._keys(where)

        def exchange() -> list[str]:
            self.store.set(keys[self.rank], message)
            self.store.wait(keys, self.time_limit)
            return [self.store.get(key).decode() for key in keys]

        try:
            messages = within(self.time_limit + _GRACE, exchange)
        except Exception as error:
            self._require_memory(error, keys)
            raise RuntimeError(f"{self._missing(keys)} did not come to {self._purpose} {self._limit_told}") from error
        self._require_all(messages)
        return messages

    def connect(self, make: Callable[[], _T]) -> _T:
        """``make()``, which connects the ranks over the store; then nobody leaves before all are connected.

        Raises:
            RuntimeError: if it fails on a rank, or takes longer than the time limit.
        """
        where = "connected"
        keys = self._keys("ready")
        try:
            _try_threads()
        except Exception as error:
            self._require_memory(error, keys)
            raise
        self.exchange("ready")
        keys = self._keys(where)
        try:
            made = within(self.time_limit + _GRACE, make)
        except Exception as error:
            self._require_memory(error, keys)
            left: list[str] = []
            with suppress(Exception):  # a store that does not answer is named below
                left = within(_GRACE, lambda: self._left(keys))
            self._require_all(left)
            raise RuntimeError(
                f"all ranks of {self.whose} came to {self._purpose}, but could not be connected {self._limit_told}; or "
                "the job's store cannot be reached: the process that keeps it, usually rank 0's or torchrun's own, is "
                f"stopped or gone ({error})"
            ) from error
        self.exchange(where)
        return made

    def _keys(self, where: str) -> list[str]:
        return [f"{where}/{rank}" for rank in range(self.size)]

    def _require_memory(self, error: Exception, keys: list[str]) -> None:
        """Tell the others where memory kept this rank from coming: they would wait for it."""
        if is_out_of_memory(error):
            with suppress(Exception):  # no thread may be left to wait for the store in
                self.store.set(keys[self.rank], _RAN_OUT + reason(error))
            raise RuntimeError(f"out of memory, so this rank cannot {self._purpose}: {reason(error)}") from error

    def _left(self, keys: list[str]) -> list[str]:
        """What ranks have left so far."""
        return [self.store.get(key).decode() if self.store.check([key]) else "" for key in keys]

    def _require_all(self, messages: list[str]) -> None:
        lacking = {rank: one.removeprefix(_RAN_OUT) for rank, one in enumerate(messages) if one.startswith(_RAN_OUT)}
        if lacking:
            told = next(iter(lacking.values()))
            raise RuntimeError(f"ranks {list(lacking)} of {self.whose} ran out of memory to {self._purpose}: {told}")

    @property
    def _limit_told(self) -> str:
        return (
            f"within {self.time_limit.total_seconds():g} s, the time limit of their process group (timeout=... where "
            "it is made): they may have died, or be busy for longer, as with a checkpoint"
        )

    def _missing(self, keys: list[str]) -> str:
        try:
            missing = within(_GRACE, lambda: [rank for rank, key in enumerate(keys) if not self.store.check([key])])
        except Exception:
            return (
                "the job's store cannot be reached: the process that keeps it, usually rank 0's or torchrun's own, is "
                "stopped or gone, or other ranks"
            )
        return f"ranks {missing} of {self.whose}"


def _try_threads() -> None:
    """Whether there is memory for those of a connection: who fails while others connect leaves them waiting."""
    may_end, threads = threading.Event(), []
    try:
        for _ in range(_NUM_THREADS):
            thread = threading.Thread(target=may_end.wait, daemon=True)
            thread.start()
            threads.append(thread)
    finally:
        may_end.set()
        for thread in threads:
            thread.join()
