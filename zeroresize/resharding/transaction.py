"""Moves that all ranks of a group make, or none: what each kind of move gives, and the one way to carry it out.

A move goes through four phases, each of which all ranks end together:

1. **Prepare**: each rank makes its part and tells what must be alike on all; where ranks must know what others hold,
   they tell it. A rank that cannot is heard of by all.
2. **Allocate**: each rank makes its new tensors and messages once it is known that those of all ranks fit.
3. **Carry out**: messages travel into the new tensors. Nothing that was there before is changed, but for gradients that
   a switch of strategies adds to where they are reduced: where it fails, the gradients of that step are lost.
4. **Commit**: once all ranks know that all of them have received everything, each puts the new tensors in place.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, group_rank, message_device, time_limit
from zeroresize.comm.exchange import Meet
from zeroresize.resharding.agreement import (
    agreed,
    allocate_together,
    gather_texts,
    meet_prepared,
    require_received,
    require_same,
)
from zeroresize.resharding.parcels import End, RankRounds
from zeroresize.resharding.transport import Transport
from zeroresize.utils.texts import duration_text, size_text
from zeroresize.utils.torch_state import synchronize


@dataclass(frozen=True, kw_only=True)
class MoveReport:
    """Reports what a move was on this rank.

    Attributes:
        seconds: wall time of the whole move.
        sent_bytes, received_bytes: by this rank, of all that belongs to what moved.
        num_rounds: in which messages were sent.
        buffer_bytes: memory of this rank's messages, sent and received, at most at once.
        new_bytes: memory of the new tensors, which were there beside the old ones.
    """

    seconds: float
    sent_bytes: int
    received_bytes: int
    num_rounds: int
    buffer_bytes: int
    new_bytes: int

    def __str__(self) -> str:
        sent, received = size_text(self.sent_bytes), size_text(self.received_bytes)
        return f"{sent} sent and {received} received in {self.num_rounds} rounds, {duration_text(self.seconds)}"


@dataclass(frozen=True)
class Participants:
    """Names the ranks that make a move, and how they meet.

    Attributes:
        device: of what moves on this rank.
        meet: of these ranks, and of others that must move alike.
    """

    process_group: ProcessGroup
    device: torch.device
    meet: Meet

    @property
    def message_device(self) -> torch.device:
        """Return the device on which messages between the ranks must lie."""
        return message_device(self.process_group, self.device)


class Transaction(ABC):
    """Makes one rank's part of a move, over the messages of ``process_group``, of what lies on ``device``.

    Attributes:
        plan: a fingerprint of what must be alike on all ranks; ``plan_name`` says what that is, where it is not.
        memory_name: what memory is needed for.
        title: what moves, in words of an error.
        transport: of the messages, once the ranks have agreed.
        new_bytes: that :meth:`make_tensors` makes, once the ranks have agreed.
        channel: another transport between the ranks than the group; None for the group itself.
        message_device: on which messages lie.
    """

    plan_name: ClassVar[str]
    memory_name: ClassVar[str] = "new tensors"
    title: str
    plan: float
    transport: Transport
    new_bytes: int
    channel: Channel | None = None
    _under_way: _InBackground | None = None

    def __init__(self, process_group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device, self._rank = process_group, device, group_rank(process_group)
        self.message_device = message_device(process_group, device)

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that must be free on the device."""
        return self.new_bytes + self.transport.buffer_bytes

    def describe(self) -> str:
        """Return a text of what this rank holds or sends, for the other ranks."""
        return ""

    @abstractmethod
    def agree(self, descriptions: Iterable[str]) -> None:
        """Lay out the rounds, given what all ranks have described, in their order.

        What it raises, as where the descriptions do not fit each other, is told to all of them.
        """

    def lay_out(self, rounds: RankRounds) -> None:
        """Take the rounds in which messages travel."""
        self.transport = Transport(rounds, self._group)

    def allocate(self) -> None:
        """Make the new tensors and the memory of messages."""
        self.transport.allocate(self.message_device)
        self.make_tensors()

    @abstractmethod
    def make_tensors(self) -> None:
        """Make the new tensors."""

    @abstractmethod
    def source_of(self, parcel: int) -> End:
        """Return where a parcel, by its number, is sent from."""

    @abstractmethod
    def target_of(self, parcel: int) -> End:
        """Return where a parcel, by its number, is put."""

    def copy_kept(self) -> None:  # noqa: B027 (some moves copy nothing)
        """Copy what stays on this rank into the new tensors, while the first messages are on their way."""

    @property
    def is_outdated(self) -> bool:
        """Return whether something that this rank has sent is another now, as where it was sent while it computed."""
        return False

    def send_and_receive(self) -> Exception | None:
        """Send and receive everything, into the new tensors; return the first failure, None if there is none.

        After a failure the other messages travel all the same: ranks that live wait for them.
        """
        return self.transport.carry_out(self.source_of, self.target_of, meanwhile=self.copy_kept, over=self.channel)

    def start(self, device: torch.device, wait_before: Callable[[], object] = lambda: None) -> None:
        """Send and receive beside what this rank computes, once ``wait_before`` returns in the other thread.

        :meth:`carry_out` waits for the end.
        """
        self._under_way = _InBackground(self.send_and_receive, device, wait_before)

    def wait(self) -> None:
        """Wait until nothing travels any more of what was started."""
        if self._under_way is not None:
            self._under_way.join()

    def carry_out(self) -> Exception | None:
        """Return the first failure of :meth:`send_and_receive`, which has been started or is called now."""
        if self._under_way is None:
            return self.send_and_receive()
        self.wait()
        return self._under_way.failure

    @abstractmethod
    def commit(self) -> None:
        """Put the new tensors in place of the old ones."""

    def figures(self, begin: float) -> dict[str, Any]:
        """Return the attributes of a :class:`MoveReport` of a move begun at ``begin`` (``time.perf_counter()``)."""
        transport = self.transport
        return {
            "seconds": time.perf_counter() - begin,
            "sent_bytes": transport.sent_bytes,
            "received_bytes": transport.received_bytes,
            "num_rounds": transport.num_rounds,
            "buffer_bytes": transport.buffer_bytes,
            "new_bytes": self.new_bytes,
        }


class _InBackground(threading.Thread):
    """Sends and receives beside what this rank computes, on a GPU on a stream of its own; ends with the process."""

    def __init__(
        self, call: Callable[[], Exception | None], device: torch.device, wait_before: Callable[[], object]
    ) -> None:
        super().__init__(name="zeroresize move", daemon=True)
        self._call, self._wait_before = call, wait_before
        self.failure: Exception | None = RuntimeError("the thread of the move has ended before the move")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":  # behind what has been given to the present one
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self.start()

    def run(self) -> None:
        try:
            self._wait_before()
            with torch.no_grad(), torch.cuda.stream(self._stream):
                self.failure = self._call()
                if self._stream is not None:
                    self._stream.synchronize()
        except Exception as error:  # the other thread, and the other ranks, must hear of any
            self.failure = error
        finally:  # what it holds is free as soon as nobody else needs it
            del self._call, self._wait_before


TransactionT = TypeVar("TransactionT", bound=Transaction)


def run_transaction(
    make: Callable[[], TransactionT], participants: Participants, *, in_two_meetings: bool = False
) -> TransactionT:
    """Make a move on all ranks, or on none; collective.

    Args:
        make: makes this rank's part; what it raises is told to the others.
        in_two_meetings: one before anything travels and one after, where ranks have nothing to describe.

    Returns:
        The move, committed.

    Raises:
        ValueError: that ``make`` raises; the other ranks raise a :class:`CannotMoveError`, a RuntimeError.
        NotEnoughMemoryError: on every rank, if new tensors and messages do not fit on some.
        RuntimeError: on every rank that lives, if ranks differ in the move, or one dies, stops or fails; it names them.
            After any of these everything is as it was, but for gradients that a switch has added. Only what ``commit``
            raises, and a rank that dies just when the last one has received all, can leave others with what has moved.
    """
    prepare = prepare_in_one_meeting if in_two_meetings else prepare_transaction
    with torch.profiler.record_function("zeroresize::move"):
        transaction = prepare(make, participants)
        receive_transaction(transaction, participants)
        transaction.commit()
    return transaction


def prepare_transaction(make: Callable[[], TransactionT], participants: Participants) -> TransactionT:
    """Make a move on which all ranks have agreed, with the memory that it takes; collective."""
    meet = participants.meet
    agree = partial(agreed, meet, moves=True)

    def make_and_describe() -> tuple[TransactionT, str]:
        transaction = make()
        return transaction, transaction.describe()

    (transaction, description), table = agree(
        make_and_describe, lambda made: (made[0].plan, float(len(made[1].encode()))), what="what moves"
    )
    plans, sizes = zip(*(row[:2] for row in table), strict=True)
    require_same(plans, transaction.plan_name, meet, moves=True)
    texts = gather_texts(description, meet, participants.process_group, participants.message_device, sizes)
    agree(lambda: transaction.agree(texts), what=transaction.title)
    allocate = transaction.allocate, meet, transaction.memory_name
    allocate_together(transaction.needed_bytes, participants.device, *allocate)
    return transaction


def prepare_in_one_meeting(make: Callable[[], TransactionT], participants: Participants) -> TransactionT:
    """Do as :func:`prepare_transaction`, without descriptions: ranks compare plans when they meet about memory."""
    try:
        transaction = make()
        transaction.agree(())
    except Exception as error:  # the others must hear of any, when they meet about memory
        meet_prepared(participants.meet, error, "what moves", moves=True)
        raise

    def meet_with_plan(*numbers: float) -> Sequence[Sequence[float]]:
        return participants.meet(*numbers, transaction.plan)

    def require_same_plans(table: Sequence[Sequence[float]]) -> None:
        require_same([plan for *_, plan in table], transaction.plan_name, participants.meet, moves=True)

    needed, device = transaction.needed_bytes, participants.device
    allocate_together(needed, device, transaction.allocate, meet_with_plan, check=require_same_plans)
    return transaction


def receive_transaction(transaction: Transaction, participants: Participants) -> bool:
    """Carry out a prepared move up to its commit: every rank has received everything, and nothing has changed.

    Returns:
        Whether something is another on some rank than when it was sent, so all must be sent once more.
    """
    begin, is_outdated = time.perf_counter(), False
    failure: Exception | None
    try:
        failure = transaction.carry_out()
        is_outdated = failure is None and transaction.is_outdated
        synchronize(participants.device)  # a wait only orders streams: nothing has been received before this
    except Exception as error:  # the others must hear of any
        failure = error
    left: timedelta | None = None
    if participants.message_device.type == "cpu":
        # It may have waited for the time limit already, for a rank that will not come to this either.
        left = time_limit(participants.process_group) - timedelta(seconds=time.perf_counter() - begin)
    return any(require_received(failure, participants.meet, float(is_outdated), left))
