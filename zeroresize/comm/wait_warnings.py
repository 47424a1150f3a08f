"""One warning of a wait that takes long: who has not come, and what every rank is doing, as far as that is known.

A rank that waits long, or makes no progress for long, leaves a word of it in the job's store. The lowest rank that
waits reads those words, and warns. Nothing is written or read while waits are short.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from zeroresize.comm.failure_reports import FailureReports, word_key
from zeroresize.comm.rendezvous import Rendezvous, warning_after_s
from zeroresize.comm.waiting_note import WaitingNote
from zeroresize.comm.whereabouts import Whereabouts
from zeroresize.utils.deadline import within

logger = logging.getLogger(__name__)

#: Seconds to wait for an answer of the store.
_ANSWER_S = 1.0
#: Code of these packages is not the user's.
_NOT_THE_USERS = frozenset({"zeroresize", "torch", *sys.stdlib_module_names}) - {"__main__"}


class Word(NamedTuple):
    """Tells what a rank is doing.

    Attributes:
        place: what it waits for and after which calls, the same text on all ranks that wait together; empty where it
            waits for nobody.
        text: the same for readers, with the line of the program.
    """

    place: str
    text: str


@dataclass(eq=False)
class _Wait:
    what: str
    absent: Callable[[], Sequence[int]] | None
    began: float
    thread: int = field(default_factory=threading.get_ident)
    next_look_s: float = 0.0
    has_warned: bool = False


class WaitWarnings:
    """Warns of this rank's long waits for other ranks; the thread of a :class:`WaitingNote` looks for them.

    Args:
        rendezvous: the rendezvous of the ranks, whose store they share.
        where: this rank's whereabouts, kept up to date by the balancer.
        reports: know what was last heard of each rank.
        waiting: owns the thread, which is started with the first wait.

    Attributes:
        after_s: seconds of a wait after which it is warned of.
    """

    def __init__(
        self, rendezvous: Rendezvous, where: Whereabouts, reports: FailureReports, waiting: WaitingNote
    ) -> None:
        self._rendezvous, self._where, self._reports, self._waiting = rendezvous, where, reports, waiting
        self._keys = [word_key(rank) for rank in range(rendezvous.size)]
        self.after_s = warning_after_s(rendezvous.time_limit)
        self._waits: list[_Wait] = []  # those that are under way, the innermost last
        self._left: object = None  # of what this rank's word tells
        waiting.look_regularly(self._look)

    @contextmanager
    def during(
        self, what: str, absent: Callable[[], Sequence[int]] | None = None, waited_s: float = 0.0
    ) -> Iterator[None]:
        """Warn, on the lowest rank that waits, if the block takes long; say when it has ended after all.

        Args:
            what: the end of "waits for ...", the same on all ranks that wait together.
            absent: returns the ranks, within the group, from which nothing has come yet; the first of them is the one
                that is waited for, the others may have come meanwhile. None where that cannot be known.
            waited_s: seconds for which the wait has lasted already.
        """
        self._waiting.start()
        wait = _Wait(what, absent, time.monotonic() - waited_s, next_look_s=self.after_s)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)
        if wait.has_warned:
            logger.info("all ranks have come after %.0f s: training goes on", time.monotonic() - wait.began)

    def _look(self, still_s: float) -> None:
        """Leave a word where this rank waits, or has made no progress for ``still_s`` seconds; warn if it is due."""
        wait = next(iter(self._waits[-1:]), None)
        waited_s = still_s if wait is None else time.monotonic() - wait.began
        if waited_s < self.after_s / 2:
            if self._left is not None:
                self._left = None
                self._leave("")
            return
        subject = wait or "still"
        if self._left is not subject:
            self._left = subject
            self._leave(json.dumps(self._word(wait, waited_s)))
        if wait is not None and waited_s >= wait.next_look_s and not wait.has_warned:
            wait.next_look_s = 2.0 * waited_s
            self._warn(wait, waited_s)

    def _leave(self, word: str) -> None:
        with suppress(Exception):  # then this rank's word is missing in a warning
            within(
                timedelta(seconds=_ANSWER_S),
                lambda: self._rendezvous.store.set(self._keys[self._rendezvous.rank], word),
            )

    def _word(self, wait: _Wait | None, waited_s: float) -> Word:
        if wait is None:
            line = _line_of_program(threading.main_thread().ident)
            return Word("", f"{self._where}{line}, without a forward of the layers for {waited_s:.0f} s")
        place = f"{wait.what} at {self._where}"
        return Word(place, f"waits for {place}{_line_of_program(wait.thread)}")

    def _read(self) -> list[Word | None] | None:
        """Return the words of all ranks; None where the store does not answer."""
        store = self._rendezvous.store

        def read() -> list[Word | None]:
            texts = [store.get(key).decode() if store.check([key]) else "" for key in self._keys]
            return [Word(*json.loads(text)) if text else None for text in texts]

        try:
            return within(timedelta(seconds=_ANSWER_S), read)
        except Exception:
            return None

    def _warn(self, wait: _Wait, waited_s: float) -> None:
        rank, size = self._rendezvous.rank, self._rendezvous.size
        words = self._read()
        if any(word is not None and word.place for word in (words or [])[:rank]):
            return  # a lower rank waits, too, and warns
        wait.has_warned = True
        here = self._word(wait, waited_s)
        others = {peer: None if words is None else words[peer] for peer in range(size) if peer != rank}
        absent = _not_come(here, others, None if wait.absent is None else wait.absent())
        left_s = max(self._rendezvous.time_limit.total_seconds() - waited_s, 0.0)
        known = ", as far as is known" if wait.absent is None else ""
        rows = (f"rank {peer} {word.text if word else self._unheard(peer)}" for peer, word in others.items())
        doing = "is not known, as the job's store does not answer" if words is None else "; ".join(rows)
        logger.warning(
            "rank %d %s, for %.0f s already: ranks %s of %s%s have not come%s. It waits for %.0f s more, until the "
            "time limit of the process group (timeout=... where that is made), and then fails. What the "
            "other ranks do: %s",
            rank,
            here.text,
            waited_s,
            absent,
            self._rendezvous.whose,
            self._in_job(absent),
            known,
            left_s,
            doing,
        )

    def _unheard(self, rank: int) -> str:
        heard = f", and was last heard from at {self._reports.last_heard[rank]}" if self._reports.last_heard else ""
        return f"does not wait{heard}: it may be busy, as with a checkpoint, or stopped, or may have ended"

    def _in_job(self, ranks: Sequence[int]) -> str:
        in_job = [self._rendezvous.ranks[rank] for rank in ranks]
        return "" if in_job == list(ranks) else f" (ranks {in_job} of the job)"


def _not_come(here: Word, others: dict[int, Word | None], absent: Sequence[int] | None) -> list[int]:
    """Return the ranks that are not where this rank is.

    Args:
        here: the word of this rank.
        others: the words of the other ranks.
        absent: as of :meth:`WaitWarnings.during`.
    """
    if absent is None:
        return [rank for rank, word in others.items() if word is None or word.place != here.place]
    elsewhere = [rank for rank in absent[1:] if (word := others.get(rank)) is not None and word.place != here.place]
    return sorted([*absent[:1], *elsewhere])


def _line_of_program(thread: int | None) -> str:
    """Return " (FILE, line N)" of the user's code that a thread is in; empty where there is none."""
    frame = sys._current_frames().get(thread) if thread is not None else None
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_THE_USERS:
            return f" ({os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno})"
        frame = frame.f_back
    return ""
