"""What resizing and migrating cost, measured and not assumed: Ω and Φ of section IV-B.

Resizing shrinks the matrix multiplications, less than in proportion, and adds work of its own: gathering columns,
zero-filling gradients. The two are kept apart, because a slow device may slow one more than the other. Migrating costs
communication, Φ1, and what receivers compute, Φ2: few columns take longer than their share, whoever's they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

#: At so many ratios a cost is measured.
NUM_POINTS = 6
#: Less than so much is nothing, of shares, factors and seconds; and nothing is more than the most.
LEAST_SHARE, MOST = 1e-9, 1e9
#: Relative standard deviation of what was not measured in training yet.
UNKNOWN = 0.3
#: How often an interval is halved to find a number within it: to a billionth.
HALVINGS = 30


@dataclass(frozen=True)
class ResizingCost:
    """Describe one rank's cost of pruning, linear between measured points.

    Attributes:
        ratios: pruning ratios γ, ascending, the first 0.
        gemm_share: time of the matrix multiplications at γ, as a share of theirs at γ = 0; the first 1.
        gather_fill_s: Ω(γ), seconds an iteration that gathers and fills take at γ; the first 0.
        borrowing: how many times as long as so many columns of its own another rank's take here.
        widening: how many times as long as in proportion takes what a rank owns beyond its even share.
    """

    ratios: tuple[float, ...]
    gemm_share: tuple[float, ...]
    gather_fill_s: tuple[float, ...]
    borrowing: float = 1.0
    widening: float = 1.0

    def __post_init__(self) -> None:
        if not len(self.ratios) == len(self.gemm_share) == len(self.gather_fill_s) >= 2:
            raise ValueError(f"ratios, gemm_share and gather_fill_s need equally many points, at least two: {self}")
        if self.ratios[0] != 0.0 or any(a >= b for a, b in itertools.pairwise(self.ratios)):
            raise ValueError(f"ratios={self.ratios} must ascend from 0")
        if min(self.gemm_share) <= 0 or min(self.gather_fill_s) < 0:
            raise ValueError(f"gemm_share must be positive and gather_fill_s not negative: {self}")
        if not (self.borrowing > 0.0 and self.widening > 0.0):
            raise ValueError(f"borrowing and widening must be positive: {self}")

    @classmethod
    def linear(cls, max_ratio: float) -> ResizingCost:
        """Return the cost that the paper's Eq. (1) assumes up to ``max_ratio`` < 1.

        It is proportional to FLOPs, without overhead.
        """
        ratios = spread_ratios(max_ratio)
        return cls(ratios, tuple(1.0 - ratio for ratio in ratios), (0.0,) * NUM_POINTS)

    @property
    def max_ratio(self) -> float:
        """Return the largest γ that was measured."""
        return self.ratios[-1]

    def checked(self) -> ResizingCost:
        """Return the cost, or where nothing can cost what it says, one in proportion to FLOPs and without Ω."""
        numbers = (*self.gemm_share, self.borrowing, self.widening)
        if all(LEAST_SHARE <= number <= MOST for number in numbers) and all(own <= MOST for own in self.gather_fill_s):
            return self
        return ResizingCost(self.ratios, tuple(1.0 - ratio for ratio in self.ratios), (0.0,) * len(self.ratios))

    def scaled(self, factors: Sequence[float], borrowing: float = 1.0, widening: float = 1.0) -> ResizingCost:
        """Return the cost with the gemm share of every point but the first, borrowing and widening times its factor."""
        shares = (share * factor for share, factor in zip(self.gemm_share[1:], factors[1:], strict=True))
        return ResizingCost(
            self.ratios, (1.0, *shares), self.gather_fill_s, self.borrowing * borrowing, self.widening * widening
        )

    def gemm_share_at(self, ratio: float) -> float:
        """Share of the full multiplication time at γ; beyond the last point in proportion to the columns left."""
        if ratio > self.max_ratio:
            return self.gemm_share[-1] * (1.0 - ratio) / (1.0 - self.max_ratio)
        return _interpolated(ratio, self.ratios, self.gemm_share)

    def executed_at(self, owned: float, ratio: float = 0.0) -> float:
        """Return the multiplication time of a rank that owns ``owned`` and is spared γ of that.

        It is a share of that at even shares.

        Less than at even shares costs what so many columns do by the measured curve; what is more is in proportion,
        times ``widening``.
        """
        if owned == 1.0:
            return self.gemm_share_at(ratio)
        if owned < 1.0:
            return self.gemm_share_at(1.0 - owned * (1.0 - ratio))
        return (1.0 + self.widening * (owned - 1.0)) * self.gemm_share_at(ratio)

    def owning(self, owned: float) -> ResizingCost:
        """Return the cost of a rank that owns ``owned`` times as much as at even shares, relative to what it owns.

        γ, and what is borrowed, are then shares of that. Gathers and fills are in proportion to it.
        """
        if owned == 1.0:
            return self
        whole = max(self.executed_at(owned), LEAST_SHARE)
        shares = (max(self.executed_at(owned, ratio) / whole, LEAST_SHARE) for ratio in self.ratios[1:])
        gather_fill_s = tuple(seconds * owned for seconds in self.gather_fill_s)
        return ResizingCost(self.ratios, (1.0, *shares), gather_fill_s, self.borrowing)

    def borrowed_at(self, share: float) -> float:
        """Return Φ2, the time of multiplying others' columns, as a share of the rank's own.

        They are ``share`` times as many as the rank's own.

        ``borrowing`` times as long as so few columns of its own take, and from all of them on in proportion.
        """
        return self.borrowing * (share if share >= 1.0 else self.gemm_share_at(1.0 - share))

    @property
    def borrowed_points(self) -> tuple[float, ...]:
        """Return the shares from 0 to 1, ascending, between which :meth:`borrowed_at` is a straight line."""
        return 0.0, *(1.0 - ratio for ratio in reversed(self.ratios))

    def gather_fill_at(self, ratio: float) -> float:
        """Return Ω(γ) in seconds an iteration; beyond the last point its value."""
        return _interpolated(ratio, self.ratios, self.gather_fill_s)


@dataclass(frozen=True)
class MigrationCost:
    """Describe Φ1: what communication adds to a step in which columns migrate."""

    fixed_s: float = 0.0  # seconds a loan costs whatever its size
    per_share_s: float = 0.0  # seconds for all of a rank's columns, on top

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0.0 and self.per_share_s >= 0.0):
            raise ValueError(f"the seconds of a migration cost must not be negative: {self}")

    def seconds(self, lent: Sequence[float]) -> float:
        """Return the seconds that are added to a step in which ranks lend these shares of their columns.

        A share of 0 is no loan.
        """
        shares = [share for share in lent if share > 0.0]
        return self.fixed_s * len(shares) + self.per_share_s * math.fsum(shares)

    def scaled(self, factor: float) -> MigrationCost:
        """Return a cost that is ``factor`` times as much."""
        return MigrationCost(self.fixed_s * factor, self.per_share_s * factor)


def spread_ratios(max_ratio: float) -> tuple[float, ...]:
    """Return ``NUM_POINTS`` pruning ratios from 0 to ``max_ratio``."""
    return tuple(max_ratio * point / (NUM_POINTS - 1) for point in range(NUM_POINTS))


def _interpolated(x: float, points: Sequence[float], values: Sequence[float]) -> float:
    for (x_low, x_high), (low, high) in zip(itertools.pairwise(points), itertools.pairwise(values), strict=True):
        if x <= x_high:
            return low + (high - low) * max(x - x_low, 0.0) / (x_high - x_low)
    return values[-1]
