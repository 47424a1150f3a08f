"""Which strategies train which sequences, in which micro-batch of which replica, from their lengths alone; pure.

Every rank computes the same from the same lengths, so nothing needs to be sent.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zeroresize.plan.length_range import LengthRange, range_of
from zeroresize.plan.strategy import Strategy

#: Numbers of the sequences of one micro-batch, longest first.
MicroBatch = tuple[int, ...]
#: What a replica needs for a micro-batch of sequences of these lengths, in any unit, such as seconds.
Work = Callable[[Sequence[int]], float]


def num_tokens(lengths: Sequence[int]) -> float:
    """Return the number of tokens: the :data:`Work` of layers whose every token costs the same."""
    return float(sum(lengths))


def spread_and_pack(
    lengths: Sequence[int], max_tokens: int, num_replicas: int, work: Work = num_tokens
) -> list[list[MicroBatch]]:
    """Return the micro-batches of each replica; a replica may have more than another, or none.

    Sequences go to replicas first, the one with most work to the replica that has least so far (longest processing
    time first), and are packed there: replicas finish together, and few sequences still keep all replicas busy. No two
    replicas differ by more than the work of one sequence.

    Args:
        lengths: of the sequences, in tokens.
        max_tokens: that a micro-batch may have.
        work: of a sequence alone, called with its length as the only one.

    Raises:
        ValueError: as :func:`pack` does.
    """
    _require_fitting(lengths, max_tokens)
    work_of = {length: work((length,)) for length in set(lengths)}
    loads = [(0.0, 0, replica) for replica in range(num_replicas)]
    members: list[list[int]] = [[] for _ in range(num_replicas)]
    for number in sorted(range(len(lengths)), key=lambda one: (-work_of[lengths[one]], one)):
        load, _, replica = loads[0]
        members[replica].append(number)
        heapq.heapreplace(loads, (load + work_of[lengths[number]], len(members[replica]), replica))
    replicas = []
    for numbers in members:
        packed = pack([lengths[number] for number in numbers], max_tokens)
        replicas.append([tuple(numbers[number] for number in one) for one in packed])
    return replicas


def pack(lengths: Sequence[int], max_tokens: int) -> list[MicroBatch]:
    """Pack sequences into micro-batches of at most ``max_tokens`` tokens, by best-fit decreasing.

    The longest sequence that is left goes into the fullest micro-batch that has room for it, else into a new one. That
    takes about 11/9 of the least possible number at most (Johnson et al., 1974).

    Raises:
        ValueError: for sequences that are longer than ``max_tokens``, naming them.
    """
    _require_fitting(lengths, max_tokens)
    micro_batches: list[list[int]] = []
    fullest_with: defaultdict[int, list[int]] = defaultdict(list)  # room that is left -> micro-batches
    rooms: list[int] = []  # ascending, each once
    for number in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
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
    return [tuple(one) for one in micro_batches]


def _require_fitting(lengths: Sequence[int], max_tokens: int) -> None:
    longer = [number for number, length in enumerate(lengths) if length > max_tokens]
    if longer:
        raise ValueError(
            f"sequences {longer} of {[lengths[number] for number in longer]} tokens are longer than "
            f"max_tokens={max_tokens}, which a micro-batch may have"
        )


@dataclass(frozen=True)
class Visit:
    """Describe what one strategy trains in a step: the sequences of all ranges that it has.

    Attributes:
        up_to: of its ranges.
        replicas: [dp] the micro-batches of each, of the numbers of the sequences in the mini-batch.
    """

    strategy: Strategy
    up_to: tuple[int, ...]
    replicas: tuple[tuple[MicroBatch, ...], ...]

    @property
    def members(self) -> list[int]:
        """Return the numbers of all sequences of the visit."""
        return [number for own in self.replicas for micro_batch in own for number in micro_batch]


def plan_visits(lengths: Sequence[int], ranges: Sequence[LengthRange], work: Work = num_tokens) -> list[Visit]:
    """Return one visit of each strategy that has sequences, in the order of the ranges; the others have nothing to do.

    Ranges of one strategy are one visit, with the largest of their limits.

    Args:
        lengths: of the mini-batch's sequences, in tokens.
        ranges: all of them with ``max_tokens``.
        work: by which replicas share the sequences.

    Raises:
        ValueError: for a sequence that is longer than the last range, naming it.
    """
    members: dict[Strategy, list[int]] = {one.strategy: [] for one in ranges}
    for number, length in enumerate(lengths):
        try:
            members[ranges[range_of(ranges, length)].strategy].append(number)
        except ValueError as error:
            raise ValueError(f"sequence {number}: {error}") from error
    return [_visit(strategy, own, lengths, ranges, work) for strategy, own in members.items() if own]


def _visit(
    strategy: Strategy, members: Sequence[int], lengths: Sequence[int], ranges: Sequence[LengthRange], work: Work
) -> Visit:
    of_strategy = [one for one in ranges if one.strategy == strategy]
    max_tokens = max(one.max_tokens or one.up_to for one in of_strategy)
    replicas = spread_and_pack([lengths[number] for number in members], max_tokens, strategy.dp, work)
    return Visit(
        strategy,
        tuple(one.up_to for one in of_strategy),
        tuple(tuple(tuple(members[place] for place in packed) for packed in own) for own in replicas),
    )
