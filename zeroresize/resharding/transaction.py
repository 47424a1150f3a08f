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

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import message_device, time_limit
from zeroresize.comm.exchange import Meet
from zeroresize.resharding.agreement import (
    allocate_together,
    gather_texts,
    meet_prepared,
    require_received,
    require_same,
)
from zeroresize.resharding.background import BackgroundCall
from zeroresize.resharding.transport import Transport


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


@dataclass(frozen=True)
class Participants:
    """Names the ranks that make a move, and how they meet.

    Attributes:
        process_group: whose ranks exchange messages.
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
    """Makes one rank's part of a move.

    Attributes:
        plan: a fingerprint of what must be alike on all ranks; ``plan_name`` says what that is, where it is not.
        state: a fingerprint of what the optimizer must have alike; without a ``state_name`` ranks may differ in it.
        memory_name: what memory is needed for.
        transport: of the messages, once the ranks have agreed.
        new_bytes: that :meth:`allocate` makes beside messages, once the ranks have agreed.
    """

    plan_name: ClassVar[str]
    state_name: ClassVar[str | None] = None
    memory_name: ClassVar[str] = "new tensors"
    plan: float
    state: float = 0.0
    transport: Transport
    new_bytes: int
    _under_way: BackgroundCall[Exception | None] | None = None

    @property
    @abstractmethod
    def title(self) -> str:
        """Return what moves, in words of an error."""

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that must be free on the device."""
        return self.new_bytes + self.transport.buffer_bytes

    def needs_descriptions(self, states: Sequence[float]) -> bool:
        """Return whether each rank must know what others hold, given the ``state`` of all; the same on all ranks."""
        return False

    def describe(self) -> str:
        """Return a text of what this rank holds or sends, for the other ranks."""
        return ""

    @abstractmethod
    def agree(self, descriptions: Iterable[str] | None) -> None:
        """Take what all ranks have described, and lay out the rounds.

        Args:
            descriptions: [R], in the order of the ranks; None where they were not needed.

        Raises:
            Exception: if the ranks' descriptions do not fit each other; told to all of them.
        """

    @abstractmethod
    def allocate(self) -> None:
        """Make the new tensors and the memory of messages."""

    @property
    def is_outdated(self) -> bool:
        """Return whether something that this rank has sent is another now, as where it was sent while it computed."""
        return False

    @abstractmethod
    def send_and_receive(self) -> Exception | None:
        """Send and receive everything, into the new tensors; return the first failure, None if there is none.

        After a failure the other messages travel all the same: ranks that live wait for them.
        """

    def start(self, device: torch.device, wait_before: Callable[[], object] = lambda: None) -> None:
        """Send and receive from now on beside what this rank computes; :meth:`carry_out` waits for the end.

        Args:
            wait_before: waits, in the other thread, for what must come first.
        """
        self._under_way = BackgroundCall(self.send_and_receive, device, wait_before)

    def wait(self) -> None:
        """Wait until nothing travels any more of what was started."""
        if self._under_way is not None:
            self._under_way.wait()

    def carry_out(self) -> Exception | None:
        """Return the first failure of :meth:`send_and_receive`, which has been started or is called now."""
        return self.send_and_receive() if self._under_way is None else self._under_way.result()

    @abstractmethod
    def commit(self) -> None:
        """Put the new tensors in place of the old ones."""

    def figures(self, begin: float) -> dict[str, Any]:
        """Return the attributes of a :class:`MoveReport` of a move begun at ``begin`` (``time.perf_counter()``)."""
        return {
            "seconds": time.perf_counter() - begin,
            "sent_bytes": self.transport.sent_bytes,
            "received_bytes": self.transport.received_bytes,
            "num_rounds": self.transport.num_rounds,
            "buffer_bytes": self.transport.buffer_bytes,
            "new_bytes": self.new_bytes,
        }


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
    transaction = prepare(make, participants)
    receive_transaction(transaction, participants)
    transaction.commit()
    return transaction


def prepare_transaction(make: Callable[[], TransactionT], participants: Participants) -> TransactionT:
    """Make a move on which all ranks have agreed, with the memory that it takes; collective.

    Raises:
        Exception: as :func:`run_transaction`, before anything has travelled.
    """
    meet = participants.meet
    numbers: tuple[float, float, float] | Exception
    try:
        transaction = make()
        description = transaction.describe()
        numbers = transaction.plan, transaction.state, float(len(description.encode()))
    except Exception as error:  # the others must hear of any
        numbers = error
    plans, states, sizes = zip(*(row[:3] for row in meet_prepared(meet, numbers)), strict=True)
    require_same(plans, transaction.plan_name, meet)
    if transaction.state_name is not None:
        require_same(states, transaction.state_name, meet)
    if transaction.needs_descriptions(states):
        device = participants.message_device
        descriptions = gather_texts(description, meet, participants.process_group, device, sizes)
        agreed: tuple[float, float] | Exception = (0.0, 0.0)
        needed, allocate = 0, transaction.allocate
        try:
            transaction.agree(descriptions)
            needed = transaction.needed_bytes
        except Exception as error:  # the others must hear of any
            agreed = error
        meet_prepared(meet, agreed, transaction.title)
    else:
        needed, allocate = _agree_alone(transaction)
    allocate_together(needed, participants.device, allocate, meet, transaction.memory_name)
    return transaction


def _agree_alone(transaction: Transaction) -> tuple[int, Callable[[], None]]:
    """Lay out the rounds without descriptions; return the bytes they need, and what allocates or raises the failure."""
    try:
        transaction.agree(None)
        return transaction.needed_bytes, transaction.allocate
    except Exception as error:  # the others must hear of any, when they meet over memory
        failure = error

    def fail() -> None:
        raise failure

    return 0, fail


def prepare_in_one_meeting(make: Callable[[], TransactionT], participants: Participants) -> TransactionT:
    """Do as :func:`prepare_transaction`, without descriptions: ranks compare plans when they meet about memory.

    Raises:
        Exception: as :func:`run_transaction`, before anything has travelled.
    """
    made: TransactionT | Exception
    try:
        made = make()
        made.agree(None)
    except Exception as error:  # the others must hear of any
        made = error

    def meet_with_plan(*numbers: float) -> Sequence[Sequence[float]]:
        return participants.meet(*numbers, math.nan if isinstance(made, Exception) else made.plan)

    def require_same_plans(table: Sequence[Sequence[float]]) -> None:
        plans = [plan for *_, plan in table]
        if not any(map(math.isnan, plans)):  # a rank that ran out of memory has none
            assert not isinstance(made, Exception)
            require_same(plans, made.plan_name, participants.meet)

    def allocate() -> None:
        if isinstance(made, Exception):
            raise made
        made.allocate()

    needed = 0 if isinstance(made, Exception) else made.needed_bytes
    allocate_together(needed, participants.device, allocate, meet_with_plan, check=require_same_plans)
    assert not isinstance(made, Exception)
    return made


def receive_transaction(transaction: Transaction, participants: Participants) -> bool:
    """Carry out a prepared move up to its commit: every rank has received everything, and nothing has changed.

    Returns:
        Whether something is another on some rank than when it was sent, so all must be sent once more.

    Raises:
        RuntimeError: on every rank that lives, if one has not; it names it.
    """
    begin, is_outdated = time.perf_counter(), False
    failure: Exception | None
    try:
        failure = transaction.carry_out()
        is_outdated = failure is None and transaction.is_outdated
        if participants.device.type == "cuda":  # a wait only orders streams: nothing has been received before this
            torch.cuda.synchronize(participants.device)
    except Exception as error:  # the others must hear of any
        failure = error
    left: timedelta | None = None
    if participants.message_device.type == "cpu":
        # It may have waited for the time limit already, for a rank that will not come to this either.
        left = time_limit(participants.process_group) - timedelta(seconds=time.perf_counter() - begin)
    return any(require_received(failure, participants.meet, float(is_outdated), left))
