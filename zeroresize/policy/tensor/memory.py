"""For how many units each rank has the memory, from the bytes that it may hold and those that it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroresize.plan.ownership import SegmentWork, owned_shares, unit_counts
from zeroresize.policy.tensor.costs import HALVINGS, LEAST_SHARE
from zeroresize.policy.tensor.rules.ownership import nearest_fitting, normalised

#: Part of a limit that stays free where decisions may choose; and what differs by less than that is no reason to move.
_MARGIN = 0.02


@dataclass(frozen=True)
class HeldBytes:
    """Describe what one rank holds in training: weights, gradients, optimizer state and activations."""

    fixed: float  # bytes of all but units, and of what is computed outside of their segments
    of_even_share: float  # bytes of an even share of all units, and of what is computed with them


class GroupMemory:
    """Tell which divisions of the units fit into the memory of a group.

    Args:
        limits: how many bytes each rank may hold.
        held: by every rank, whatever units it owns now.
        segments: whose units may change hands.

    Attributes:
        limits: as above.
        room: for how much each rank has the memory, in even shares of the units.
    """

    def __init__(self, limits: Sequence[float], held: Sequence[HeldBytes], segments: Sequence[SegmentWork]) -> None:
        self.limits, self._num_ranks, self._held = tuple(limits), len(held), held
        self._segments = tuple(segment for segment in segments if not segment.stays)
        self._fixed = tuple(own.fixed for own in held)
        # The units are those of all ranks, and so is what is computed with them.
        self._of_even_share = max(own.of_even_share for own in held)
        self._work = math.fsum(segment.work for segment in self._segments)
        self.room = tuple(self._room_in(1.0))

    def of_segments(self, segments: Sequence[SegmentWork]) -> GroupMemory:
        """Return the same of other segments."""
        return GroupMemory(self.limits, self._held, segments)

    @cached_property
    def most_shares(self) -> tuple[float, ...] | None:
        """Return how much each rank may own, in even shares, so that it fits however whole units are counted.

        A little stays free, as what ranks hold is not counted to the byte. None where every rank may own everything.
        Where the ranks together have not the memory, all exceed their limits by the same part.
        """
        most = [share / self._whole_units for share in self._room_in(1.0 - _MARGIN)]
        if min(most) >= self._num_ranks:
            return None
        total = math.fsum(min(share, self._num_ranks) for share in most)
        if total < self._num_ranks:
            most = [share * self._num_ranks / total for share in most] if total else [1.0] * self._num_ranks
        return tuple(most)

    @property
    def at_start(self) -> tuple[float, ...]:
        """Return the shares, mean 1, by which to begin where activations are not counted yet.

        They are the nearest to even ones with which every rank keeps as much room for activations as all else takes.
        Where there is less, every rank fills the same part of its memory.
        """
        most = [share / self._whole_units for share in self._room_in(1.0 / 2.0)]
        even = (1.0,) * self._num_ranks
        if math.fsum(min(share, self._num_ranks) for share in most) >= self._num_ranks:
            return nearest_fitting(even, most)
        return self.evenly_filled

    @property
    def evenly_filled(self) -> tuple[float, ...]:
        """Return the shares, mean 1, by which every rank fills the same part of its memory, as far as units allow."""
        if not self._of_even_share or not self._segments:
            return (1.0,) * self._num_ranks
        low, high = 0.0, 1.0
        while math.fsum(self._room_in(high)) < self._num_ranks:
            high *= 2.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if math.fsum(self._room_in(middle)) < self._num_ranks else (low, middle)
        shares = normalised(self._room_in(high))
        even = (1.0,) * self._num_ranks
        is_even = all(unit_counts(shares, segment) == unit_counts(even, segment) for segment in self._segments)
        return even if is_even else shares

    def bytes_by(self, shares: Sequence[float], borrowed: Sequence[float] = ()) -> tuple[float, ...]:
        """Return what every rank holds by these shares, in whole units; bytes.

        Args:
            borrowed: what each computes for others, in even shares; empty for nothing.
        """
        units = self._units_by(shares)
        more = borrowed or (0.0,) * self._num_ranks
        return tuple(
            fixed + self._of_even_share * (of_rank + of_others)
            for fixed, of_rank, of_others in zip(self._fixed, units, more, strict=True)
        )

    def excess_by(self, shares: Sequence[float]) -> float:
        """Return by which part of its limit some rank would hold too much, at the most; 0 where all fits."""
        held = zip(self.bytes_by(shares), self.limits, strict=True)
        excess = max(num_bytes / limit for num_bytes, limit in held) - 1.0
        return excess if excess > LEAST_SHARE else 0.0

    def is_better(self, shares: Sequence[float], than: Sequence[float]) -> bool:
        """Return whether shares fit where others do not, or exceed the limits by much less."""
        excess, before = self.excess_by(shares), self.excess_by(than)
        return before > 0.0 and (excess == 0.0 or before - excess > _MARGIN)

    def have_room_for(self, borrowed: Sequence[float], shares: Sequence[float]) -> bool:
        """Return whether who computes for others fits, by these shares; who is beyond its limit anyway must not.

        Args:
            borrowed: what each computes for others, in even shares.
        """
        held = zip(self.bytes_by(shares, borrowed), self.limits, borrowed, strict=True)
        return all(not of_others or num_bytes <= limit * (1.0 + LEAST_SHARE) for num_bytes, limit, of_others in held)

    def is_like(self, other: GroupMemory) -> bool:
        """Return whether it leaves every rank the same room as another one, but for what does not matter."""
        return all(abs(now - then) <= _MARGIN / 2 for now, then in zip(self.room, other.room, strict=True))

    def why_too_much(self, shares: Sequence[float]) -> str | None:
        """Tell which ranks these shares give more than they have the memory for; None where they fit."""
        too_much = [
            f"rank {rank} would hold {held:,.0f} bytes of at most {limit:,.0f}"
            for rank, (held, limit) in enumerate(zip(self.bytes_by(shares), self.limits, strict=True))
            if held > limit * (1.0 + LEAST_SHARE)
        ]
        return "; ".join(too_much) or None

    def _room_in(self, part: float) -> list[float]:
        """For how many even shares of the units each rank has room in this part of its memory."""
        of_even_share = max(self._of_even_share, 1.0)  # a byte at least, where there are no units
        by_rank = zip(self.limits, self._fixed, strict=True)
        return [max(part * limit - fixed, 0.0) / of_even_share for limit, fixed in by_rank]

    @cached_property
    def _whole_units(self) -> float:
        """How many times its share a rank may own at most, since units are whole.

        Shares s of mean 1 make at most s (U + R q) / R units of U, in multiples of q: see :func:`unit_counts`.
        """
        if not self._work:
            return 1.0
        return 1.0 + self._num_ranks * math.fsum(
            segment.work / self._work * max(segment.quantum, segment.block) / segment.num_units
            for segment in self._segments
        )

    def _units_by(self, shares: Sequence[float]) -> list[float]:
        """What each rank owns of the units, in even shares."""
        if not self._work:
            return [1.0] * self._num_ranks
        elsewhere = 1.0 - self._work
        return [(products - elsewhere) / self._work for products in owned_shares(shares, self._segments, held=True)]
