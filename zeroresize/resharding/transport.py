"""Ranks of a group send each other messages, round after round in bounded memory.

While one round travels, the next is packed. Every kind of move packs its own slices; how messages are laid out, posted,
awaited and counted is the same for all. A pair of ranks has one message in a round. All messages of a round are posted
before any is awaited, so no order of the pairs can let ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, Waitable, group_rank, start_messages
from zeroresize.resharding.agreement import wait_for_all

RoundT = TypeVar("RoundT")
#: (sender, receiver), within the group.
Pair = tuple[int, int]
#: Fills a message [bytes] of a pair in a round, or reads it.
Packer = Callable[[Tensor, RoundT, Pair], None]

#: A message begins at a multiple of so many bytes, so that elements of any dtype are aligned.
_ALIGNMENT = 16


class RoundTransport(Generic[RoundT]):
    """Sends and receives one rank's messages of a move, round after round.

    Args:
        rounds: equally many on all ranks.
        sizes_of: this rank's messages in a round: their bytes by pair, in the order in which they are unpacked. What a
            rank sends to itself takes no bytes: it does not travel, and is unpacked in its turn.
        process_group: whose ranks exchange messages.
        at_once: how many rounds are under way at the same time.
        alignment: every message begins at a multiple of so many bytes; 1 where they are plain bytes.

    Attributes:
        num_rounds: in which messages are sent.
        buffer_bytes: memory that this rank's messages take.
        sent_bytes, received_bytes: by this rank so far.
    """

    def __init__(
        self,
        rounds: Sequence[RoundT],
        sizes_of: Callable[[RoundT], Mapping[Pair, int]],
        process_group: ProcessGroup,
        at_once: int = 2,
        alignment: int = _ALIGNMENT,
    ) -> None:
        self._rounds, self._sizes_of, self._group, self._alignment = rounds, sizes_of, process_group, alignment
        self._rank = group_rank(process_group)
        self.num_rounds = len(rounds)
        self._num_buffers = min(at_once, self.num_rounds)
        self._buffer_size = max((self._extent(sizes_of(round_)) for round_ in rounds), default=0)
        self.buffer_bytes = self._num_buffers * self._buffer_size
        self.sent_bytes = self.received_bytes = 0
        self._buffers: list[Tensor] = []

    def allocate(self, device: torch.device) -> None:
        """Make the memory of messages."""
        self._buffers = [
            torch.empty(self._buffer_size, dtype=torch.uint8, device=device) for _ in range(self._num_buffers)
        ]

    def free(self) -> None:
        """Let go of the memory of messages."""
        self._buffers = []

    def carry_out(
        self,
        pack: Packer[RoundT],
        unpack: Packer[RoundT],
        *,
        meanwhile: Callable[[], None] = lambda: None,
        over: Channel | None = None,
    ) -> list[Exception]:
        """Send and receive the messages of all rounds, and return what failed.

        After a failure the other rounds are carried out all the same: ranks that live wait for each other's messages.
        The memory of messages stays until :meth:`free`, or until this object goes.

        Args:
            meanwhile: called once, when the first messages are on their way.
            over: another transport between the group's ranks.
        """
        errors: list[Exception] = []
        under_way: list[tuple[RoundT, Mapping[Pair, Tensor], dict[int, list[Waitable]]]] = []
        for number, round_ in enumerate(self._rounds):
            messages = self._messages(round_, self._buffers[number % len(self._buffers)])
            sends = {pair[1]: message for pair, message in messages.items() if self._sends(pair)}
            receives = {pair[0]: message for pair, message in messages.items() if pair[0] != self._rank}
            for peer, message in sends.items():
                try:
                    pack(message, round_, (self._rank, peer))
                except Exception as error:  # what is sent is of no use; that it comes spares its receiver the waiting
                    errors.append(error)
            try:
                under_way.append((round_, messages, start_messages(sends, receives, self._group, over)))
                if number == 0:
                    meanwhile()
                if len(under_way) == len(self._buffers):
                    self._finish(*under_way.pop(0), unpack, errors)
            except Exception as error:  # the others must hear of any
                errors.append(error)
        for unfinished in under_way:
            try:
                self._finish(*unfinished, unpack, errors)
            except Exception as error:
                errors.append(error)
        if not self._rounds:
            meanwhile()
        return errors

    def _messages(self, round_: RoundT, buffer: Tensor) -> dict[Pair, Tensor]:
        """Where this rank's messages of a round lie."""
        messages, begin = {}, 0
        for pair, size in self._sizes_of(round_).items():
            messages[pair] = buffer[begin : begin + size]
            begin += self._aligned(size)
        return messages

    def _finish(
        self,
        round_: RoundT,
        messages: Mapping[Pair, Tensor],
        transfers: Mapping[int, Sequence[Waitable]],
        unpack: Packer[RoundT],
        errors: list[Exception],
    ) -> None:
        failed = wait_for_all(transfers)
        errors += failed.values()
        for pair, message in messages.items() if not failed else ():
            if self._sends(pair):
                self.sent_bytes += message.numel()
            else:
                self.received_bytes += message.numel()
                unpack(message, round_, pair)

    def _sends(self, pair: Pair) -> bool:
        return pair[0] == self._rank != pair[1]

    def _extent(self, sizes: Mapping[Pair, int]) -> int:
        """Bytes from the first message's begin to the last one's end."""
        extent = begin = 0
        for size in sizes.values():
            extent, begin = begin + size, begin + self._aligned(size)
        return extent

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment
