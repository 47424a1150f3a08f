"""Every rank's times and costs at once: what ``RankTimes`` and ``ResizingCost`` tell of one, bit for bit, as arrays.

``R`` ranks, ``P`` points at which costs were measured, ``X`` shares that are asked for, each its own for every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.tensor.estimation.times import RankTimes

Floats = NDArray[np.float64]


class Curves:
    """Hold the curves of a group.

    Args:
        times: of every rank.

    Attributes:
        rest_s: [R] T − M of every rank, seconds.
        moving_rest: [R] the share of that which moves along with units.
        widening: [R] how many times as long as in proportion takes what a rank owns beyond its even share.
        gemm_s: [R] M of every rank, seconds.
        busy_s: [R] T of every rank, seconds.
        ratios: [R, P] of every rank's measured points.
    """

    def __init__(self, times: Sequence[RankTimes]) -> None:
        most = max(len(rank.cost.ratios) for rank in times)
        numbers = np.array([(rank.rest_s, rank.gemm_s, rank.gather_fill_scale, rank.cost.borrowing) for rank in times])
        self.rest_s, self.gemm_s, self._scale, self._borrowing = numbers.T.copy()
        self.moving_rest = np.array([rank.moving_rest for rank in times])
        self.widening = np.array([rank.cost.widening for rank in times])
        self.busy_s = self.rest_s + self.gemm_s
        self.ratios = _padded([rank.cost.ratios for rank in times], most)
        self._gemm_share = _padded([rank.cost.gemm_share for rank in times], most)
        self._gather_fill_s = _padded([rank.cost.gather_fill_s for rank in times], most)

    @classmethod
    def of(cls, times: Sequence[RankTimes]) -> Curves:
        """Return the curves of ``times``, made once where these are :class:`GroupTimes`."""
        return times.curves if isinstance(times, GroupTimes) else cls(times)

    def gemm_share_at(self, ratios_RX: Floats) -> Floats:
        """Return what :meth:`ResizingCost.gemm_share_at` gives, of every rank."""
        most = self.ratios[:, -1:]
        beyond = self._gemm_share[:, -1:] * (1.0 - ratios_RX) / (1.0 - most)
        return np.where(ratios_RX > most, beyond, _interpolated(ratios_RX, self.ratios, self._gemm_share))

    def borrowed_at(self, shares_RX: Floats) -> Floats:
        """Return what :meth:`ResizingCost.borrowed_at` gives, of every rank."""
        few = self.gemm_share_at(1.0 - np.minimum(shares_RX, 1.0))
        return self._borrowing[:, None] * np.where(shares_RX >= 1.0, shares_RX, few)

    @property
    def borrowed_points(self) -> Floats:
        """Return [R, P + 1] what :attr:`ResizingCost.borrowed_points` gives, of every rank."""
        return np.concatenate([np.zeros((len(self.ratios), 1)), 1.0 - self.ratios[:, ::-1]], axis=1)

    def busy_at(self, ratios_RX: Floats) -> Floats:
        """Return what :meth:`RankTimes.busy_at` gives, of every rank."""
        shrunk_s = self.gemm_s[:, None] * self.gemm_share_at(ratios_RX)
        gather_fill_s = _interpolated(ratios_RX, self.ratios, self._gather_fill_s)
        return self.rest_s[:, None] + shrunk_s + self._scale[:, None] * gather_fill_s

    def owning_s(self, owned_RX: Floats, spared_RX: Floats | None = None) -> Floats:
        """Return [R, X] busy seconds of ranks that own so much by :meth:`ResizingCost.executed_at`.

        Args:
            spared_RX: share of what each owns that it does not compute, γ; None for nothing.
        """
        wider_RX = 1.0 + self.widening[:, None] * (owned_RX - 1.0)
        rest = self.rest_s[:, None] * (1.0 - self.moving_rest[:, None] * (1.0 - owned_RX))
        if spared_RX is None:
            executed = np.where(owned_RX > 1.0, wider_RX, self.gemm_share_at(1.0 - np.minimum(owned_RX, 1.0)))
            return rest + self.gemm_s[:, None] * executed
        narrow_RX = 1.0 - np.minimum(owned_RX, 1.0) * (1.0 - spared_RX)
        executed = np.where(owned_RX > 1.0, wider_RX * self.gemm_share_at(spared_RX), self.gemm_share_at(narrow_RX))
        gather_fill_s = self._scale[:, None] * _interpolated(spared_RX, self.ratios, self._gather_fill_s) * owned_RX
        return rest + self.gemm_s[:, None] * executed + gather_fill_s

    @cached_property
    def busy_at_points(self) -> Floats:
        """Return [R, P] busy seconds at every rank's measured points."""
        return self.busy_at(self.ratios)

    def ratios_to_reach(self, target_s: float) -> Floats:
        """Return [R] what :meth:`RankTimes.ratio_to_reach` gives, of every rank."""
        return ratios_to_reach(np.array([target_s]), self.ratios, self.busy_at_points)[:, 0]


class GroupTimes(tuple[RankTimes, ...]):
    """Hold the times of all ranks of a group, whose curves are made when they are first wanted.

    Attributes:
        owned: [R] what each rank owns, in units of a rank's products at even shares; None where that is 1 of all.
    """

    owned: tuple[float, ...] | None = None

    def owning(self, owned: Sequence[float]) -> GroupTimes:
        """Return the times of ranks at even shares once they own so much; γ are then shares of what they own."""
        if all(share == 1.0 for share in owned):
            return self
        times = GroupTimes(rank.owning(share) for rank, share in zip(self, owned, strict=True))
        times.owned = tuple(owned)
        return times

    @cached_property
    def curves(self) -> Curves:
        """Return the curves of the group."""
        return Curves(self)


def ratios_to_reach(levels_s_L: Floats, ratios_SP: Floats, busy_s_SP: Floats) -> Floats:
    """Return [S, L] how much each of S ranks must be spared to take so long at most, as `RankTimes.ratio_to_reach`.

    Args:
        levels_s_L: busy times that are tried, seconds.
        ratios_SP: of every rank, ascending.
        busy_s_SP: what the rank takes at them, seconds.
    """
    first_SL = np.broadcast_to(busy_s_SP.argmin(axis=1)[:, None], (len(busy_s_SP), len(levels_s_L)))
    for point in range(busy_s_SP.shape[1] - 1, -1, -1):
        first_SL = np.where(busy_s_SP[:, point, None] <= levels_s_L, point, first_SL)
    row_S1 = busy_s_SP.shape[1] * np.arange(len(busy_s_SP))[:, None]
    before_SL, at_SL = row_S1 + np.maximum(first_SL - 1, 0), row_S1 + first_SL
    slow_s, fast_s = busy_s_SP.take(before_SL), busy_s_SP.take(at_SL)
    low, high = ratios_SP.take(before_SL), ratios_SP.take(at_SL)
    part = np.clip((slow_s - levels_s_L) / np.where(slow_s > fast_s, slow_s - fast_s, 1.0), 0.0, 1.0)
    return np.where(first_SL == 0, ratios_SP[:, :1], low + (high - low) * part)


def _padded(points: Sequence[tuple[float, ...]], most: int) -> Floats:
    """[R, P]; who has fewer points has his last one again."""
    return np.array([own if len(own) == most else (*own, *own[-1:] * (most - len(own))) for own in points])


def _interpolated(x_RX: Floats, points_RP: Floats, values_RP: Floats) -> Floats:
    """Straight lines between each rank's points, its last value beyond them."""
    last = points_RP.shape[1] - 1
    if last == 0:
        return np.broadcast_to(values_RP, x_RX.shape)
    # Of each x how many points beside the first it is not up to, which is all of them where it is not a number.
    right_RX = np.count_nonzero(~(x_RX[:, :, None] <= points_RP[:, None, 1:]), axis=2)
    rank_R1, left_RX = np.arange(len(x_RX))[:, None], np.minimum(right_RX, last - 1)
    low, high = values_RP[rank_R1, left_RX], values_RP[rank_R1, left_RX + 1]
    x_low, x_high = points_RP[rank_R1, left_RX], points_RP[rank_R1, left_RX + 1]
    width = np.where(x_high > x_low, x_high - x_low, 1.0)
    line = low + (high - low) * np.maximum(x_RX - x_low, 0.0) / width
    return np.where(right_RX == last, values_RP[:, -1:], line)
