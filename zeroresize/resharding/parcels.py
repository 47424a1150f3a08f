"""What travels in a move, as parcels of units, and in which rounds of bounded memory.

A **stack** is a part of a tensor, seen as [pre, units, inner]: a unit is whatever a kind of move does not divide, such
as a neuron's rows, a head, or a byte. A parcel has some units of one stack; all parcels are known to all ranks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: (sender, receiver), within the group.
Pair = tuple[int, int]
#: Runs of neighbouring units are copied one by one, up to so many; more are gathered by index.
_MOST_RUNS = 16


@dataclass(frozen=True)
class Parcel:
    """Describes units that travel; they are cut between units only, alike on all of their routes.

    Attributes:
        routes: who sends them to whom. On a route from a rank to itself nothing travels, but they are put in place in
            their turn.
        num_units: how many.
        unit_elements: elements of one unit.
        dtype: of the elements as they travel.
        turn: parcels of a later turn are read once those of earlier ones are in place.
    """

    routes: tuple[Pair, ...]
    num_units: int
    unit_elements: int
    dtype: torch.dtype
    turn: int = 0

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of one unit."""
        return self.unit_elements * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Return the bytes that travel on one route."""
        return self.num_units * self.unit_bytes


class Piece(NamedTuple):
    """Names the units of a parcel that travel in one round, from ``begin`` up to ``end``."""

    parcel: int
    begin: int
    end: int


@dataclass(frozen=True)
class End:
    """Tells where the units of a parcel lie on this rank, where they come from or where they go.

    Attributes:
        stack: that holds them; None stands for zeros.
        places: of the units in the stack, ascending; a number is that of the first one of neighbours.
        adds: whether what comes is added to what is there.
    """

    stack: Tensor | None
    places: NDArray[np.int64] | int = 0
    adds: bool = False

    def places_of(self, piece: Piece) -> NDArray[np.int64] | int:
        """Return the places of a piece's units."""
        places = self.places
        return places + piece.begin if isinstance(places, int) else places[piece.begin : piece.end]


def plan_rounds(parcels: Sequence[Parcel], max_bytes: int) -> Iterator[list[Piece]]:
    """Yield what travels in each round, in which no rank sends and receives more than ``max_bytes`` together.

    A unit that is larger than that travels alone. Parcels of equal routes travel one after another, larger elements
    first in a round, so that all lie aligned.
    """
    for turn in sorted({parcel.turn for parcel in parcels}):
        queues: dict[tuple[Pair, ...], deque[int]] = {}
        for number, parcel in enumerate(parcels):
            if parcel.turn == turn and parcel.num_bytes:
                queues.setdefault(parcel.routes, deque()).append(number)
        loads_of = {
            routes: Counter(rank for pair in routes if pair[0] != pair[1] for rank in pair) for routes in queues
        }
        begins: Counter[int] = Counter()
        while any(queues.values()):
            used: Counter[int] = Counter()
            pieces: list[Piece] = []
            for routes, queue in queues.items():
                loads = loads_of[routes]
                while queue:
                    number = queue[0]
                    parcel, begin = parcels[number], begins[number]
                    rooms = [(max_bytes - used[rank]) // (times * parcel.unit_bytes) for rank, times in loads.items()]
                    fits = min(rooms, default=parcel.num_units)
                    if fits < 1 and not any(used[rank] for rank in loads):
                        fits = 1
                    end = begin + min(fits, parcel.num_units - begin)
                    if end <= begin:
                        break
                    pieces.append(Piece(number, begin, end))
                    used.update({rank: times * (end - begin) * parcel.unit_bytes for rank, times in loads.items()})
                    begins[number] = end
                    if end == parcel.num_units:
                        queue.popleft()
            yield sorted(pieces, key=lambda piece: (-parcels[piece.parcel].dtype.itemsize, piece))


def sent_and_received(parcels: Sequence[Parcel], num_ranks: int) -> tuple[list[int], list[int]]:
    """Return the bytes [R] that each rank sends, and those that it receives."""
    sent, received = [0] * num_ranks, [0] * num_ranks
    for parcel in parcels:
        for source, destination in parcel.routes:
            if source != destination:
                sent[source] += parcel.num_bytes
                received[destination] += parcel.num_bytes
    return sent, received


def copy_units(
    target: Tensor,
    at: NDArray[np.int64] | int,
    source: Tensor,
    of: NDArray[np.int64] | int,
    num_units: int,
    *,
    adds: bool = False,
) -> None:
    """Copy units ``of`` a source stack to the places ``at`` of a target stack, or add them to what is there."""
    if isinstance(at, int) and isinstance(of, int):
        runs = [(at, of, num_units)] if num_units else []
    else:
        at, of = (places + np.arange(num_units) if isinstance(places, int) else places for places in (at, of))
        begins = np.flatnonzero((np.diff(of, prepend=-2) != 1) | (np.diff(at, prepend=-2) != 1))
        if len(begins) > _MOST_RUNS and not adds:
            gathered = source.index_select(1, torch.from_numpy(of).to(source.device)).to(target.device)
            target.index_copy_(1, torch.from_numpy(at).to(target.device), gathered)
            return
        sizes = np.diff(begins, append=num_units)
        runs = list(zip(at[begins].tolist(), of[begins].tolist(), sizes.tolist(), strict=True))
    for there, here, size in runs:
        part, units = target.narrow(1, there, size), source.narrow(1, here, size)
        if adds:
            part.add_(units.to(part.device))
        else:
            part.copy_(units, non_blocking=target.is_cuda)


@dataclass(frozen=True, eq=False)
class RankRounds:
    """Holds a rank's messages of all rounds of a move.

    Attributes:
        max_bytes: of its messages at once; a single unit may be larger.
        rounds: its pieces in each, by (sender, receiver), in the order in which they are put in place.
        turns: the turn of each round.
    """

    parcels: Sequence[Parcel]
    rank: int
    max_bytes: int
    rounds: Sequence[Mapping[Pair, Sequence[Piece]]]
    turns: Sequence[int]

    @classmethod
    def of(cls, parcels: Sequence[Parcel], rank: int, max_bytes: int, order: Sequence[int] | None = None) -> RankRounds:
        """Plan the rounds; what comes from ranks of a smaller ``order`` [R] is put in place first."""

        def turn(pair: Pair) -> tuple[int, Pair]:
            return (0 if order is None else order[pair[0]]), pair

        rounds, turns = [], []
        for pieces in plan_rounds(parcels, max(max_bytes // 2, 1)):
            by_pair: dict[Pair, list[Piece]] = {}
            for piece in pieces:
                for pair in parcels[piece.parcel].routes:
                    if rank in pair:
                        by_pair.setdefault(pair, []).append(piece)
            rounds.append({pair: by_pair[pair] for pair in sorted(by_pair, key=turn)})
            turns.append(parcels[pieces[0].parcel].turn)
        return cls(parcels, rank, max_bytes, rounds, turns)

    def sizes(self, pieces: Sequence[Piece]) -> list[int]:
        """Return the bytes of each piece of a message."""
        return [(piece.end - piece.begin) * self.parcels[piece.parcel].unit_bytes for piece in pieces]

    def message_bytes(self, round_: Mapping[Pair, Sequence[Piece]]) -> dict[Pair, int]:
        """Return the bytes of this rank's messages in a round; those of what stays here are none."""
        return {pair: 0 if pair[0] == pair[1] else sum(self.sizes(pieces)) for pair, pieces in round_.items()}
