"""Where each rank is, and its word in the job's store: what it does where it waits or stands still for long, or failed.

A communication library says that something failed, at best with which rank. Only the ranks themselves know in which
call they were. So who waits long, or fails, reads the words of all ranks and says who has not come. While waits are
short nothing is written or read.
"""

from __future__ import annotations

import enum
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import ClassVar, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import explain
from zeroresize.comm.rendezvous import STORE_IS_GONE, Rendezvous, warning_after_s
from zeroresize.utils.texts import duration_text
from zeroresize.utils.torch_state import is_out_of_memory, reason

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Seconds that a rank which fails waits for the others' words; ranks mostly fail together, at one time limit.
WAIT_S = 2.0
#: Seconds to wait for the end of the thread; it takes longer only where it meets other ranks.
_END_S = 2.0
#: Of the seconds after which a wait is warned of: a wait is long after this part of them.
_LONG = 0.25
#: What a rank does, of which it leaves a word.
_WAITS, _STANDS_STILL, _HAS_FAILED = "waits", "stands still", "has failed"


class Call(enum.Enum):
    """What a rank is doing, as errors tell it."""

    MAKING = "making the Balancer"
    TRAINING = "training"
    FORWARD = "comparing a batch of new size"
    STEP = "balancer.step()"
    EPOCH_END = "balancer.epoch_end()"
    LOADING = "balancer.load_state_dict()"
    MOVING = "balancer.move() or at_home()"


_CALLS = tuple(Call)
#: Calls before which ranks may have counted differently.
_UNCOUNTED = (Call.MAKING, Call.LOADING)


@dataclass
class Whereabouts:
    """Where one rank is; the balancer keeps it up to date.

    ``num_steps`` counts calls of ``balancer.step()``, the one that it is in included, ``num_forwards`` the training
    forwards of its layers, ``num_optimizer_steps`` none that a loss scaler skipped, ``num_work_changes`` how often the
    program has announced other work. ``batch`` is what is compared while ``call`` is ``Call.FORWARD``.
    """

    call: Call = Call.MAKING
    num_steps: int = 0
    epoch: int = 0
    num_forwards: int = 0
    num_optimizer_steps: int = 0
    num_work_changes: int = 0
    batch: str = ""

    #: Of :meth:`as_numbers`.
    NUM_NUMBERS = 6

    def as_numbers(self) -> list[float]:
        """Return the whereabouts as ``NUM_NUMBERS`` numbers, without ``batch``, to be sent to other ranks."""
        call, *counts, _ = astuple(self)
        return [float(_CALLS.index(call)), *map(float, counts)]

    @classmethod
    def of_numbers(cls, numbers: Sequence[float]) -> Whereabouts:
        """Return the whereabouts that :meth:`as_numbers` has told."""
        call, num_steps, epoch, num_forwards, num_optimizer_steps, num_work_changes = map(int, numbers)
        return cls(_CALLS[call], num_steps, epoch, num_forwards, num_optimizer_steps, num_work_changes)

    def __str__(self) -> str:
        if self.call is Call.STEP:
            return f"balancer.step(), call {self.num_steps}"
        of_batch = f" ({self.batch})" if self.call is Call.FORWARD and self.batch else ""
        return f"{self.call.value}{of_batch}, after {self.num_steps} calls of balancer.step()"


#: What must be the same on all ranks: its names, the error, what each rank is told to have, and what to do.
_SAME = (
    (["call"], "the ranks of the group made different calls", "{where}", ""),
    (
        ["num_work_changes"],
        "balancer.profile_next() or load_state_dict() was called on some ranks only, or unequally often",
        "{where.num_work_changes} times",
        "; call it on every rank alike, between the same two steps",
    ),
    # Ranks that meet at an update have equal counts of steps, so their counts of forwards tell.
    (
        ["num_steps", "num_forwards"],
        "the ranks of the group did not call balancer.step() equally often",
        "{where.num_steps} calls in {where.num_forwards} training forwards of its layers",
        "; call it once after every optimizer step, and load_state_dict with what was saved together, on every rank",
    ),
    (
        ["num_optimizer_steps"],
        "the ranks of the group did not make equally many optimizer steps",
        "{where.num_optimizer_steps} steps",
        ". A loss scaler skips a step where gradients overflow, and each rank sees those of its own shards only, so "
        "scale and weights have come apart: use zeroresize.GradScaler in its place, and begin again from a checkpoint",
    ),
    (
        ["epoch"],
        "the ranks of the group did not call balancer.epoch_end() equally often",
        "{where.epoch} epochs had ended at {where}",
        "; call it at the end of an epoch, on every rank",
    ),
)


def require_same_whereabouts(ranks: Sequence[Whereabouts], *, counts_forwards: bool = True) -> None:
    """Raise RuntimeError unless the ranks of a group, in its order, came to each other from the same place."""
    for names, error, text, remedy in _SAME:
        compared = [name for name in names if counts_forwards or name != "num_forwards"]
        if len({tuple(getattr(rank, name) for name in compared) for rank in ranks}) > 1:
            by_rank = "; ".join(f"rank {rank}: {text.format(where=where)}" for rank, where in enumerate(ranks))
            raise RuntimeError(f"{error}: {by_rank}{remedy}")
        if ranks[0].call in _UNCOUNTED:
            return


class Word(NamedTuple):
    """Tells what a rank does: a kind, the same text on all ranks that wait together, and :attr:`Words.meeting`."""

    kind: str
    doing: str
    meeting: Sequence[object] | None = None


@dataclass(eq=False)
class _Wait:
    what: str
    absent: Callable[[], Sequence[int]] | None
    next_warning_s: float
    began: float = field(default_factory=time.monotonic)
    has_warned: bool = False


class Words:
    """The words of a group's ranks: this rank leaves its word, and reads those of the others.

    A thread wakes now and then, so that short waits cost nothing. Where this process makes no progress, wherever it
    waits, the thread also looks whether another rank waits to meet it.

    Args:
        rendezvous: the rendezvous of the ranks, whose store they share.
        where: this rank's whereabouts, kept up to date by the balancer, or words that tell them.

    Attributes:
        look_s: seconds after which a wait is long, and between two looks of the thread.
        last_heard: the whereabouts of all ranks when they last exchanged numbers; empty before that.
        meeting: arguments of :attr:`come` on the other ranks, while this rank waits for them to meet it; else None.
        come: a weak method that the thread calls with the meeting of another rank.
    """

    _met: ClassVar[list[str]] = []

    def __init__(self, rendezvous: Rendezvous, where: object) -> None:
        self._rendezvous, self._where = rendezvous, where
        self._after_s = warning_after_s(rendezvous.time_limit)
        self.look_s = _LONG * self._after_s
        self.last_heard: list[Whereabouts] = []
        self.meeting: Sequence[object] | None = None
        self.come: weakref.WeakMethod[Callable[..., None]] | None = None
        self._waits: list[_Wait] = []  # those that are under way, the innermost last
        self._moved_at: float | None = None
        self._left: object = None  # of what this rank's word tells
        self._failed: tuple[str, str] | None = None  # where this rank failed, and the words of all ranks
        self._silence = ""  # why the store does not answer
        self._lock = threading.Lock()
        ended = threading.Event()
        thread = threading.Thread(target=_attend, args=(weakref.ref(self), ended, self.look_s), daemon=True)
        with suppress(RuntimeError, MemoryError):  # no memory for a thread: then others wait for the time limit
            thread.start()
        self.close = weakref.finalize(self, _end, ended, thread)

    def moved(self) -> None:
        """Note that this process has made progress; before the first call none is expected."""
        self._moved_at = time.monotonic()

    @contextmanager
    def waiting(self, what: str, absent: Callable[[], Sequence[int]] | None = None) -> Iterator[None]:
        """Warn, on the lowest rank that waits, if the block takes long; say when it has ended after all."""
        wait = _Wait(what, absent, self._after_s)
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)
        if wait.has_warned:
            logger.info("all ranks have come after %s: training goes on", duration_text(time.monotonic() - wait.began))

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective, of gloo on the CPU: only its waits can be interrupted, and it goes on meanwhile."""
        with self.waiting("the other ranks in a collective"):
            while not work.is_completed():
                with suppress(RuntimeError):  # of the wait, or of the collective: then it has ended
                    work.wait(timedelta(seconds=self.look_s))
                self.raise_met()
            work.wait()

    def raise_later(self, error: ValueError) -> None:
        """Log what a thread has met, and let the next :meth:`raise_met` of this process raise it."""
        logger.error("%s", error)
        self._met.append(str(error))

    def raise_met(self) -> None:
        """Raise the ValueError that a thread has met, once."""
        if self._met:
            raise ValueError(self._met.pop())

    def fail(self, failed: str, *, waits: bool = True) -> str:
        """Leave a word of what failed on this rank, and return all ranks' words, as the end of an error.

        Of a second failure at the same place, which follows from the first, no word is left.
        """
        self.raise_met()
        with self._lock:
            where = str(self._where)
            if self._failed is None or self._failed[0] != where:
                word, ends_at = Word(_HAS_FAILED, f"{where}: {failed}"), time.monotonic() + WAIT_S * waits
                self._silence = ""  # whatever was before
                self._leave(word)
                words = self._read()
                while time.monotonic() < ends_at and any(not other or other.kind != _HAS_FAILED for other in words):
                    time.sleep(0.05)
                    words = self._read()
                self._failed = where, f". What the ranks of the group were doing: {self._by_rank(words, word)}"
            return self._failed[1]

    def withdraw(self) -> None:
        """Take back the word of a failure, since training went on after all."""
        if self._failed is not None:
            with self._lock:
                self._failed = None
                self._leave(None)

    def named(self, ranks: Sequence[int]) -> str:
        """Return the name of ranks of the group, with their numbers in the job where these are others."""
        in_job = [self._rendezvous.ranks[rank] for rank in ranks]
        of_job = "" if in_job == list(ranks) else f" (ranks {in_job} of the job)"
        return f"ranks {list(ranks)} of {self._rendezvous.whose}{of_job}"

    def _look(self) -> None:
        """Leave a word where this rank waits or stands still, warn if it is due, and come where another rank waits."""
        now, wait = time.monotonic(), next(iter(self._waits[-1:]), None)
        still_s = 0.0 if self._moved_at is None else now - self._moved_at
        waited_s = still_s if wait is None else now - wait.began
        subject = None if waited_s < self.look_s else wait or _STANDS_STILL
        if subject is not self._left:
            with self._lock:
                if self._failed is None:
                    self._left = subject
                    self._leave(None if subject is None else self._word(wait))
        warns = wait is not None and not wait.has_warned and waited_s >= wait.next_warning_s
        comes = still_s >= 2.0 * self.look_s
        words = self._read() if warns or comes else []
        if wait is not None and warns:
            self._warn(wait, waited_s, words)
        if comes:
            come = None if self.come is None else self.come()
            for word in words:
                if come is not None and word and word.meeting is not None:
                    come(*word.meeting)

    def _warn(self, wait: _Wait, waited_s: float, words: Sequence[Word | None]) -> None:
        rank = self._rendezvous.rank
        if any(word and word.kind == _WAITS for word in words[:rank]):
            wait.next_warning_s = 2.0 * waited_s  # a lower rank waits, too, and warns
            return
        wait.has_warned = True
        others = [peer for peer in range(self._rendezvous.size) if peer != rank]
        absent = others if wait.absent is None else wait.absent()
        here = self._word(wait)
        elsewhere = [peer for peer in absent if words and not ((word := words[peer]) and word.doing == here.doing)]
        left_s = max(self._rendezvous.time_limit.total_seconds() - waited_s, 0.0)
        logger.warning(
            f"rank {rank} has waited for {waited_s:.0f} s: {self.named(elsewhere or absent)} have not come, as far as "
            f"is known. It fails in {left_s:.0f} s, at the time limit of the process group (timeout=... where that is "
            f"made). What the ranks of the group are doing: {self._by_rank(words, here)}"
        )

    def _word(self, wait: _Wait | None) -> Word:
        if wait is None:
            return Word(_STANDS_STILL, f"{self._where}: without a forward of the layers")
        return Word(_WAITS, f"{self._where}: waits for {wait.what}", self.meeting)

    def _by_rank(self, words: Sequence[Word | None], here: Word) -> str:
        if not words:
            return f"rank {self._rendezvous.rank}: {here.doing}; others: not known, as {self._silence}"
        heard = [f", last heard from at {where}" for where in self.last_heard] or [""] * len(words)
        return "; ".join(
            f"rank {rank}: " + (word.doing if word else f"busy, stopped or dead{heard[rank]}")
            for rank, word in enumerate(words)
        )

    def _leave(self, word: Word | None) -> None:
        self._ask(lambda: self._rendezvous.leave("word", json.dumps(word) if word else ""), None)

    def _read(self) -> list[Word | None]:
        """Return the words of all ranks; nothing where the store does not answer."""
        texts: list[str | None] = self._ask(lambda: self._rendezvous.read("word"), [])
        return [Word(*json.loads(text)) if text else None for text in texts]

    def _ask(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """Ask the store; where it does not answer it is asked no more, as each question may leave a thread behind."""
        try:
            return otherwise if self._silence else call()
        except Exception as error:
            self._silence = reason(error) if is_out_of_memory(error) else STORE_IS_GONE
            return otherwise


_of_pipelines: weakref.WeakKeyDictionary[ProcessGroup, Words] = weakref.WeakKeyDictionary()


def begin_pipeline(process_group: ProcessGroup) -> None:
    """Let errors of a pipeline's messages tell what each stage was doing; to be called before every step."""
    if process_group not in _of_pipelines:  # the number of the group is the same on all of its ranks
        rendezvous = Rendezvous(process_group, f"run a pipeline over {process_group.group_name}", number=0)
        _of_pipelines[process_group] = words = Words(rendezvous, "in the pipeline")
        words.close()  # its thread, as no wait is warned of
        explain(process_group, words)
    _of_pipelines[process_group].withdraw()


def _attend(weak: weakref.ref[Words], ended: threading.Event, look_s: float) -> None:
    """Look now and then, in a thread that keeps nothing in between."""
    while not ended.wait(look_s):
        words = weak()
        if words is None:
            return
        with suppress(Exception):  # kept for the process itself
            words._look()
        del words


def _end(ended: threading.Event, thread: threading.Thread) -> None:
    """Also before Python shuts down: a thread that frees tensors, or meets other ranks, while it does aborts it."""
    ended.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(_END_S)
