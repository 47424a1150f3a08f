"""Ranks of a group send each other parcels, round after round in bounded memory.

While one round travels, the next one of its turn is packed. A pair of ranks has one message in a round. All messages of
a round are posted before any is awaited, so no order of the pairs can let ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, Waitable, start_messages
from zeroresize.resharding.agreement import wait_for_all
from zeroresize.resharding.parcels import End, Pair, Piece, RankRounds, copy_units

#: Tells where a parcel, by its number, lies on this rank.
EndOf = Callable[[int], End]


class Transport:
    """Sends and receives one rank's parcels of a move, whose rounds all ranks have planned from the same parcels.

    Attributes:
        buffer_bytes: memory that this rank's messages take.
        sent_bytes, received_bytes: by this rank so far.
    """

    def __init__(self, rounds: RankRounds, process_group: ProcessGroup) -> None:
        self._plan, self._rounds, self._parcels = rounds, rounds.rounds, rounds.parcels
        self._group, self._rank = process_group, rounds.rank
        self.num_rounds = len(self._rounds)
        #: Messages begin at multiples of so many bytes.
        self._alignment = max((parcel.dtype.itemsize for parcel in self._parcels), default=1)
        sizes = [self._plan.message_bytes(round_).values() for round_ in self._rounds]
        self._buffer_size = max((sum(map(self._aligned, of_round)) for of_round in sizes), default=0)
        largest = max(map(sum, sizes), default=0)
        self._num_buffers = min(2 if 2 * largest <= rounds.max_bytes else 1, self.num_rounds)
        self.buffer_bytes = self._num_buffers * self._buffer_size
        self.sent_bytes = self.received_bytes = 0
        self._buffers: list[Tensor] = []

    def allocate(self, device: torch.device) -> None:
        """Make the memory of messages."""
        self._buffers = [
            torch.empty(self._buffer_size, dtype=torch.uint8, device=device) for _ in range(self._num_buffers)
        ]

    def carry_out(
        self,
        source_of: EndOf,
        target_of: EndOf,
        *,
        meanwhile: Callable[[], None] = lambda: None,
        over: Channel | None = None,
    ) -> Exception | None:
        """Send and receive the parcels of all rounds, let go of the memory of messages, and return the first failure.

        After a failure the other rounds are carried out all the same: ranks that live wait for each other's messages.
        With a rank with which a message has failed no others are exchanged.

        Args:
            source_of, target_of: of each parcel that this rank sends, or receives; asked when it is packed or unpacked.
            meanwhile: called once, when the first messages are on their way.
            over: another transport between the group's ranks.
        """
        errors: list[Exception] = []
        lost: set[int] = set()
        under_way: list[tuple[Mapping[Pair, Sequence[Piece]], dict[Pair, Tensor], dict[int, list[Waitable]]]] = []

        def finish() -> None:
            round_, messages, transfers = under_way.pop(0)
            try:
                self._finish(round_, messages, transfers, (source_of, target_of), lost, errors)
            except Exception as error:  # the others must hear of any
                errors.append(error)

        for number, round_ in enumerate(self._rounds):
            while under_way and self._plan.turns[number] != self._plan.turns[number - 1]:
                finish()
            messages = self._messages(round_, self._buffers[number % self._num_buffers])
            sends, receives = {}, {}
            for pair, message in messages.items():
                peer = pair[pair[0] == self._rank]
                if pair[0] == pair[1] or peer in lost:
                    continue
                if pair[1] == self._rank:
                    receives[peer] = message
                    continue
                sends[peer] = message
                try:
                    self._pack(message, round_[pair], source_of)
                except Exception as error:  # what is sent is of no use; that it comes spares its receiver the waiting
                    errors.append(error)
            try:
                under_way.append((round_, messages, start_messages(sends, receives, self._group, over)))
                if number == 0:
                    meanwhile()
            except Exception as error:
                errors.append(error)
            if len(under_way) == self._num_buffers:
                finish()
        while under_way:
            finish()
        if not self._rounds:
            meanwhile()
        self._buffers = []
        return errors[0] if errors else None

    def _finish(
        self,
        round_: Mapping[Pair, Sequence[Piece]],
        messages: Mapping[Pair, Tensor],
        transfers: Mapping[int, Sequence[Waitable]],
        ends: tuple[EndOf, EndOf],
        lost: set[int],
        errors: list[Exception],
    ) -> None:
        failed = wait_for_all(transfers)
        lost |= failed.keys()
        errors += failed.values()
        for pair, message in messages.items() if not failed else ():
            if pair[0] == self._rank != pair[1]:
                self.sent_bytes += message.numel()
            elif pair[0] == pair[1]:
                for piece in round_[pair]:
                    self._keep(piece, *(end_of(piece.parcel) for end_of in ends))
            elif pair[0] in transfers:
                self.received_bytes += message.numel()
                self._unpack(message, round_[pair], ends[1])

    def _pack(self, message: Tensor, pieces: Sequence[Piece], source_of: EndOf) -> None:
        for piece, part in self._parts(message, pieces):
            source = source_of(piece.parcel)
            if source.stack is None:
                part.zero_()
            else:
                units = self._stack(part, piece, source.stack)
                copy_units(units, 0, source.stack, source.places_of(piece), piece.end - piece.begin)

    def _unpack(self, message: Tensor, pieces: Sequence[Piece], target_of: EndOf) -> None:
        for piece, part in self._parts(message, pieces):
            target = target_of(piece.parcel)
            assert target.stack is not None
            units = self._stack(part, piece, target.stack)
            copy_units(target.stack, target.places_of(piece), units, 0, piece.end - piece.begin, adds=target.adds)

    def _keep(self, piece: Piece, source: End, target: End) -> None:
        """Put in place what does not travel, as if it had."""
        if source.stack is None:
            return
        assert target.stack is not None
        of, at = source.places_of(piece), target.places_of(piece)
        assert isinstance(of, int) and isinstance(at, int)
        num_units = piece.end - piece.begin
        units = source.stack.narrow(1, of, num_units).to(self._parcels[piece.parcel].dtype)
        copy_units(target.stack, at, units, 0, num_units, adds=target.adds)

    def _parts(self, message: Tensor, pieces: Sequence[Piece]) -> list[tuple[Piece, Tensor]]:
        """Where the pieces lie in a message [bytes]."""
        return list(zip(pieces, message.split(self._plan.sizes(pieces)), strict=True))

    def _stack(self, part: Tensor, piece: Piece, like: Tensor) -> Tensor:
        """View a part of a message as a stack."""
        dtype = self._parcels[piece.parcel].dtype
        return part.view(dtype).view(like.shape[0], piece.end - piece.begin, like.shape[2])

    def _messages(self, round_: Mapping[Pair, Sequence[Piece]], buffer: Tensor) -> dict[Pair, Tensor]:
        """Where this rank's messages of a round lie."""
        messages, begin = {}, 0
        for pair, size in self._plan.message_bytes(round_).items():
            messages[pair] = buffer[begin : begin + size]
            begin += self._aligned(size)
        return messages

    def _aligned(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment
