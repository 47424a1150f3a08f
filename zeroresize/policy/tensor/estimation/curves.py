"""Every rank's times and costs at once: what ``RankTimes`` and ``ResizingCost`` tell of one, as arrays.

``R`` ranks, ``P`` points at which costs were measured, ``X`` shares that are asked for, each its own for every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy.tensor.estimation.times import RankTimes

Floats = NDArray[np.float64]


class GroupTimes(tuple[RankTimes, ...]):
    """Hold the times of all ranks of a group; arrays are made when they are first wanted.

    Attributes:
        owned: [R] what each rank owns, in units of a rank's products at even shares.
    """

    owned: tuple[float, ...]

    def __new__(cls, times: Iterable[RankTimes], owned: Sequence[float] = ()) -> GroupTimes:
        """Hold the times of ranks that own so much; of even shares where nothing is said."""
        made = super().__new__(cls, times)
        made.owned = tuple(owned) or (1.0,) * len(made)
        return made

    @classmethod
    def of(cls, times: Sequence[RankTimes]) -> GroupTimes:
        """Return ``times``, as they are where they are a group's already."""
        return times if isinstance(times, GroupTimes) else cls(times)

    def owning(self, owned: Sequence[float]) -> GroupTimes:
        """Return the times of ranks at even shares once they own so much; γ are then shares of what they own."""
        if all(share == 1.0 for share in owned):
            return self
        return GroupTimes((rank.owning(share) for rank, share in zip(self, owned, strict=True)), owned)

    @cached_property
    def owned_R(self) -> Floats:
        """Return [R] what each rank owns."""
        return np.array(self.owned)

    @cached_property
    def rest_s(self) -> Floats:
        """Return [R] T − M of every rank, seconds."""
        return np.array([rank.rest_s for rank in self])

    @cached_property
    def moving_rest(self) -> Floats:
        """Return [R] the share of that which moves along with units."""
        return np.array([rank.moving_rest for rank in self])

    @cached_property
    def gemm_s(self) -> Floats:
        """Return [R] M of every rank, seconds."""
        return np.array([rank.gemm_s for rank in self])

    @cached_property
    def busy_s(self) -> Floats:
        """Return [R] T of every rank, seconds."""
        return self.rest_s + self.gemm_s

    @cached_property
    def widening(self) -> Floats:
        """Return [R] how many times as long as in proportion takes what a rank owns beyond its even share."""
        return np.array([rank.cost.widening for rank in self])

    @cached_property
    def ratios(self) -> Floats:
        """Return [R, P] every rank's measured points."""
        return self._points("ratios")

    @cached_property
    def _gemm_share(self) -> Floats:
        return self._points("gemm_share")

    @cached_property
    def _gather_fill_s(self) -> Floats:
        scale = np.array([rank.gather_fill_scale for rank in self])
        return scale[:, None] * self._points("gather_fill_s")

    def _points(self, name: str) -> Floats:
        """[R, P]; who has fewer points has his last one again."""
        points = [getattr(rank.cost, name) for rank in self]
        most = max(map(len, points))
        return np.array([(*own, *own[-1:] * (most - len(own))) for own in points])

    def gemm_share_at(self, ratios_RX: Floats) -> Floats:
        """Return what :meth:`ResizingCost.gemm_share_at` gives, of every rank."""
        most = self.ratios[:, -1:]
        beyond = self._gemm_share[:, -1:] * (1.0 - ratios_RX) / (1.0 - most)
        return np.where(ratios_RX > most, beyond, _interpolated(ratios_RX, self.ratios, self._gemm_share))

    def borrowing_s(self, shares_RX: Floats) -> Floats:
        """Return [R, X] the seconds of others' products, in shares of a rank's own, by :meth:`~.borrowed_at`."""
        borrowing = np.array([[rank.gemm_s * rank.cost.borrowing] for rank in self])
        few = self.gemm_share_at(1.0 - np.minimum(shares_RX, 1.0))
        return borrowing * np.where(shares_RX >= 1.0, shares_RX, few)

    @cached_property
    def borrowed_points(self) -> Floats:
        """Return [R, P + 1] what :attr:`ResizingCost.borrowed_points` gives, of every rank."""
        return np.concatenate([np.zeros((len(self), 1)), 1.0 - self.ratios[:, ::-1]], axis=1)

    def busy_at(self, spared_RX: Floats, owned_RX: Floats | None = None) -> Floats:
        """Return [R, X] busy seconds of ranks that are spared γ of what they own, by :meth:`~.executed_at`.

        Args:
            owned_RX: what each owns, in units of what its times are those of; None for 1.
        """
        if owned_RX is None:
            gemm_s = self.gemm_s[:, None] * self.gemm_share_at(spared_RX)
            return self.rest_s[:, None] + gemm_s + _interpolated(spared_RX, self.ratios, self._gather_fill_s)
        wide_RX, narrow_RX = np.maximum(owned_RX, 1.0), np.minimum(owned_RX, 1.0)
        executed = (1.0 + self.widening[:, None] * (wide_RX - 1.0)) * self.gemm_share_at(
            np.where(owned_RX > 1.0, spared_RX, 1.0 - narrow_RX * (1.0 - spared_RX))
        )
        rest = self.rest_s[:, None] * (1.0 - self.moving_rest[:, None] * (1.0 - owned_RX))
        gathers_s = _interpolated(spared_RX, self.ratios, self._gather_fill_s) * owned_RX
        return rest + self.gemm_s[:, None] * executed + gathers_s

    @cached_property
    def busy_at_points(self) -> Floats:
        """Return [R, P] busy seconds at every rank's measured points."""
        return self.busy_at(self.ratios)

    def ratios_to_reach(self, target_s: float) -> Floats:
        """Return [R] the smallest γ with which each rank takes so long at most; where none does, of the cheapest."""
        return ratios_to_reach(np.array([target_s]), self.ratios, self.busy_at_points)[:, 0]


def ratios_to_reach(levels_s_L: Floats, ratios_SP: Floats, busy_s_SP: Floats) -> Floats:
    """Return [S, L] how much each of S ranks must be spared to take so long at most; where none does, of the cheapest.

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


def done_within(levels_s_RX: Floats, amounts_RP: Floats, seconds_RP: Floats) -> Floats:
    """Return [R, X] how much is done until then, the last amount at most; amounts and their seconds ascend."""
    above_RX = np.ones(levels_s_RX.shape, dtype=np.intp)
    for point in range(1, seconds_RP.shape[1] - 1):
        above_RX += seconds_RP[:, point, None] <= levels_s_RX
    above_RX += seconds_RP.shape[1] * np.arange(len(seconds_RP))[:, None]
    low_s, high_s = seconds_RP.take(above_RX - 1), seconds_RP.take(above_RX)
    low, high = amounts_RP.take(above_RX - 1), amounts_RP.take(above_RX)
    part = np.clip((levels_s_RX - low_s) / np.where(high_s > low_s, high_s - low_s, 1.0), 0.0, 1.0)
    return np.where(levels_s_RX < seconds_RP[:, -1:], low + (high - low) * part, amounts_RP[:, -1:])


def _interpolated(x_RX: Floats, points_RP: Floats, values_RP: Floats) -> Floats:
    """Straight lines between each rank's points, its last value beyond them."""
    last = points_RP.shape[1] - 1
    # Of each x how many points beside the first it is not up to, which is all of them where it is not a number.
    right_RX = np.count_nonzero(~(x_RX[:, :, None] <= points_RP[:, None, 1:]), axis=2)
    rank_R1, left_RX = np.arange(len(x_RX))[:, None], np.minimum(right_RX, last - 1)
    low, high = values_RP[rank_R1, left_RX], values_RP[rank_R1, left_RX + 1]
    x_low, x_high = points_RP[rank_R1, left_RX], points_RP[rank_R1, left_RX + 1]
    width = np.where(x_high > x_low, x_high - x_low, 1.0)
    line = low + (high - low) * np.maximum(x_RX - x_low, 0.0) / width
    return np.where(right_RX == last, values_RP[:, -1:], line)
