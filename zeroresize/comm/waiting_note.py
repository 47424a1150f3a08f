"""A note in the job's store of what a rank waits for, left only if the wait is long."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.utils.deadline import within

#: Seconds after which a wait is long, if that is not too much of the time limit.
_LONG_S = 1.0
_SHARE_OF_LIMIT = 0.1
#: Seconds to wait for an answer of the store.
_ANSWER_S = 1.0


class WaitingNote:
    """One note for all ranks; the newest stays.

    A thread that looks once a second writes it, so short waits cost nothing, and a store that does not answer holds up
    nobody.

    Args:
        rendezvous: of the ranks; they share its store.

    Attributes:
        long_s: seconds after which a wait is long; a note is there after twice that.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._store, self._key = rendezvous.store, "waiting"
        self.long_s = min(_LONG_S, _SHARE_OF_LIMIT * rendezvous.time_limit.total_seconds())
        self._waits: list[list[str]] = []  # at most one, whose identity tells one wait from the next
        self._ended = threading.Event()
        self._is_started = self._is_unreadable = False
        self.close = weakref.finalize(self, self._ended.set)

    @contextmanager
    def left_if_long(self, text: str) -> Iterator[None]:
        """Leave ``text`` for the others if what is done within takes long."""
        if not self._is_started:
            self._is_started = True
            loop = _leave_notes, (self._waits, self._ended, self.long_s, self._store, self._key)
            with suppress(RuntimeError, MemoryError):  # no memory for a thread: then others wait for the time limit
                threading.Thread(target=loop[0], args=loop[1], daemon=True, name="zeroresize, long waits").start()
        self._waits.append([text])
        try:
            yield
        finally:
            self._waits.clear()

    def read(self) -> str | None:
        """The newest note; None if there never was one, or the store does not answer."""
        if self._is_unreadable:
            return None

        def read() -> str | None:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None

        try:
            return within(timedelta(seconds=_ANSWER_S), read)
        except Exception:
            self._is_unreadable = True
            return None


def _leave_notes(waits: list[list[str]], ended: threading.Event, long_s: float, store: Any, key: str) -> None:
    seen: list[str] | None = None
    while not ended.wait(long_s):
        now = next(iter(waits), None)
        if now is not None and now is seen:
            with suppress(Exception):  # the others then wait for the time limit
                store.set(key, now[0])
        seen = now
