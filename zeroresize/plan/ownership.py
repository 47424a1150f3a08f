"""Who owns which units of a segment: pure functions of plain numbers.

A **segment** is what lies between two meetings of the ranks: the column-parallel layers that read one replicated x,
what is element-wise or head-wise between, and the row-parallel layer whose y is summed. A **unit** is an index of its
inner axis: a feed-forward neuron, an attention head, a group of heads that share keys and values; or a **slice** of a
head, which is one of the parts of the tokens, where several ranks may hold one head. Any assignment of units to ranks
gives the same step but for the order of a sum.

``U`` units of a segment, ``R`` ranks.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
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

#: What a copy of a block must bring beside what it costs, and all division of heads: of what products take.
COPY_GAIN = 0.05
#: So many slices a rank has at home, if each of its heads then has no more than the most, and no fewer than the least.
_SLICES_OF_RANK, _FEWEST_SLICES, _MOST_SLICES = 48, 4, 16
#: So many ranks that have least to do are tried as takers of a unit.
_MOST_TAKERS = 8

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class CopyCosts:
    """Describe what rows on several ranks cost in a step, of what their segment's products take at even shares."""

    any_block: float = 0.0  # messages, if some block that shares rows, such as a key's head, is on several ranks
    each_block: float = 0.0  # each of these
    any_whole: float = 0.0  # messages, if ranks own slices of a whole, such as a head
    each_whole: float = 0.0  # each of these
    each_part: float = 0.0  # products of a whole of which a rank computes a part, beyond that part of its products
    num_sequences: int | None = None  # of a forward, which slices of keys and values do not cut; None for many
    are_whole: bool = False  # whether ranks compute wholes that they hold, as graphs and pruned layers do


@dataclass(frozen=True)
class SegmentWork:
    """Describe what a decision must know of a segment."""

    num_units: int  # U, of all ranks together
    quantum: int  # units change hands in multiples of so many
    work: float  # of a rank's product FLOPs at even shares, the share that lies in this segment, 0 to 1
    min_units: int = 0  # what every rank keeps at least
    block: int = 1  # so many neighbours share rows that each rank with one of them holds
    shared: float = 0.0  # of the work, the share of such rows, without copies
    stays: bool = False  # whether its units stay where hosts gave them
    slices: int = 1  # so many neighbours are slices of a whole, which each rank with one of them holds
    copies: CopyCosts = CopyCosts()  # what they must bring at least

    @property
    def grain(self) -> int:
        """Return in multiples of how many slices shared rows are computed."""
        return self.slices >> min(self.copies.num_sequences or self.slices, self.slices).bit_length() - 1

    def is_even(self, num_ranks: int) -> bool:
        """Whether equal shares are equal numbers of units."""
        return self.num_units % (num_ranks * self.block) == 0

    def loads(self, counts: Sequence[int], *, held: bool = False) -> list[float]:
        """Return what ranks with so many units compute, or hold, in even shares: with copies of shared rows."""
        even = self.num_units / len(counts)
        if self.block == 1:
            return [count / even for count in counts]
        holdings = Holdings.of(tuple(counts), self.block, self.slices, self.slices if held else self.grain)
        return [
            ((1.0 - self.shared) * count + self.shared * (self.block // self.slices) * of_rank) / even
            + (0.0 if held else self.copies.each_part * parts)
            for count, of_rank, parts in zip(
                holdings.wholes if held else counts, holdings.rows, holdings.parts, strict=True
            )
        ]


@dataclass(frozen=True, eq=False)
class OwnershipMap:
    """Hold which rank owns each unit; on a rank units lie in ascending order."""

    owners: Indices  # [U], int64: for every unit the rank that owns it
    num_ranks: int  # R
    block: int = 1  # so many neighbours, which divide the units, share rows
    slices: int = 1  # so many neighbours, which divide a block, are slices of a whole

    @classmethod
    def home(cls, num_units: int, num_ranks: int, block: int = 1, slices: int = 1) -> OwnershipMap:
        """Return the map that hosts make when they shard: the ranks own neighbours, by :func:`home_counts`."""
        counts = home_counts(num_units, num_ranks, block, slices)
        return cls(np.repeat(np.arange(num_ranks), counts), num_ranks, block, slices)

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
        return OwnershipMap.home(len(self.owners), self.num_ranks, self.block, self.slices)

    @cached_property
    def apart(self) -> Indices:
        """Return the blocks that several ranks hold, ascending."""
        return self.apart_by(self.block)

    def apart_by(self, block: int) -> Indices:
        """Return which of the blocks of so many neighbours several ranks hold, ascending."""
        owners = self.owners.reshape(-1, block)
        return np.flatnonzero((owners != owners[:, :1]).any(axis=1))

    def in_wholes(self, num_units: int) -> float:
        """Return how many wholes so many units are: an int where they are whole ones."""
        return num_units / self.slices if num_units % self.slices else num_units // self.slices

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


def home_counts(num_units: int, num_ranks: int, block: int = 1, slices: int = 1) -> tuple[int, ...]:
    """Return how many units hosts give each rank: equally many, the first ranks a block more where they do not divide.

    Args:
        block: of so many units none are apart, unless there are fewer blocks than ranks.
        slices: of so many none are apart.
    """
    block = slices if num_units // block < num_ranks else block
    each, left = divmod(num_units // block, num_ranks)
    return ((each + 1) * block,) * left + (each * block,) * (num_ranks - left)


def units_by_block(units: Sequence[int] | Indices, block: int) -> tuple[Counter[int], int]:
    """Return how many of a rank's units, ascending, each of its blocks has, and the most that divides all these."""
    of_blocks = Counter(int(unit) // block for unit in units)
    return of_blocks, math.gcd(*of_blocks.values())


@dataclass(frozen=True)
class Holdings:
    """Describe what ranks hold of blocks that share rows, and of the wholes in them; the tuples are by rank."""

    rows: tuple[int, ...]  # slices of blocks' rows that are computed
    wholes: tuple[int, ...]  # units of wholes of which some slice is there
    parts: tuple[int, ...]  # wholes of which some slice is there, and not every one
    blocks_apart: int  # on several ranks
    wholes_apart: int

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, counts: tuple[int, ...], block: int, slices: int, grain: int) -> Holdings:
        """Return those of ranks that own so many units."""
        num_units, units = sum(counts), np.arange(sum(counts))
        owned = OwnershipMap.home(num_units, len(counts), block, slices).with_counts(counts)

        def number_of(keys: Indices) -> Indices:
            """Of different ones, on each rank."""
            return np.bincount(np.unique(owned.owners * num_units + keys) // num_units, minlength=len(counts))

        rows = number_of(units // block * slices + units % slices // grain) * grain
        wholes, apart = number_of(units // slices), [owned.apart_by(size) for size in (block, slices)]
        by_whole = owned.owners.reshape(-1, slices)[apart[1]]
        parts = tuple(int((by_whole == rank).any(axis=1).sum()) for rank in range(len(counts)))
        return cls(tuple(rows.tolist()), tuple((wholes * slices).tolist()), parts, *map(len, apart))


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


def slices_of(num_wholes: int, num_ranks: int) -> int:
    """Return into how many slices heads are cut, of which a rank has about 48; 1 where it has many heads."""
    finest = max(_SLICES_OF_RANK // max(num_wholes // num_ranks, 1), 1)
    slices = min(1 << finest.bit_length() - 1, _MOST_SLICES)
    return slices if slices >= _FEWEST_SLICES else 1


def unit_counts(shares: Sequence[float], segment: SegmentWork) -> tuple[int, ...]:
    """Return how many units each rank owns so that the largest of ``count / share`` is least (D'Hondt's apportionment).

    That is what a step waits for: a rank with share s of the group's speed takes count / s. Equal shares are home,
    and so is a segment that stays.

    Args:
        shares: of the ranks, in any unit; not negative, not all zero. Whose share is zero owns ``min_units``.
    """
    num_ranks, quantum = len(shares), segment.quantum
    if segment.stays or len(set(shares)) == 1:
        return home_counts(segment.num_units, num_ranks, segment.block, segment.slices)
    if segment.block > quantum:
        return _counts_with_copies(tuple(shares), segment)
    counts = [segment.min_units] * num_ranks
    left = free = segment.num_units - sum(counts)
    # Down to what each rank gets in any case, so that the loop is over the remainders only.
    total = math.fsum(shares)
    for rank, share in enumerate(shares):
        sure = math.floor(free * share / total / quantum - num_ranks) * quantum - counts[rank]
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
    divisions = []
    for size in sorted({segment.quantum, max(segment.slices, segment.quantum), segment.block}):
        least = -(-segment.min_units // size) * size
        if least * len(shares) <= segment.num_units:
            plain = dataclasses.replace(segment, block=1, quantum=size, min_units=least)
            divisions.append(_improved(unit_counts(shares, plain), shares, segment))
    return min(divisions, key=lambda counts: _step(counts, shares, segment))


def _improved(counts: tuple[int, ...], shares: Sequence[float], segment: SegmentWork) -> tuple[int, ...]:
    """Counts from which no units that leave the rank that takes longest, one or a whole, make a step shorter."""
    ranks, sizes = range(len(shares)), {segment.quantum, max(segment.slices, segment.quantum)}
    while True:
        seconds = [load / share if share else 0.0 for load, share in zip(segment.loads(counts), shares, strict=True)]
        giver = max(ranks, key=seconds.__getitem__)
        may_take = (rank for rank in ranks if rank != giver and shares[rank])
        takers = sorted(may_take, key=seconds.__getitem__)[:_MOST_TAKERS]
        may_go = [size for size in sizes if counts[giver] - size >= segment.min_units]
        others = [
            tuple(counts[rank] + size * ((rank == taker) - (rank == giver)) for rank in ranks)
            for taker, size in itertools.product(takers, may_go)
        ]
        best = min(others, key=lambda each: _step(each, shares, segment), default=counts)
        if _step(best, shares, segment) >= _step(counts, shares, segment):
            return counts
        counts = best


def _step(counts: tuple[int, ...], shares: Sequence[float], segment: SegmentWork) -> float:
    """What a step takes in the segment, in what an even share takes at the mean speed."""
    loads = zip(segment.loads(counts), shares, strict=True)
    longest = max(load / share if share else math.inf * load for load, share in loads if load)
    holdings = Holdings.of(counts, segment.block, segment.slices, segment.grain)
    copies, blocks, wholes = segment.copies, holdings.blocks_apart, holdings.wholes_apart
    if segment.block > segment.slices and blocks:
        longest += copies.any_block + copies.each_block * blocks
    if segment.slices > 1 and wholes:
        longest += copies.any_whole + copies.each_whole * wholes
    return longest


def most_travelling(before: Sequence[float], after: Sequence[float], segments: Sequence[SegmentWork]) -> float:
    """Return the most that a rank gives, or gets, in a move between these shares, of the work of even shares."""
    given = np.zeros((2, len(before)))
    for segment in segments:
        counts = [unit_counts(shares, segment) for shares in (before, after)]
        changes = np.array(counts[0]) - np.array(counts[1])
        gives_and_gets = np.stack([np.maximum(changes, 0), np.maximum(-changes, 0)]).astype(float)
        if segment.block > 1:  # takers may change, too
            home = OwnershipMap.home(segment.num_units, len(before), segment.block, segment.slices)
            maps = home.with_counts(counts[0]), home.with_counts(counts[1])
            of_wholes, of_blocks = (_given_and_got(*maps, size) for size in (segment.slices, segment.block))
            gives_and_gets = (1.0 - segment.shared) * of_wholes + segment.shared * of_blocks
        given += segment.work * len(before) / segment.num_units * gives_and_gets
    return float(given.max())


def _given_and_got(before: OwnershipMap, after: OwnershipMap, block: int) -> Any:
    """[2, R]: units of blocks that each rank gives to those who had none of their units, and gets."""
    ranks = np.arange(before.num_ranks)[:, None, None]
    had, has = ((owned.owners.reshape(-1, block) == ranks).any(axis=2) for owned in (before, after))
    new = has & ~had
    given = np.bincount(had.argmax(axis=0), weights=new.sum(axis=0), minlength=len(ranks))
    return np.stack([given, new.sum(axis=1)]) * block


def owned_shares(shares: Sequence[float], segments: Sequence[SegmentWork], *, held: bool = False) -> tuple[float, ...]:
    """Return what each rank then owns of the products, or of what they are made, in units of a rank's at even shares.

    What is in no segment stays.
    """
    owned = [1.0 - math.fsum(segment.work for segment in segments)] * len(shares)
    for segment in segments:
        for rank, load in enumerate(segment.loads(unit_counts(shares, segment), held=held)):
            owned[rank] += segment.work * load
    # All of it and nothing are exact: who owns nothing is treated otherwise than who owns a little.
    return tuple(round(share, _OWNED_DECIMALS) for share in owned)
