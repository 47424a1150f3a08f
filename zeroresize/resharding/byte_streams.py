"""Tensors that travel between pairs of ranks, as one stream of bytes for each pair, in rounds of bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import Channel, group_rank
from zeroresize.resharding.byte_rounds import ByteRound, byte_rounds, pieces_of
from zeroresize.resharding.transport import Pair, RoundTransport

#: [bytes] of each of a rank's streams, one after another: to be read where the rank sends, else filled.
StreamTensors = Mapping[Pair, Sequence[Tensor]]


class ByteStreams(RoundTransport[ByteRound]):
    """Carries streams of bytes between pairs of ranks; every rank knows all pairs and sizes.

    Args:
        stream_bytes: of each pair's stream, alike on all ranks.
        max_bytes: of this rank's messages at once; at least 2.
    """

    def __init__(self, stream_bytes: Mapping[Pair, int], process_group: ProcessGroup, max_bytes: int) -> None:
        rank = group_rank(process_group)

        def sizes_of(round_: ByteRound) -> dict[Pair, int]:
            return {pair: end - begin for pair, (begin, end) in round_.items() if rank in pair}

        super().__init__(byte_rounds(stream_bytes, max_bytes // 2), sizes_of, process_group, alignment=1)

    def carry_out_streams(self, tensors: StreamTensors, over: Channel | None = None) -> list[Exception]:
        """Send and receive all streams, as :meth:`RoundTransport.carry_out` does.

        Args:
            tensors: [bytes] of this rank's streams.
        """
        pack, unpack = (partial(_copy, tensors, to_message=to_message) for to_message in (True, False))
        return self.carry_out(pack, unpack, over=over)


def _copy(tensors: StreamTensors, message: Tensor, round_: ByteRound, pair: Pair, *, to_message: bool) -> None:
    """Copy between a message [bytes] and the tensors of its stream."""
    stream, done = tensors[pair], 0
    for number, begin, end in pieces_of([tensor.numel() for tensor in stream], *round_[pair]):
        part, of_message = stream[number][begin:end], message[done : done + end - begin]
        done += end - begin
        target, source = (of_message, part) if to_message else (part, of_message)
        target.copy_(source)
