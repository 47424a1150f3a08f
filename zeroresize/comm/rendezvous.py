"""Where the ranks of a group meet before they have a connection of their own."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, group_ranks, time_limit
from zeroresize.utils.deadline import within
from zeroresize.utils.torch_private import default_store
from zeroresize.utils.torch_state import is_out_of_memory, reason

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds of a wait for other ranks after which it is warned of, if that is not too much of the time limit.
_WARNING_AFTER_S = 10.0
_SHARE_OF_LIMIT = 0.4

#: Added to the time limit, so the store can report it first, and for asking who came.
_GRACE = timedelta(seconds=1)
#: Seconds for which the store is asked at least.
_LEAST_S = 0.1
#: Begins what a rank leaves in place of a message where it failed.
_FAILED = "\0failed: "
STORE_IS_GONE = (
    "the job's store cannot be reached: the process that keeps it, usually rank 0's or torchrun's own, is stopped or "
    "gone"
)
#: What a rank leaves where it has waited in vain.
_OVER = "over"


class Rendezvous:
    """The ranks' own part of the default group's store, for one purpose.

    It needs no rank outside ``process_group``, only the process that keeps the store, so it is safe under DP × TP.
    Waits may last as long as those in ``process_group``: a rank that is late to one, as after a checkpoint, is late to
    both. A call to ``store`` can block for ever: only :func:`~zeroresize.utils.deadline.within` a limit.

    Args:
        purpose: why the ranks meet, for errors.
        ranks: who meets in place of the group's ranks, counted over the whole world: the group's replicas as well.
        whose: what errors call the ``ranks``; None for "the group and its replicas".
        number: tells this meeting from others of the same purpose and ranks, on all ranks alike; None where all ranks
            have called for equally many, but for those at which others have waited in vain: these are skipped.
        has_met: whether these ranks have met just before: then nobody is late, and half the time limit suffices.
    """

    _num_made: ClassVar[Counter[tuple[str, tuple[int, ...]]]] = Counter()

    def __init__(
        self,
        process_group: ProcessGroup,
        purpose: str,
        ranks: Sequence[int] | None = None,
        *,
        whose: str | None = None,
        number: int | None = None,
        has_met: bool = False,
    ) -> None:
        self.ranks = tuple(group_ranks(process_group) if ranks is None else ranks)
        self.rank = group_rank(process_group) if ranks is None else self.ranks.index(dist.get_rank())
        self.size, self.time_limit = len(self.ranks), time_limit(process_group) / (2 if has_met else 1)
        self.whose = whose or ("the group" if ranks is None else "the group and its replicas")
        self._purpose, self._has_met = purpose, has_met
        self.store: Any = self._store_of(self._next_number() if number is None else number)

    def _next_number(self) -> int:
        """Return the first number that this rank has not had and at which no rank has waited in vain."""
        key = self._purpose, self.ranks
        number = first = self._num_made[key]

        def ask() -> int:
            return next(later for later in itertools.count(first) if not self._store_of(later).check([_OVER]))

        with suppress(Exception):  # the first exchange says what is wrong with the store
            number = within(_GRACE, ask)
        self._num_made[key] = number + 1
        return number

    def _store_of(self, number: int) -> Any:
        name = f"zeroresize, to {self._purpose}/{'-'.join(map(str, self.ranks))}/{number}"
        return dist.PrefixStore(name, default_store())

    def exchange(self, where: str, message: str = "", ends_at: float | None = None) -> list[str]:
        """Leave a message and wait for those of all ranks; collective; ``where`` names this exchange, and is used once.

        Waiting ends at ``ends_at`` of the monotonic clock, or after the time limit.
        """
        keys = self._keys(where)
        limit = self.time_limit if ends_at is None else _until(ends_at)

        def exchange() -> list[str]:
            self.store.set(keys[self.rank], message)
            self._wait(keys, limit)
            return [self.store.get(key).decode() for key in keys]

        try:
            messages = within(limit + _GRACE, exchange)
        except Exception as error:
            self._require_memory(error, where)
            raise RuntimeError(f"{self._give_up(where)} did not come to {self._purpose} {self._limit_text}") from error
        self._require_all(messages)
        return messages

    def _wait(self, keys: list[str], limit: timedelta) -> None:
        """Wait for all of ``keys``; the lowest rank that has come warns once if that takes long."""
        began, first = time.monotonic(), timedelta(seconds=warning_after_s(limit))
        try:
            self.store.wait(keys, first)
            return
        except Exception:
            if time.monotonic() - began < 0.9 * first.total_seconds():  # no wait that was too short
                raise
        missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
        left = limit - first
        if missing and all(rank in missing for rank in range(self.rank)):
            logger.warning(
                f"rank {self.rank} of {self.whose} has waited for {first.total_seconds():.0f} s to {self._purpose}: "
                f"ranks {missing} have not come. They may be busy, have failed, or do not make the same calls. It "
                f"fails in {left.total_seconds():.0f} s, at the time limit of the process group"
            )
        self.store.wait(keys, left)

    def part(self) -> None:
        """Meet for the last time; the job's first rank, which may keep the store, goes when the others have read."""
        self.exchange("closed")
        with suppress(Exception):  # all have come: who is gone now needs nothing any more
            self.leave("parted", "")
            if self.ranks[self.rank] == min(self.ranks):
                within(self.time_limit + _GRACE, lambda: self.store.wait(self._keys("parted"), self.time_limit))

    def leave(self, where: str, text: str) -> None:
        """Leave a text at ``where`` for the others; an error if the store does not answer."""
        within(_GRACE, lambda: self.store.set(f"{where}/{self.rank}", text))

    def read(self, where: str) -> list[str | None]:
        """Return what each rank has left at ``where``, or None; an error if the store does not answer."""
        keys, store = self._keys(where), self.store
        return within(_GRACE, lambda: [store.get(key).decode() if store.check([key]) else None for key in keys])

    def fail(self, where: str, error: Exception) -> None:
        """Let the others' :meth:`exchange` at ``where`` fail at once, naming this rank; not collective."""
        with suppress(Exception):  # then they wait for the time limit
            text = _FAILED + reason(error)
            if is_out_of_memory(error):  # no thread may be left to wait for the store in
                self.store.set(f"{where}/{self.rank}", text)
            else:
                self.leave(where, text)

    def connect(self, make: Callable[[], _T], destroy: Callable[[_T], object] | None = None) -> _T:
        """Return what ``make()`` makes, which connects the ranks over the store, once all of them have it; collective.

        All of it takes the time limit once. After an error no rank has it.
        """
        ends_at = time.monotonic() + self.time_limit.total_seconds()
        self.exchange("ready", ends_at=ends_at)
        where = "connected"
        try:
            made = within(_until(ends_at) + _GRACE, _on_this_device(make), destroy)
        except Exception as error:
            self._require_memory(error, where)
            left: list[str | None] = []
            with suppress(Exception):  # a store that does not answer is named below
                left = self.read(where)
            self._require_all(left)
            if time.monotonic() < ends_at:  # the others still wait
                self.fail(where, error)
            raise RuntimeError(
                f"all ranks of {self.whose} came to {self._purpose}, but could not be connected {self._limit_text}; or "
                f"{STORE_IS_GONE} ({error})"
            ) from error
        try:
            self.exchange(where, ends_at=ends_at)
        except BaseException:
            if destroy is not None:
                destroy(made)
            raise
        return made

    def _keys(self, where: str) -> list[str]:
        return [f"{where}/{rank}" for rank in range(self.size)]

    def _require_memory(self, error: Exception, where: str) -> None:
        """Tell the others where memory kept this rank from coming: they would wait for it."""
        if is_out_of_memory(error):
            self.fail(where, error)
            raise RuntimeError(f"out of memory, so this rank cannot {self._purpose}: {reason(error)}") from error

    def _require_all(self, messages: Sequence[str | None]) -> None:
        """Raise what other ranks have left in place of a message."""
        failed = {rank: text for rank, text in enumerate(messages) if text is not None and text.startswith(_FAILED)}
        if failed:
            first = next(iter(failed.values())).removeprefix(_FAILED)
            raise RuntimeError(f"ranks {list(failed)} of {self.whose} failed to {self._purpose}: {first}")

    @property
    def _limit_text(self) -> str:
        share = "half of " if self._has_met else ""
        return (
            f"within {self.time_limit.total_seconds():g} s, {share}the time limit of their process group (timeout=... "
            "where it is made): they may have died, or be busy for longer, as with a checkpoint"
        )

    def _give_up(self, where: str) -> str:
        """Let ranks that come later skip this meeting, and return who has not come."""
        try:
            within(_GRACE, lambda: self.store.set(_OVER, ""))
            missing = [rank for rank, text in enumerate(self.read(where)) if text is None]
        except Exception:
            return f"{STORE_IS_GONE}, or other ranks"
        return f"ranks {missing} of {self.whose}"


def warning_after_s(limit: timedelta) -> float:
    """Return after how many seconds a wait that may last for ``limit`` is warned of."""
    return min(_WARNING_AFTER_S, _SHARE_OF_LIMIT * limit.total_seconds())


def _until(ends_at: float) -> timedelta:
    """Return the time that is left; a little even where there is none, for an answer that is there already."""
    return timedelta(seconds=max(ends_at - time.monotonic(), _LEAST_S))


def _on_this_device(call: Callable[[], _T]) -> Callable[[], _T]:
    """Return a call for another thread, in which CUDA's current device is the one of this thread."""
    if not torch.cuda.is_initialized():
        return call
    device = torch.cuda.current_device()

    def run() -> _T:
        with torch.cuda.device(device):
            return call()

    return run
