"""Streams of bytes between ranks, cut into rounds of bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from zeroresize.resharding.transport import Pair

#: From which byte of its stream up to which one each pair sends in a round.
ByteRound = Mapping[Pair, tuple[int, int]]


def byte_rounds(stream_bytes: Mapping[Pair, int], max_bytes: int) -> list[ByteRound]:
    """Cut streams into rounds, in each of which no rank sends and receives more than ``max_bytes`` together.

    Every stream is sent in order.

    Args:
        stream_bytes: of each pair's stream.
        max_bytes: at least 1.
    """
    sent = dict.fromkeys(stream_bytes, 0)
    rounds: list[ByteRound] = []
    while any(sent[pair] < size for pair, size in stream_bytes.items()):
        room: dict[int, int] = {}
        pieces = {}
        for pair, size in stream_bytes.items():
            piece = min(size - sent[pair], *(room.get(rank, max_bytes) for rank in pair))
            if piece > 0:
                pieces[pair] = sent[pair], sent[pair] + piece
                sent[pair] += piece
                for rank in pair:
                    room[rank] = room.get(rank, max_bytes) - piece
        rounds.append(pieces)
    return rounds


def pieces_of(sizes: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the items between two bytes of a stream, each as (its number, from which of its bytes, to which).

    Args:
        sizes: the bytes of each item, in the order of the stream.
        begin, end: of the piece, in bytes of the stream.
    """
    ends = list(accumulate(sizes))
    number = bisect_right(ends, begin)
    while begin < end:
        first = ends[number] - sizes[number]
        last = min(end, ends[number])
        if last > begin:
            yield number, begin - first, last - first
        begin, number = last, number + 1
