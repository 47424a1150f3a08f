"""What travels in a switch, on one rank: packed, sent, received, and put in place or added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.plan.layout import Indices
from zeroresize.resharding.message_rounds import MessageRounds
from zeroresize.resharding.messages import Pair
from zeroresize.strategy.switching.switch_messages import Parcel, Round


@dataclass(frozen=True)
class Ends:
    """Where a flow begins and ends on this rank: stacks [pre, blocks, units, inner] by the tensor's number.

    Attributes:
        sources: what is sent; None stands for zeros.
        targets: what is filled.
        source_begins, target_begins: [P], the first unit that this rank holds of each tensor.
        adds: whether what comes is added to what is there.
    """

    sources: Mapping[int, Tensor | None]
    targets: Mapping[int, Tensor]
    source_begins: Indices
    target_begins: Indices
    adds: bool = False

    def source(self, parcel: Parcel) -> Tensor | None:
        stack = self.sources[parcel.tensor]
        return None if stack is None else _units(stack, parcel, self.source_begins)

    def target(self, parcel: Parcel) -> Tensor:
        return _units(self.targets[parcel.tensor], parcel, self.target_begins)


class Carrier:
    """Sends and receives one rank's rounds.

    Attributes:
        num_rounds: in which they are sent.
        buffer_bytes: memory that the messages take.
        sent_bytes, received_bytes: so far.
    """

    def __init__(self, rounds: Sequence[Round], process_group: ProcessGroup) -> None:
        self._rounds, self._group = rounds, process_group
        self._buffer_size = max((one.num_bytes for one in rounds), default=0)
        self._num_buffers = min(2, len(rounds))  # while one round travels, the next is packed
        self.num_rounds = len(rounds)
        self.buffer_bytes = self._num_buffers * self._buffer_size
        self.sent_bytes = self.received_bytes = 0

    def allocate(self, where: torch.device) -> None:
        """Make the memory of messages."""
        self._buffers = [
            torch.empty(self._buffer_size, dtype=torch.uint8, device=where) for _ in range(self._num_buffers)
        ]

    def carry_out(self, ends: Sequence[Ends]) -> Exception | None:
        """Send and receive all rounds; returns the first failure.

        Args:
            ends: of each flow.
        """
        self._ends = ends
        messages = MessageRounds[Round](self._group, self._pack, self._unpack)
        errors = messages.carry_out(self._rounds, self._buffers, _messages_of)
        self.sent_bytes, self.received_bytes = messages.sent_bytes, messages.received_bytes
        del self._buffers, self._ends
        return errors[0] if errors else None

    def _pack(self, message: Tensor, round_: Round, pair: Pair) -> None:
        begin = 0
        for parcel in round_.parcels[pair]:
            part, begin = message[begin : begin + parcel.num_bytes], begin + parcel.num_bytes
            source = self._ends[parcel.flow].source(parcel)
            if source is None:
                part.zero_()
            else:
                part.view(source.dtype).view(source.shape).copy_(source, non_blocking=message.is_cuda)

    def _unpack(self, message: Tensor, round_: Round, pair: Pair) -> None:
        begin = 0
        for parcel in round_.parcels[pair]:
            ends = self._ends[parcel.flow]
            target = ends.target(parcel)
            if pair[0] == pair[1]:
                source = ends.source(parcel)
            else:
                part, begin = message[begin : begin + parcel.num_bytes], begin + parcel.num_bytes
                source = part.view(target.dtype).view(target.shape)
            if source is None:
                continue
            if ends.adds:
                target.add_(source.to(target.device))
            else:
                target.copy_(source)


def _messages_of(round_: Round, buffer: Tensor) -> dict[Pair, Tensor]:
    return {pair: buffer[begin:end] for pair, (begin, end) in round_.places.items()}


def _units(stack: Tensor, parcel: Parcel, begins: Indices) -> Tensor:
    return stack.narrow(2, parcel.begin - int(begins[parcel.tensor]), parcel.end - parcel.begin)
