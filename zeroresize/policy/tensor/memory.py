"""For how many units each rank has the memory, from the bytes that it may hold and those that it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroresize.plan.ownership import SegmentWork, owned_shares, unit_counts
from zeroresize.policy.tensor.rules.ownership import normalised

#: Halvings of the part of its memory that each rank fills.
_NUM_HALVINGS = 60
#: Part of a limit that sums of floats may be off by.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class HeldBytes:
    """Describe what one rank holds in training: weights, gradients, optimizer state and activations.

    Attributes:
        fixed: bytes of all but units, and of what is computed outside of their segments.
        of_even_share: bytes of an even share of all units, and of what is computed with them.
    """

    fixed: float
    of_even_share: float


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
        self.limits, self._segments, self._num_ranks = tuple(limits), tuple(segments), len(held)
        self._fixed = tuple(own.fixed for own in held)
        # The units are those of all ranks, and so is what is computed with them.
        self._of_even_share = max(own.of_even_share for own in held)
        self._work = math.fsum(segment.work for segment in self._segments)
        self.room = tuple(
            max(limit - fixed, 0.0) / self._of_even_share
            if self._of_even_share
            else (math.inf if limit > fixed else 0.0)
            for limit, fixed in zip(self.limits, self._fixed, strict=True)
        )

    @cached_property
    def most_shares(self) -> tuple[float, ...] | None:
        """Return how much each rank may own, in even shares, so that it fits however whole units are counted.

        None where every rank may own everything. Where the ranks together have not the memory, all exceed their limits
        by the same part.
        """
        # Shares s of mean 1 make at most s (U + R q) / R units of U, in multiples of q: see unit_counts.
        whole_units = (
            1.0
            + math.fsum(
                segment.work / self._work * self._num_ranks * segment.quantum / segment.num_units
                for segment in self._segments
            )
            if self._work
            else 1.0
        )
        most = [share / whole_units for share in self.room]
        if min(most) >= self._num_ranks:
            return None
        total = math.fsum(min(share, self._num_ranks) for share in most)
        if total < self._num_ranks:
            most = [share * self._num_ranks / total for share in most] if total else [1.0] * self._num_ranks
        return tuple(most)

    @property
    def evenly_filled(self) -> tuple[float, ...]:
        """Return the shares, mean 1, by which every rank fills the same part of its memory, as far as units allow."""
        if not self._of_even_share or not self._segments:
            return (1.0,) * self._num_ranks

        def at(part: float) -> list[float]:
            return [
                max(part * limit - fixed, 0.0) / self._of_even_share
                for limit, fixed in zip(self.limits, self._fixed, strict=True)
            ]

        low, high = 0.0, 1.0
        while math.fsum(at(high)) < self._num_ranks:
            high *= 2.0
        for _ in range(_NUM_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if math.fsum(at(middle)) < self._num_ranks else (low, middle)
        shares = normalised(at(high))
        is_even = all(len(set(unit_counts(shares, segment))) == 1 for segment in self._segments)
        return (1.0,) * self._num_ranks if is_even else shares

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

    def excess_by(self, shares: Sequence[float], borrowed: Sequence[float] = ()) -> float:
        """Return by which part of its limit some rank would hold too much, at the most; 0 where all fits."""
        held = zip(self.bytes_by(shares, borrowed), self.limits, strict=True)
        excess = max(num_bytes / limit for num_bytes, limit in held) - 1.0
        return excess if excess > _ROUNDING else 0.0

    def why_too_much(self, shares: Sequence[float]) -> str | None:
        """Tell which ranks these shares give more than they have the memory for; None where they fit."""
        too_much = [
            f"rank {rank} would hold {held:,.0f} bytes of at most {limit:,.0f}"
            for rank, (held, limit) in enumerate(zip(self.bytes_by(shares), self.limits, strict=True))
            if held > limit * (1.0 + _ROUNDING)
        ]
        return "; ".join(too_much) or None

    def _units_by(self, shares: Sequence[float]) -> list[float]:
        """What each rank owns of the units, in even shares."""
        if not self._work:
            return [1.0] * self._num_ranks
        elsewhere = 1.0 - self._work
        return [(products - elsewhere) / self._work for products in owned_shares(shares, self._segments)]
