"""The messages of a move, round after round: while one round travels, the next is packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, Waitable, group_rank, start_messages
from zeroresize.resharding.agreement import wait_for_all
from zeroresize.resharding.messages import Pair

RoundT = TypeVar("RoundT")


class MessageRounds(Generic[RoundT]):
    """Sends and receives one rank's messages.

    Args:
        process_group: whose ranks exchange messages.
        pack, unpack: fill a message to another rank, and read one from another, of (message [bytes], round, pair).
        over: another transport between the group's ranks.

    Attributes:
        sent_bytes, received_bytes: by this rank so far.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        pack: Callable[[Tensor, RoundT, Pair], None],
        unpack: Callable[[Tensor, RoundT, Pair], None],
        over: Channel | None = None,
    ) -> None:
        self._group, self._rank = process_group, group_rank(process_group)
        self._pack, self._unpack, self._over = pack, unpack, over
        self.sent_bytes = self.received_bytes = 0

    def carry_out(
        self,
        rounds: Sequence[RoundT],
        buffers: Sequence[Tensor],
        messages_of: Callable[[RoundT, Tensor], Mapping[Pair, Tensor]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Exception]:
        """Send and receive the messages of all rounds; returns what failed.

        After a failure the other rounds are carried out all the same: ranks that live wait for each other's messages.

        Args:
            buffers: the memory of messages, in turns: as many rounds as there are buffers travel at once.
            messages_of: where this rank's messages of a round lie in a buffer, by (sender, receiver). They are
                unpacked in this order. That of a rank to itself does not travel, and is unpacked in its turn.
            meanwhile: called once, when the first messages are on their way.
        """
        errors: list[Exception] = []
        under_way: list[tuple[RoundT, Mapping[Pair, Tensor], dict[int, list[Waitable]]]] = []
        for number, round_ in enumerate(rounds):
            messages = messages_of(round_, buffers[number % len(buffers)])
            sends = {pair[1]: message for pair, message in messages.items() if self._sends(pair)}
            receives = {pair[0]: message for pair, message in messages.items() if pair[0] != self._rank}
            try:
                for peer, message in sends.items():
                    self._pack(message, round_, (self._rank, peer))
                under_way.append((round_, messages, start_messages(sends, receives, self._group, self._over)))
                if number == 0:
                    meanwhile()
                if len(under_way) == len(buffers):
                    self._finish(*under_way.pop(0), errors)
            except Exception as error:  # the others must hear of any
                errors.append(error)
        for one in under_way:
            self._finish(*one, errors)
        return errors

    def _finish(
        self,
        round_: RoundT,
        messages: Mapping[Pair, Tensor],
        transfers: Mapping[int, Sequence[Waitable]],
        errors: list[Exception],
    ) -> None:
        failed = wait_for_all(transfers)
        errors += failed.values()
        for pair, message in messages.items() if not failed else ():
            if self._sends(pair):
                self.sent_bytes += message.numel()
            else:
                self.received_bytes += message.numel()
                self._unpack(message, round_, pair)

    def _sends(self, pair: Pair) -> bool:
        return pair[0] == self._rank != pair[1]
