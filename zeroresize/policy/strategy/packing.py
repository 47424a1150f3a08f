"""Which strategies train which sequences, in which micro-batch of which replica, from their lengths alone; pure.

Every rank computes the same from the same lengths, so nothing needs to be sent.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeroresize.plan.strategy import LengthRange, Strategy, range_of

Floats = NDArray[np.float64]
#: Numbers of the sequences of one micro-batch, longest first.
MicroBatch = tuple[int, ...]


@dataclass(frozen=True)
class Visit:
    """Describe what one strategy trains in a step: the sequences of all ranges that it has."""

    strategy: Strategy
    up_to: tuple[int, ...]  # of its ranges
    replicas: tuple[tuple[MicroBatch, ...], ...]  # [dp] the micro-batches of each, of numbers in the mini-batch

    @property
    def members(self) -> list[int]:
        """Return the numbers of all sequences of the visit."""
        return [number for replica in self.replicas for micro_batch in replica for number in micro_batch]


def plan_visits(lengths: Sequence[int], ranges: Sequence[LengthRange]) -> list[Visit]:
    """Return one visit of each strategy that has sequences, in the order of the ranges; the others have nothing to do.

    Ranges of one strategy are one visit, with the largest of their limits.
    """
    members: dict[Strategy, list[int]] = {length_range.strategy: [] for length_range in ranges}
    for number, length in enumerate(lengths):
        try:
            members[ranges[range_of(ranges, length)].strategy].append(number)
        except ValueError as error:
            raise ValueError(f"sequence {number}: {error}") from error
    visits = []
    for strategy, numbers in members.items():
        if numbers:
            of_strategy = [length_range for length_range in ranges if length_range.strategy == strategy]
            max_tokens = max(each.max_tokens or each.up_to for each in of_strategy)
            replicas = spread_and_pack([lengths[number] for number in numbers], max_tokens, strategy.dp)
            named = tuple(tuple(tuple(numbers[at] for at in packed) for packed in replica) for replica in replicas)
            visits.append(Visit(strategy, tuple(each.up_to for each in of_strategy), named))
    return visits


def packed_sums(lengths: Sequence[int], max_tokens: int, num_replicas: int) -> list[Floats]:
    """Return for each replica [M, 2]: tokens and Σ length² of its micro-batches, as :func:`spread_and_pack` packs."""
    sums = []
    for replica in spread_and_pack(lengths, max_tokens, num_replicas):
        of_batches = [[lengths[number] for number in numbers] for numbers in replica]
        rows = [(sum(batch), sum(length * length for length in batch)) for batch in of_batches]
        sums.append(np.array(rows, dtype=np.float64).reshape(-1, 2))
    return sums


def spread_and_pack(lengths: Sequence[int], max_tokens: int, num_replicas: int) -> list[list[MicroBatch]]:
    """Return the micro-batches of each replica; a replica may have more than another, or none.

    Sequences go to replicas first, the longest one to the replica that has fewest tokens so far (longest processing
    time first), and are packed there: replicas finish together, and few sequences still keep all replicas busy. No two
    replicas differ by more than one sequence.
    """
    _require_fitting(lengths, max_tokens)
    loads = [(0, 0, replica) for replica in range(num_replicas)]
    members: list[list[int]] = [[] for _ in range(num_replicas)]
    for number in _longest_first(lengths):
        load, _, replica = loads[0]
        members[replica].append(number)
        heapq.heapreplace(loads, (load + lengths[number], len(members[replica]), replica))
    return [
        [tuple(numbers[at] for at in packed) for packed in pack([lengths[number] for number in numbers], max_tokens)]
        for numbers in members
    ]


def pack(lengths: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most ``max_tokens`` tokens, by best-fit decreasing.

    The longest sequence that is left goes into the fullest micro-batch that has room for it, else into a new one. That
    takes about 11/9 of the least possible number at most (Johnson et al., 1974).
    """
    _require_fitting(lengths, max_tokens)
    micro_batches: list[list[int]] = []
    fullest_with: defaultdict[int, list[int]] = defaultdict(list)  # room that is left -> micro-batches
    rooms: list[int] = []  # ascending, each once
    for number in _longest_first(lengths):
        place = bisect.bisect_left(rooms, lengths[number])
        if place == len(rooms):
            room, micro_batch = max_tokens, len(micro_batches)
            micro_batches.append([])
        else:
            room = rooms[place]
            micro_batch = fullest_with[room].pop()
            if not fullest_with[room]:
                del rooms[place]
        micro_batches[micro_batch].append(number)
        room -= lengths[number]
        if not fullest_with[room]:
            bisect.insort(rooms, room)
        fullest_with[room].append(micro_batch)
    return [tuple(numbers) for numbers in micro_batches]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))


def _require_fitting(lengths: Sequence[int], max_tokens: int) -> None:
    longer = [number for number, length in enumerate(lengths) if length > max_tokens]
    if longer:
        raise ValueError(
            f"sequences {longer} of {[lengths[number] for number in longer]} tokens are longer than "
            f"max_tokens={max_tokens}, which a micro-batch may have"
        )
