"""A note in the job's store of what a rank waits for, left only if the wait is long, and who looks for it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.utils.deadline import within

#: Seconds after which a wait is long, if that is not too much of the time limit.
_LONG_S = 1.0
_SHARE_OF_LIMIT = 0.1
#: Times that, after which a process without progress looks for a note at first; then after twice as long and so on.
_FIRST_LOOK = 4
#: Seconds to wait for an answer of the store.
_ANSWER_S = 1.0
#: Seconds to wait for a thread's end; it takes longer only where the store does not answer.
_END_S = 2.0
#: What ends each thread.
_threads: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()


class WaitingNote:
    """One note that all ranks share: what a rank waits for, where that takes long; the newest stays.

    A thread that wakes once a second writes it, so short waits cost nothing, and a store that does not answer holds up
    nobody. It also looks for the others' where this process makes no progress, wherever it waits.

    Args:
        rendezvous: the rendezvous of the ranks, whose store they share.

    Attributes:
        long_s: seconds after which a wait is long; a note is there after twice that.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._store, self._key = rendezvous.store, "waiting"
        self.long_s = min(_LONG_S, _SHARE_OF_LIMIT * rendezvous.time_limit.total_seconds())
        self._waits: list[list[str]] = []  # at most one, whose identity tells one wait from the next
        self._ended = threading.Event()
        self._watched: list[tuple[Callable[[], Any], Callable[[], Any]]] = []  # at most one pair of weak methods
        self._looks: list[Callable[[], Any]] = []  # weak methods
        self._is_started = self._is_unreadable = False
        self.close = weakref.finalize(self, self._ended.set)

    def look_when_stuck(self, progress: Callable[[], object], look: Callable[[], None]) -> None:
        """Call ``look`` in the thread where ``progress()`` stays the same for long.

        Args:
            progress: a method that returns what changes whenever the process makes progress.
            look: a method that reads the note; both are called for as long as their object lives.
        """
        self._watched[:] = [(weakref.WeakMethod(progress), weakref.WeakMethod(look))]

    def look_regularly(self, look: Callable[[float], None]) -> None:
        """Call ``look`` in the thread every :attr:`long_s` seconds.

        Args:
            look: a method, which is given the seconds for which this process has made no progress, and called for as
                long as its object lives.
        """
        self._looks.append(weakref.WeakMethod(look))

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._is_started:
            return
        self._is_started = True
        args = self._waits, self._watched, self._looks, self._ended, self.long_s, self._store, self._key
        with suppress(RuntimeError, MemoryError):  # no memory for a thread: then others wait for the time limit
            thread = threading.Thread(target=_attend, args=args, daemon=True, name="zeroresize, long waits")
            thread.start()
            _threads[thread] = self._ended

    @contextmanager
    def left_if_long(self, text: str) -> Iterator[None]:
        """Leave ``text`` for the others if the block takes long."""
        self.start()
        self._waits.append([text])
        try:
            yield
        finally:
            self._waits.clear()

    def read(self) -> str | None:
        """Return the newest note; None if there never was one, or the store does not answer."""
        if self._is_unreadable:
            return None

        def read() -> str | None:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None

        try:
            return within(timedelta(seconds=_ANSWER_S), read)
        except Exception:
            self._is_unreadable = True
            return None


def _end_threads() -> None:
    """Before Python shuts down: a thread that frees tensors, or meets other ranks, while it does aborts the process."""
    for ended in _threads.values():
        ended.set()
    for thread in list(_threads):
        thread.join(_END_S)


atexit.register(_end_threads)


def _attend(
    waits: list[list[str]],
    watched: list[tuple[Callable[[], Any], Callable[[], Any]]],
    looks: list[Callable[[], Any]],
    ended: threading.Event,
    long_s: float,
    store: Any,
    key: str,
) -> None:
    seen: list[str] | None = None
    progress_seen, num_still, next_look = None, 0, _FIRST_LOOK
    while not ended.wait(long_s):
        now = next(iter(waits), None)
        if now is not None and now is seen:
            with suppress(Exception):  # the others then wait for the time limit
                store.set(key, now[0])
        seen = now
        progress_now = _call(watched, 0)
        is_still = progress_now is not None and progress_now == progress_seen
        num_still = num_still + 1 if is_still else 0
        _look(looks, num_still * long_s)
        if not is_still:
            progress_seen, next_look = progress_now, _FIRST_LOOK
        elif num_still >= next_look:
            next_look *= 2
            with suppress(Exception):  # kept for the process itself
                _call(watched, 1)


def _look(looks: list[Callable[[], Any]], still_s: float) -> None:
    for weak in looks:
        method = weak()
        if method is not None:
            with suppress(Exception):  # a look serves warnings only
                method(still_s)


def _call(watched: list[tuple[Callable[[], Any], Callable[[], Any]]], which: int) -> Any:
    """Call one of the pair if its object is alive, which is kept no longer than that."""
    method = watched[0][which]() if watched else None
    return method() if method is not None else None
