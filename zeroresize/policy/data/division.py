"""Which samples of a global batch each rank is given, so that all ranks take equally long.

A rank takes ``fixed_s`` and ``pace_s`` for each of its samples, of known lengths as often as these are a mean sample's
work.
``R`` ranks, ``B`` samples of a global batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeroresize.policy import ROUNDING

Floats = NDArray[np.float64]

#: A division's longest time is searched by so many halvings.
_HALVINGS = 60
#: So often at most two ranks exchange samples of different lengths, for each of the ranks.
_EXCHANGES = 8


@dataclass(frozen=True)
class Division:
    """Describe how global batches are divided.

    Attributes:
        fixed_s: [R] seconds of a step that no sample makes longer.
        pace_s: [R] seconds of a sample, of mean work; infinite for a rank that is given none.
        squares: what the square of a sample's length takes compared with its length.
        most: [R] samples at most.
        least: samples of each rank at least, where there are enough for all; ranks without them have none.
    """

    fixed_s: tuple[float, ...]
    pace_s: tuple[float, ...]
    squares: float
    most: tuple[float, ...]
    least: int = 1

    @classmethod
    def of_counts(cls, counts: Sequence[float], most: Sequence[float] | None = None, least: int = 1) -> Division:
        """Return the division in proportion to these numbers [R] of samples."""
        pace_s = tuple(1.0 / count if count > 0.0 else math.inf for count in counts)
        return cls((0.0,) * len(pace_s), pace_s, 0.0, tuple(most or (math.inf,) * len(pace_s)), least)

    @functools.lru_cache(maxsize=256)  # noqa: B019 - of few small values
    def counts(self, total: int) -> tuple[int, ...]:
        """Return [R] how many of ``total`` equal samples each rank has: their longest time is the shortest there is."""
        fewest, most_R = min(self.least, total), np.array(self.most)
        takes_part_R = np.isfinite(self.pace_s) & (most_R > 0.0)
        fixed_R, pace_R = np.array(self.fixed_s), np.where(takes_part_R, self.pace_s, 1.0)
        if total < fewest * takes_part_R.sum():  # the fastest have some, the others none
            order = np.where(takes_part_R, fixed_R + pace_R * fewest, np.inf).argsort(kind="stable")
            takes_part_R[order[total // fewest :]] = False
        most_R = np.where(takes_part_R, most_R, 0.0)
        least_R = np.minimum(fewest, most_R)

        def within(seconds: float) -> Floats:
            fitting_R: Floats = np.floor((seconds - fixed_R) / pace_R + ROUNDING)
            return np.minimum(np.maximum(fitting_R, least_R), most_R)

        low, high = 0.0, float((fixed_R + pace_R * total)[takes_part_R].max())
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if within(middle).sum() <= total else (low, middle)
        counts_R = within(low)
        for _ in range(total - int(counts_R.sum())):
            if not (counts_R < most_R).any():
                raise ValueError(f"{total} samples are more than the ranks may have together: {list(self.most)}")
            counts_R[np.where(counts_R < most_R, fixed_R + pace_R * (counts_R + 1.0), np.inf).argmin()] += 1
        return tuple(map(int, counts_R))

    def parts(self, lengths_B: Floats) -> list[NDArray[np.int64]]:
        """Return for each rank the places of its samples, in rising order, by what samples of these lengths take.

        Longest first, each sample goes to the rank that would be done with it first; then ranks exchange samples with
        the one that takes longest for as long as that helps.
        """
        if not np.ptp(lengths_B):
            return np.split(np.arange(len(lengths_B)), np.cumsum(self.counts(len(lengths_B)))[:-1])
        work_B, num_ranks = self.work(lengths_B), len(self.pace_s)
        work_B /= work_B.mean()
        lacking = [min(count, self.least) for count in self.counts(len(lengths_B))]
        free, loads_s = list(self.most), list(self.fixed_s)
        rank_B, num_lacking = np.zeros(len(work_B), dtype=np.int64), sum(lacking)
        order = np.argsort(-work_B, kind="stable").tolist()
        for num_left, (place, work) in zip(
            range(len(order), 0, -1), zip(order, work_B[order].tolist(), strict=True), strict=True
        ):
            ranks = [rank for rank in range(num_ranks) if free[rank] > 0.0]
            if num_lacking >= num_left:  # the last ones are for those that have too few
                ranks = [rank for rank in ranks if lacking[rank]]
            _, rank = min((loads_s[rank] + self.pace_s[rank] * work, rank) for rank in ranks)
            num_lacking -= lacking[rank] > 0
            lacking[rank], free[rank] = max(lacking[rank] - 1, 0), free[rank] - 1.0
            loads_s[rank] += self.pace_s[rank] * work
            rank_B[place] = rank
        loads_R, pace_R = np.array(loads_s), np.array(self.pace_s)
        self._exchange(loads_R, rank_B, work_B)
        return [np.flatnonzero(rank_B == rank) for rank in range(len(pace_R))]

    def work(self, lengths_B: Floats) -> Floats:
        """Return [B] units of work of samples of these lengths."""
        lengths = np.asarray(lengths_B, dtype=np.float64)
        return lengths + self.squares * lengths**2

    def step_s(self, counts: Sequence[int]) -> float:
        """Return the seconds of the rank that takes longest for these numbers [R] of samples, one at least for each."""
        return max(
            fixed + pace * max(count, self.least)
            for fixed, pace, count in zip(self.fixed_s, self.pace_s, counts, strict=True)
            if pace < math.inf
        )

    def _exchange(self, loads_R: Floats, rank_B: NDArray[np.int64], work_B: Floats) -> None:
        """Let the rank that takes longest exchange a sample with another, while both are done earlier then."""
        pace_R = np.array(self.pace_s)
        for _ in range(_EXCHANGES * len(pace_R)):
            slowest = int(loads_R.argmax())
            given, best = np.flatnonzero(rank_B == slowest), (loads_R[slowest] * (1.0 - ROUNDING), -1, -1)
            for rank in np.flatnonzero(np.isfinite(pace_R)).tolist():
                taken = np.flatnonzero(rank_B == rank)
                if rank == slowest or not len(taken):
                    continue
                saved = work_B[given][:, None] - work_B[taken][None, :]
                longest = np.maximum(loads_R[slowest] - pace_R[slowest] * saved, loads_R[rank] + pace_R[rank] * saved)
                place = int(longest.argmin())
                if longest.flat[place] < best[0]:
                    best = float(longest.flat[place]), int(given[place // len(taken)]), int(taken[place % len(taken)])
            if best[1] < 0:
                return
            _, given_place, taken_place = best
            other, saved_work = int(rank_B[taken_place]), work_B[given_place] - work_B[taken_place]
            loads_R[slowest] -= pace_R[slowest] * saved_work
            loads_R[other] += pace_R[other] * saved_work
            rank_B[given_place], rank_B[taken_place] = other, slowest
