"""Who owns which units of a segment: pure functions of plain numbers.

A **segment** is what lies between two meetings of the ranks: the column-parallel layers that read one replicated x,
what is element-wise or head-wise between, and the row-parallel layer whose y is summed. A **unit** is an index of its
inner axis: a feed-forward neuron, an attention head, a group of heads that share keys and values. Any assignment of
units to ranks gives the same step but for the order of a sum.

``U`` units of a segment, ``R`` ranks.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroresize.utils.value_checks import share_numbers

#: Of shares: much finer than a unit, and alike on machines whose sums differ in the last bit.
SHARE_DECIMALS = 6
#: Of what they own of the products, however many works of segments are added up.
_OWNED_DECIMALS = 9

#: So many ranks that have least to do are tried as takers of a unit.
_MOST_TAKERS = 8

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class SegmentWork:
    """Describe what a decision must know of a segment."""

    num_units: int  # U, of all ranks together
    quantum: int  # units change hands in multiples of so many
    work: float  # of a rank's product FLOPs at even shares, the share that lies in this segment, 0 to 1
    min_units: int = 0  # what every rank keeps at least
    block: int = 1  # so many neighbours share rows that each rank with one of them holds
    shared: float = 0.0  # of the work, the share of such rows, without copies
    apart: float = 0.0  # what a block on several ranks must bring at least, of what an even share takes
    stays: bool = False  # whether its units stay where hosts gave them

    def is_even(self, num_ranks: int) -> bool:
        """Whether equal shares are equal numbers of units."""
        return self.num_units % (num_ranks * self.block) == 0

    def loads(self, counts: Sequence[int]) -> list[float]:
        """Return what ranks with so many units compute, in even shares: with the copies of rows that they share."""
        even = self.num_units / len(counts)
        if self.block == 1:
            return [count / even for count in counts]
        blocks, _ = blocks_held(tuple(counts), self.block)
        return [
            ((1.0 - self.shared) * count + self.shared * self.block * of_rank) / even
            for count, of_rank in zip(counts, blocks, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class OwnershipMap:
    """Hold which rank owns each unit; on a rank units lie in ascending order."""

    owners: Indices  # [U], int64: for every unit the rank that owns it
    num_ranks: int  # R
    block: int = 1  # so many neighbours, which divide the units, share rows

    @classmethod
    def home(cls, num_units: int, num_ranks: int, block: int = 1) -> OwnershipMap:
        """Return the map that hosts make when they shard: the ranks own neighbours, by :func:`home_counts`."""
        return cls(np.repeat(np.arange(num_ranks), home_counts(num_units, num_ranks, block)), num_ranks, block)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OwnershipMap):
            return NotImplemented
        return self.num_ranks == other.num_ranks and np.array_equal(self.owners, other.owners)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return how many units each rank owns."""
        return tuple(np.bincount(self.owners, minlength=self.num_ranks).tolist())

    @cached_property
    def is_home(self) -> bool:
        """Whether every rank owns what hosts give it."""
        return self == self.at_home

    @cached_property
    def at_home(self) -> OwnershipMap:
        """Return the map of the same units at home."""
        return OwnershipMap.home(len(self.owners), self.num_ranks, self.block)

    @cached_property
    def apart(self) -> Indices:
        """Return the blocks that several ranks hold, ascending."""
        owners = self.owners.reshape(-1, self.block)
        return np.flatnonzero((owners != owners[:, :1]).any(axis=1))

    def units_of(self, rank: int) -> Indices:
        """Return the units that ``rank`` owns, in the order in which they lie there."""
        return np.flatnonzero(self.owners == rank)

    def blocks_of(self, rank: int, block: int) -> Indices:
        """Return the blocks of so many neighbours of which ``rank`` owns some unit, ascending."""
        return np.unique(self.units_of(rank) // block)

    def first_blocks_of(self, rank: int, block: int) -> Indices:
        """Return the blocks that ``rank`` holds and no rank before it, ascending."""
        return np.flatnonzero(self.owners.reshape(-1, block).min(axis=1) == rank)

    def with_counts(self, counts: Sequence[int]) -> OwnershipMap:
        """Return the map in which rank r owns ``counts[r]`` units; those of home are home.

        No more units change hands than must: ranks give away what came from others before what hosts gave them, and
        that from its end; they take back their own first. Where units share rows the counts alone say who owns what, so
        that ranks hold few of these: givers keep their first units, and takers get neighbours.
        """
        if len(counts) != self.num_ranks or sum(counts) != len(self.owners) or min(counts) < 0:
            raise ValueError(
                f"counts={list(counts)} do not share {len(self.owners)} units among {self.num_ranks} ranks"
            )
        home = self.at_home
        if tuple(counts) == home.counts:
            return home
        if self.block > 1:
            owners = home.owners.copy()
            given = [unit for rank, count in enumerate(counts) for unit in home.units_of(rank)[count:][::-1]]
            owners[given] = np.repeat(np.arange(self.num_ranks), np.maximum(np.subtract(counts, home.counts), 0))
            return dataclasses.replace(self, owners=owners)
        owners = self.owners.copy()
        given = []
        for rank, count in enumerate(counts):
            units = self.units_of(rank)
            foreign, native = units[home.owners[units] != rank], units[home.owners[units] == rank]
            given += [*foreign[::-1], *native[::-1]][: max(len(units) - count, 0)]
        wanted = [max(count - had, 0) for count, had in zip(counts, self.counts, strict=True)]
        left: list[int] = []
        for unit in sorted(given):
            native_rank = int(home.owners[unit])
            if wanted[native_rank] and owners[unit] != native_rank:
                wanted[native_rank] -= 1
                owners[unit] = native_rank
            else:
                left.append(unit)
        takers = np.repeat(np.arange(self.num_ranks), wanted)
        owners[left] = takers
        return dataclasses.replace(self, owners=owners)


def home_counts(num_units: int, num_ranks: int, block: int = 1) -> tuple[int, ...]:
    """Return how many units hosts give each rank: equally many, the first ranks a block more where they do not divide.

    Args:
        block: of so many units none are apart, unless there are fewer blocks than ranks.
    """
    block = 1 if num_units // block < num_ranks else block
    each, left = divmod(num_units // block, num_ranks)
    return ((each + 1) * block,) * left + (each * block,) * (num_ranks - left)


def units_by_block(units: Sequence[int] | Indices, block: int) -> tuple[Counter[int], int]:
    """Return how many of a rank's units, ascending, each of its blocks has, and the most that divides all these."""
    of_blocks = Counter(int(unit) // block for unit in units)
    return of_blocks, math.gcd(*of_blocks.values())


@lru_cache(maxsize=1024)
def blocks_held(counts: tuple[int, ...], block: int) -> tuple[tuple[int, ...], int]:
    """Return of how many blocks each rank holds some unit, if ranks own so many units, and how many are apart."""
    num_units = sum(counts)
    owned = OwnershipMap.home(num_units, len(counts), block).with_counts(counts)
    pairs = np.unique(owned.owners * num_units + np.arange(num_units) // block)  # of a rank and a block
    return tuple(np.bincount(pairs // num_units, minlength=len(counts)).tolist()), len(owned.apart)


def normalised(shares: Sequence[float]) -> tuple[float, ...]:
    """Return shares, given in any unit, scaled to mean 1; equal ones are exactly home."""
    if len(set(shares)) == 1:
        return (1.0,) * len(shares)
    mean = math.fsum(shares) / len(shares)
    return tuple(round(share / mean, SHARE_DECIMALS) for share in shares)


def checked_shares(shares: Any, num_ranks: int, *, call: str = "") -> tuple[float, ...]:
    """Return the ranks' shares that a user gives, scaled so that their mean is 1.

    For example, ``(2, 1, 1)`` becomes (1.5, 0.75, 0.75).

    Args:
        shares: of every rank, in any unit.
        num_ranks: how many there must be.
        call: the function that was given them, for the error.

    Raises:
        ValueError: unless they are ``num_ranks`` finite numbers, none negative and not all zero.
    """
    return normalised(share_numbers(shares, num_ranks, call=call))


def neuron_quantum(num_neurons: int, num_ranks: int) -> int:
    """Return in multiples of how many neurons change hands: of 8, 4 or 2, which multiply faster than odd numbers.

    A multiple divides what a rank has at home, and is at most a 128th of it: more would show in a step's length.
    """
    neurons_of_rank, left = divmod(num_neurons, num_ranks)
    if left:
        return 1
    return next((size for size in (8, 4, 2) if neurons_of_rank % size == 0 and neurons_of_rank >= 128 * size), 1)


def unit_counts(shares: Sequence[float], segment: SegmentWork) -> tuple[int, ...]:
    """Return how many units each rank owns so that the largest of ``count / share`` is least (D'Hondt's apportionment).

    That is what a step waits for: a rank with share s of the group's speed takes count / s. Equal shares are home,
    and so is a segment that stays.

    Args:
        shares: of the ranks, in any unit; not negative, not all zero. Whose share is zero owns ``min_units``.
    """
    num_ranks, quantum = len(shares), segment.quantum
    if segment.stays or len(set(shares)) == 1:
        return home_counts(segment.num_units, num_ranks, segment.block)
    if segment.block > quantum:
        return _counts_with_copies(tuple(shares), segment)
    counts = [segment.min_units] * num_ranks
    left = segment.num_units - sum(counts)
    # Down to what each rank gets in any case, so that the loop is over the remainders only.
    total = math.fsum(shares)
    for rank, share in enumerate(shares):
        sure = math.floor(segment.num_units * share / total / quantum - num_ranks) * quantum - counts[rank]
        sure = max(sure, 0) // quantum * quantum
        counts[rank] += sure
        left -= sure
    queue = [
        ((count + quantum) / share, rank)
        for rank, (count, share) in enumerate(zip(counts, shares, strict=True))
        if share > 0.0
    ]
    heapq.heapify(queue)
    while left > 0:
        _, rank = queue[0]
        part = min(quantum, left)
        counts[rank] += part
        left -= part
        heapq.heapreplace(queue, ((counts[rank] + quantum) / shares[rank], rank))
    return tuple(counts)


@lru_cache(maxsize=256)
def _counts_with_copies(shares: tuple[float, ...], segment: SegmentWork) -> tuple[int, ...]:
    """The same where blocks may be apart: whole ones, where copies of what units share cost more than they bring."""
    least = -(-segment.min_units // segment.block) * segment.block
    whole = dataclasses.replace(segment, block=1, quantum=segment.block, min_units=least)
    single = dataclasses.replace(segment, block=1)
    divisions = [_improved(unit_counts(shares, each), shares, segment) for each in (single, whole)]
    return min(divisions, key=lambda counts: _step(counts, shares, segment))


def _improved(counts: tuple[int, ...], shares: Sequence[float], segment: SegmentWork) -> tuple[int, ...]:
    """Counts from which no single unit that leaves the rank that takes longest makes a step shorter."""
    ranks = range(len(shares))
    while True:
        seconds = [load / share if share else 0.0 for load, share in zip(segment.loads(counts), shares, strict=True)]
        giver = max(ranks, key=seconds.__getitem__)
        may_take = (rank for rank in ranks if rank != giver and shares[rank] and counts[giver] > segment.min_units)
        takers = sorted(may_take, key=seconds.__getitem__)[:_MOST_TAKERS]
        others = [tuple(counts[rank] + (rank == taker) - (rank == giver) for rank in ranks) for taker in takers]
        best = min(others, key=lambda each: _step(each, shares, segment), default=counts)
        if _step(best, shares, segment) >= _step(counts, shares, segment):
            return counts
        counts = best


def _step(counts: tuple[int, ...], shares: Sequence[float], segment: SegmentWork) -> float:
    """What a step takes in the segment, in what an even share takes at the mean speed."""
    loads = zip(segment.loads(counts), shares, strict=True)
    longest = max(load / share if share else math.inf * load for load, share in loads if load)
    return longest + segment.apart * blocks_held(counts, segment.block)[1]


def most_travelling(before: Sequence[float], after: Sequence[float], segments: Sequence[SegmentWork]) -> float:
    """Return the most that a rank gives, or gets, in a move between these shares, of the work of even shares."""
    given = np.zeros((2, len(before)))
    for segment in segments:
        counts = [unit_counts(shares, segment) for shares in (before, after)]
        changes = np.array(counts[0]) - np.array(counts[1])
        gives_and_gets = np.stack([np.maximum(changes, 0), np.maximum(-changes, 0)])
        if segment.block > 1:  # takers may change, too
            home = OwnershipMap.home(segment.num_units, len(before), segment.block)
            owners = [home.with_counts(each).owners for each in counts]
            moving = owners[0] != owners[1]
            gives_and_gets = np.stack([np.bincount(each[moving], minlength=len(before)) for each in owners])
        given += segment.work * len(before) / segment.num_units * gives_and_gets
    return float(given.max())


def owned_shares(shares: Sequence[float], segments: Sequence[SegmentWork]) -> tuple[float, ...]:
    """Return what each rank then owns of the products, in units of a rank's at even shares.

    What is in no segment stays.
    """
    owned = [1.0 - math.fsum(segment.work for segment in segments)] * len(shares)
    for segment in segments:
        for rank, load in enumerate(segment.loads(unit_counts(shares, segment))):
            owned[rank] += segment.work * load
    # All of it and nothing are exact: who owns nothing is treated otherwise than who owns a little.
    return tuple(round(share, _OWNED_DECIMALS) for share in owned)
