"""Decentralised balancing: neighbouring stages even out their work, round after round.

``L`` layers, ``S`` stages, ``B`` boundaries between neighbours. After DynPipe's supplement, Algorithm 2 and the
max-neighbour algorithm that its appendix B.3.2 analyses; by time or by parameters, whichever the costs of the load are.

Algorithm 2 as printed sends the least loaded layer of every overloaded rank to the least loaded rank of all, which
would tear stages apart, and reads ``loads`` where it means totals. Here layers cross one boundary at a time, those next
to it, from the slower stage to its faster neighbour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zeroresize.pipeline.partition import Floats, Partition, PipelineLoad, Transfer

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Diffusion:
    """Where diffusion led, and how.

    Attributes:
        partition: the last one.
        potentials: [rounds + 1] φ before the first round and after each.
        transfers: in the order in which they are made; each crosses one boundary. ``start.transfers_to(partition)``
            are those that are left if every layer travels straight to where it ends up.
        transfer_s: seconds that they take: rounds one after the other, boundaries of a round at once. 0 where the time
            of a transfer was not given.
    """

    partition: Partition
    potentials: tuple[float, ...]
    transfers: tuple[Transfer, ...]
    transfer_s: float

    @property
    def num_rounds(self) -> int:
        return len(self.potentials) - 1


def potential(times: Floats, speeds: Floats) -> float:
    """φ = Σ w_u w_v |x_u − x_v| over all pairs of stages, x their times and w their speeds relative to the mean.

    The supplement's potential for equal speeds. With others a layer changes two times by different amounts and only
    the weighted potential is sure not to rise.

    Args:
        times, speeds: [S].
    """
    order = np.argsort(times, kind="stable")
    weights = speeds[order] / speeds.mean()
    before = np.cumsum(weights) - weights
    return float((weights * times[order] * (2 * before + weights - weights.sum())).sum())


def diffused_partition(
    load: PipelineLoad,
    start: Partition,
    *,
    gamma: float = 0.0,
    max_rounds: int | None = None,
    transfer_s: Sequence[float] | Floats | None = None,
    num_steps: float | None = None,
) -> Diffusion:
    """Diffusion until φ is at most ``gamma``, or until no two neighbours gain anything, or for ``max_rounds``.

    In a round every stage deals with one neighbour at most, pairs with the largest gap first. A pair divides its layers
    anew, as evenly as layers and memory allow, if that makes the slower of the two faster and neither faster than the
    faster one was. φ then never rises, and falls wherever layers with a cost move.

    With layers so small that pairs become equal, φ ≤ γ is reached within 3 S² ln(S² W / γ) rounds, W being the sum of
    the times: the first branch of the supplement's bound, without its log S. (A round's pairs hold a third of the
    squared gaps of all boundaries, these at least 4 / S² of Σ (x − mean)², and an evened pair takes half of its squared
    gap from that sum.) Its second branch, S W log S / γ, assumes that any two ranks may meet and does not hold for
    neighbours only. Whole layers end in a local optimum: at every boundary the layer next to it, on the slower side,
    costs at least the gap, or memory or a last layer holds it back. Gaps of one sign can add up along the pipeline.

    Args:
        load: of layers and stages; seconds a step if the time of transfers is to count.
        start: the partition in force.
        gamma: in the unit of :func:`potential`.
        max_rounds: the supplement found that two are usually enough and allowed five.
        transfer_s: [L] seconds in which a layer crosses a boundary. A pair then divides anew only if that saves it more
            over ``num_steps`` than it takes, and rounds are left out from the end where they take longer than they make
            the slowest stage faster.
        num_steps: over which a transfer must pay.

    Raises:
        ValueError: if ``start`` is of other layers or stages or does not fit into the memory limits, if only one of
            ``transfer_s`` and ``num_steps`` is given, or one is negative.
    """
    load.check_partition(start)
    if not load.fits(start):
        stage = int(np.flatnonzero(load.stage_bytes(start) > load.memory_limits)[0])
        raise ValueError(
            f"stage {stage} holds {load.stage_bytes(start)[stage]:.0f} bytes at the start and may hold "
            f"{load.memory_limits[stage]:.0f}: divide the layers by balanced_partition"
        )
    exchange = _Exchange(load, _crossing_sums(load, transfer_s, num_steps), num_steps or 0.0)
    boundaries = np.array(start.boundaries)
    times = load.stage_times(start)
    potentials, rounds = [potential(times, load.speeds)], list[list[Transfer]]()
    spent_s = [0.0]
    merits = [exchange.num_steps * float(times.max())]
    while potentials[-1] > gamma and (max_rounds is None or len(rounds) < max_rounds):
        moved, wanted, seconds = exchange.round(boundaries)
        if not moved.size:
            break
        rounds.append(_transfers(boundaries, moved, wanted))
        boundaries[moved + 1] = wanted
        times = load.stage_times(Partition(tuple(boundaries.tolist())))
        potentials.append(potential(times, load.speeds))
        spent_s.append(spent_s[-1] + seconds)
        merits.append(exchange.num_steps * float(times.max()) + spent_s[-1])
    kept = len(rounds) if transfer_s is None else int(np.argmin(merits))
    made = [transfer for own in rounds[:kept] for transfer in own]
    return Diffusion(_after(start, made), tuple(potentials[: kept + 1]), tuple(made), spent_s[kept])


def _crossing_sums(
    load: PipelineLoad, transfer_s: Sequence[float] | Floats | None, num_steps: float | None
) -> Floats | None:
    """[L + 1] seconds in which the first layers cross a boundary, none of them to all."""
    if (transfer_s is None) != (num_steps is None):
        raise ValueError("transfer_s and num_steps are given together or not at all")
    if transfer_s is None or num_steps is None:
        return None
    seconds = np.array(transfer_s, dtype=np.float64)
    if seconds.shape != (load.num_layers,) or not np.all(np.isfinite(seconds) & (seconds >= 0.0)):
        raise ValueError(f"transfer_s are not {load.num_layers} finite numbers of seconds, none negative")
    if not (math.isfinite(num_steps) and num_steps >= 0.0):
        raise ValueError(f"num_steps={num_steps} is not allowed: wanted is a finite number that is not negative")
    return np.concatenate([[0.0], np.cumsum(seconds)])


class _Exchange:
    """What pairs of neighbours would do in a round, all boundaries at once.

    Args:
        crossing_sums: [L + 1] or None where the time of transfers does not count.
    """

    def __init__(self, load: PipelineLoad, crossing_sums: Floats | None, num_steps: float) -> None:
        self.num_steps = num_steps
        self._load, self._crossing_sums = load, crossing_sums

    def round(self, boundaries: Indices) -> tuple[Indices, Indices, float]:
        """The boundaries that move, no two of one stage, ascending; where to; and the longest transfer, seconds.

        Args:
            boundaries: [S + 1].
        """
        wanted_B, gaps_B = self._wanted(boundaries)
        movable = np.flatnonzero(wanted_B != boundaries[1:-1])
        is_free = np.ones(len(boundaries), dtype=bool)
        chosen = []
        for left in movable[np.argsort(-gaps_B[movable], kind="stable")].tolist():
            if is_free[left] and is_free[left + 1]:
                is_free[left : left + 2] = False
                chosen.append(left)
        moved = np.array(sorted(chosen), dtype=np.int64)
        seconds = 0.0
        if self._crossing_sums is not None and chosen:
            sums = self._crossing_sums
            seconds = float(np.abs(sums[wanted_B[moved]] - sums[boundaries[moved + 1]]).max())
        return moved, wanted_B[moved], seconds

    def _wanted(self, boundaries: Indices) -> tuple[Indices, Floats]:
        """[B] with which layer the right one of each pair would begin, and [B] the pairs' gaps."""
        load = self._load
        begin_B, now_B, end_B = boundaries[:-2], boundaries[1:-1], boundaries[2:]
        sums, speeds = load.cost_sums, load.speeds
        even_B = sums[begin_B] + (sums[end_B] - sums[begin_B]) * speeds[:-1] / (speeds[:-1] + speeds[1:])
        after_B = np.searchsorted(sums, even_B)
        lowest_B = np.searchsorted(load.byte_sums, load.byte_sums[end_B] - load.memory_limits[1:])
        highest_B = np.searchsorted(load.byte_sums, load.byte_sums[begin_B] + load.memory_limits[:-1], side="right") - 1
        # The two places next to the even one are the best: elsewhere the slower stage is slower.
        tried = np.stack([after_B - 1, after_B])
        tried = np.clip(tried, np.maximum(lowest_B, begin_B + 1), np.minimum(highest_B, end_B - 1))
        slower, faster = self._pair_times(begin_B, tried, end_B)
        slower_now, faster_now = self._pair_times(begin_B, now_B, end_B)
        is_better = (slower < slower_now) & (faster >= faster_now)
        if self._crossing_sums is not None:
            crossing_s = np.abs(self._crossing_sums[tried] - self._crossing_sums[now_B])
            is_better &= crossing_s < self.num_steps * (slower_now - slower)
        slower = np.where(is_better, slower, np.inf)
        best_B = tried[slower.argmin(axis=0), np.arange(len(now_B))]
        return np.where(is_better.any(axis=0), best_B, now_B), slower_now - faster_now

    def _pair_times(self, begin_B: Indices, middle: Indices, end_B: Indices) -> tuple[Floats, Floats]:
        """Times of the slower and of the faster stage of each pair, divided at ``middle``, [..., B]."""
        sums, speeds = self._load.cost_sums, self._load.speeds
        left = (sums[middle] - sums[begin_B]) / speeds[:-1]
        right = (sums[end_B] - sums[middle]) / speeds[1:]
        return np.maximum(left, right), np.minimum(left, right)


def _transfers(boundaries: Indices, moved: Indices, wanted: Indices) -> list[Transfer]:
    """The layers between the old and the new place of each moved boundary, those next to the old one first."""
    found = []
    for left, after in zip(moved.tolist(), wanted.tolist(), strict=True):
        now = int(boundaries[left + 1])
        if after < now:
            found += [Transfer(layer, left, left + 1) for layer in range(now - 1, after - 1, -1)]
        else:
            found += [Transfer(layer, left + 1, left) for layer in range(now, after)]
    return found


def _after(start: Partition, transfers: Sequence[Transfer]) -> Partition:
    """The partition after transfers over single boundaries."""
    boundaries = list(start.boundaries)
    for transfer in transfers:
        if transfer.source < transfer.destination:
            boundaries[transfer.destination] -= 1
        else:
            boundaries[transfer.source] += 1
    return Partition(tuple(boundaries))
