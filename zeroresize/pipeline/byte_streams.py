"""Tensors that travel between pairs of ranks, as one stream of bytes for each pair, in rounds of bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel
from zeroresize.pipeline.byte_rounds import Pair, Round, pieces_of, rounds_of
from zeroresize.resharding.message_rounds import MessageRounds


class ByteStreams:
    """This rank's part of some streams.

    Args:
        stream_bytes: of all pairs, alike on all ranks.
        rank: this one.
        max_bytes: of this rank's messages at once; at least 2.

    Attributes:
        rounds: in which messages are sent.
        buffer_bytes: memory that this rank's messages take.
        sent_bytes, received_bytes: by this rank so far.
    """

    def __init__(self, stream_bytes: Mapping[Pair, int], rank: int, max_bytes: int) -> None:
        self._rank = rank
        # Two rounds at once: while one travels, the next is packed.
        self.rounds = rounds_of(stream_bytes, max_bytes // 2)
        self._buffer_size = max((sum(self._sizes(one).values()) for one in self.rounds), default=0)
        self._num_buffers = min(2, len(self.rounds))
        self.buffer_bytes = self._num_buffers * self._buffer_size
        self.sent_bytes = self.received_bytes = 0

    def allocate(self, where: torch.device) -> None:
        """Make the memory of messages."""
        self._buffers = [
            torch.empty(self._buffer_size, dtype=torch.uint8, device=where) for _ in range(self._num_buffers)
        ]

    def carry_out(
        self, tensors: Mapping[Pair, Sequence[Tensor]], process_group: ProcessGroup, over: Channel | None = None
    ) -> list[Exception]:
        """Send and receive all of them; returns what failed.

        After a failure the other rounds are carried out all the same: ranks that live wait for each other's messages.

        Args:
            tensors: [bytes] of each of this rank's streams, one after another: to be read, or filled.
            over: another transport between the group's ranks.
        """
        self._tensors = tensors
        rounds = MessageRounds(process_group, self._copy, self._copy, over)
        errors = rounds.carry_out(self.rounds, self._buffers, self._messages_of)
        self.sent_bytes, self.received_bytes = rounds.sent_bytes, rounds.received_bytes
        return errors

    def _copy(self, message: Tensor, round_: Round, pair: Pair) -> None:
        """Between a message [bytes] and the tensors: into it where this rank sends it, else out of it."""
        tensors, done = self._tensors[pair], 0
        for number, begin, end in pieces_of([one.numel() for one in tensors], *round_[pair]):
            part, of_message = tensors[number][begin:end], message[done : done + end - begin]
            done += end - begin
            target, source = (of_message, part) if pair[0] == self._rank else (part, of_message)
            target.copy_(source)

    def _messages_of(self, round_: Round, buffer: Tensor) -> dict[Pair, Tensor]:
        """Where this rank's messages of a round lie."""
        messages, begin = {}, 0
        for pair, size in self._sizes(round_).items():
            messages[pair] = buffer[begin : begin + size]
            begin += size
        return messages

    def _sizes(self, round_: Round) -> dict[Pair, int]:
        """Bytes of this rank's messages in a round."""
        return {pair: end - begin for pair, (begin, end) in round_.items() if self._rank in pair}
