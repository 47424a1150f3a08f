"""What each rank of a group was doing when waiting for another failed.

A communication library says that something failed, at best with which rank. Only the ranks themselves know in which
call they were. So each rank writes that into the job's store when it fails, and reads what the others wrote. While
nothing fails, nothing is written or read.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from datetime import timedelta

from zeroresize.comm.rendezvous import Rendezvous
from zeroresize.comm.whereabouts import Whereabouts
from zeroresize.utils.deadline import within
from zeroresize.utils.memory_errors import is_out_of_memory, reason

#: Seconds that a rank waits for the others' reports; ranks mostly fail together, at one time limit.
WAIT_S = 2.0
#: Seconds to wait for an answer of the store.
_ANSWER_S = 1.0


def word_key(rank: int) -> str:
    """Return the key under which a rank that waits long, or makes no progress, has left a word of what it does."""
    return f"word/{rank}"


class FailureReports:
    """The reports of a group's ranks: this rank writes its own and reads those of the others.

    Args:
        rendezvous: the rendezvous of the ranks, to whose store they write.
        where: this rank's whereabouts, kept up to date by the balancer.

    Attributes:
        last_heard: the whereabouts of all ranks when they last exchanged numbers; empty before that.
    """

    def __init__(self, rendezvous: Rendezvous, where: Whereabouts) -> None:
        self._rendezvous, self._where = rendezvous, where
        self._keys = [f"failure/{rank}" for rank in range(rendezvous.size)]
        self.last_heard: list[Whereabouts] = []
        self._reported: tuple[str, str] | None = None  # where this rank failed, and the reports of all ranks
        self._lock = threading.Lock()

    def tell(self, failed: str, *, waits: bool = True) -> str:
        """Report where this rank is and what failed there, and return all ranks' reports, as the end of an error.

        A second failure at the same place, which follows from the first, is not reported.

        Args:
            failed: the text that the others will read.
            waits: whether to wait for the others' reports, ``WAIT_S`` seconds at most.
        """
        with self._lock:
            where = str(self._where)
            if self._reported is None or self._reported[0] != where:
                self._reported = where, self._exchange(f"{where}: {failed}", WAIT_S if waits else 0.0)
            return self._reported[1]

    def withdraw(self) -> None:
        """Withdraw this rank's report, since training went on after all."""
        with self._lock:
            if self._reported is None:
                return
            self._reported = None
            key = self._keys[self._rendezvous.rank]
            with suppress(Exception):  # where the store does not answer, nobody can read it either
                within(timedelta(seconds=_ANSWER_S), lambda: self._rendezvous.store.set(key, ""))

    def _exchange(self, report: str, wait_s: float) -> str:
        rank = self._rendezvous.rank
        try:
            reports, words = within(timedelta(seconds=wait_s + _ANSWER_S), lambda: self._leave_and_read(report, wait_s))
        except Exception as error:
            why = (
                f"this rank has no memory left to ask in ({reason(error)})"
                if is_out_of_memory(error)
                else "the job's store cannot be reached; the process that keeps it, usually rank 0's or torchrun's "
                "own, is stopped or gone"
            )
            return f". This rank, {rank}, was at: {report}. What the others were doing is not known: {why}"
        rows = (f"rank {rank}: {text or self._last_heard_of(rank, words[rank])}" for rank, text in enumerate(reports))
        return f". What the ranks of the group were doing: {'; '.join(rows)}"

    def _last_heard_of(self, rank: int, word: str) -> str:
        if word:
            return f"has not reported its failure, and its last word was: {word}"
        heard = f", and when numbers were last exchanged it was at {self.last_heard[rank]}" if self.last_heard else ""
        return f"has not reported{heard} (may be dead, stopped or busy)"

    def _leave_and_read(self, report: str, wait_s: float) -> tuple[list[str], list[str]]:
        """Return the reports and the last words of all ranks; empty where there is none."""
        store = self._rendezvous.store
        store.set(self._keys[self._rendezvous.rank], report)
        deadline = time.monotonic() + wait_s
        reports = [""] * len(self._keys)
        while True:
            for rank, key in enumerate(self._keys):
                if not reports[rank] and store.check([key]):
                    reports[rank] = store.get(key).decode()
            if all(reports) or time.monotonic() >= deadline:
                words = [
                    store.get(word_key(rank)).decode() if not there and store.check([word_key(rank)]) else ""
                    for rank, there in enumerate(reports)
                ]
                return reports, [json.loads(word)[1] if word else "" for word in words]
            time.sleep(0.05)
