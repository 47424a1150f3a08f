"""Who owns which units of a segment: pure functions of plain numbers.

A **segment** is what lies between two meetings of the ranks: the column-parallel layers that read one replicated x,
what is element-wise or head-wise between, and the row-parallel layer whose y is summed. A **unit** is an index of its
inner axis: a feed-forward neuron, an attention head, a group of heads that share keys and values. Any assignment of
units to ranks gives the same step but for the order of a sum.

``U`` units of a segment, ``R`` ranks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeroresize.utils.value_checks import share_numbers

#: Of shares: much finer than a unit, and alike on machines whose sums differ in the last bit.
SHARE_DECIMALS = 6
#: Of what they own of the products, however many works of segments are added up.
_OWNED_DECIMALS = 9

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class SegmentWork:
    """Describe what a decision must know of a segment."""

    num_units: int  # U, of all ranks together
    quantum: int  # units change hands in multiples of so many
    work: float  # of a rank's product FLOPs at even shares, the share that lies in this segment, 0 to 1
    min_units: int = 0  # what every rank keeps at least
    stays: bool = False  # whether its units stay where hosts gave them

    def is_even(self, num_ranks: int) -> bool:
        """Whether equal shares are equal numbers of units."""
        return self.num_units % num_ranks == 0


@dataclass(frozen=True, eq=False)
class OwnershipMap:
    """Hold which rank owns each unit; on a rank units lie in ascending order."""

    owners: Indices  # [U], int64: for every unit the rank that owns it
    num_ranks: int  # R

    @classmethod
    def home(cls, num_units: int, num_ranks: int) -> OwnershipMap:
        """Return the map that hosts make when they shard: the ranks own neighbours, by :func:`home_counts`."""
        return cls(np.repeat(np.arange(num_ranks), home_counts(num_units, num_ranks)), num_ranks)

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
        return self == OwnershipMap.home(len(self.owners), self.num_ranks)

    def units_of(self, rank: int) -> Indices:
        """Return the units that ``rank`` owns, in the order in which they lie there."""
        return np.flatnonzero(self.owners == rank)

    def with_counts(self, counts: Sequence[int]) -> OwnershipMap:
        """Return the map in which rank r owns ``counts[r]`` units; those of home are home.

        No more units change hands than must.

        Ranks give away what came from others before what hosts gave them, and that from its end; they take back their
        own first.
        """
        if len(counts) != self.num_ranks or sum(counts) != len(self.owners) or min(counts) < 0:
            raise ValueError(
                f"counts={list(counts)} do not share {len(self.owners)} units among {self.num_ranks} ranks"
            )
        home = OwnershipMap.home(len(self.owners), self.num_ranks)
        if tuple(counts) == home.counts:
            return home
        owners = self.owners.copy()
        given: list[int] = []
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
        return OwnershipMap(owners, self.num_ranks)


def home_counts(num_units: int, num_ranks: int) -> tuple[int, ...]:
    """Return how many units hosts give each rank: equally many, the first ranks one more where they do not divide."""
    each, left = divmod(num_units, num_ranks)
    return (each + 1,) * left + (each,) * (num_ranks - left)


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
        return home_counts(segment.num_units, num_ranks)
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


def owned_shares(shares: Sequence[float], segments: Sequence[SegmentWork]) -> tuple[float, ...]:
    """Return what each rank then owns of the products, in units of a rank's at even shares.

    What is in no segment stays.
    """
    owned = [1.0 - math.fsum(segment.work for segment in segments)] * len(shares)
    for segment in segments:
        for rank, count in enumerate(unit_counts(shares, segment)):
            owned[rank] += segment.work * count * len(shares) / segment.num_units
    # All of it and nothing are exact: who owns nothing is treated otherwise than who owns a little.
    return tuple(round(share, _OWNED_DECIMALS) for share in owned)
