"""What became of a simulated run: how long its steps took, and when ranks were spared something, rightly or not."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scripts.simulated.training import Simulation

#: So many updates after a change of speed a rank may still do what was right before.
GRACE = 3
#: What γ does within fewer updates of constant speed tells nothing of how it settles.
_FEWEST_UPDATES = 6
#: The update after a change of speed from which on a rank's γ is to be steady.
_STEADY_FROM = 3


@dataclass(frozen=True)
class Figures:
    """The figures of one run. What a rank is spared is what it prunes and lends.

    Attributes:
        step_per_off: mean step as a ratio to that with balancing off and the same noise.
        step: mean step as a ratio to a homogeneous one without noise.
        false_starts: how often a rank began to be spared that had not been slow for ``GRACE`` updates, per 100 updates.
        falsely_spared: mean share that such ranks were spared.
        most_falsely_spared: the largest.
        settled: for each time that a rank became slow, by how much ever, and stayed so: the update from which on what
            it is spared stays within 0.05 of its final mean; 1 where it is never spared anything.
        swing: the largest distance from that mean from the third update on.
        released: for each time that a rank recovered, the update at which it is spared nothing; inf is never.
        pruned, lent: mean share of the group's products that is dropped, and handed over.
    """

    step_per_off: float
    step: float
    false_starts: float
    falsely_spared: float
    most_falsely_spared: float
    settled: tuple[int, ...]
    swing: float
    released: tuple[float, ...]
    pruned: float
    lent: float


def figures(run: Simulation, chis: Sequence[Sequence[float]], step_s_off: float) -> Figures:
    """What became of a run.

    Args:
        chis: [updates][ranks] χ.
        step_s_off: mean seconds of a step with balancing off.
    """
    spared = [
        [one + other for one, other in zip(pruned, lent, strict=True)]
        for pruned, lent in zip(run.ratios, run.lent, strict=True)
    ]
    settled, swings, released, falsely, false_starts = [], [0.0], [], [], 0
    for rank in range(len(chis[0])):
        spared_of_rank, chi_of_rank = [update[rank] for update in spared], [update[rank] for update in chis]
        for begin, end in _periods(chi_of_rank):
            if chi_of_rank[begin] > 1.0:
                updates, swing = settling(spared_of_rank, begin, end)
                settled.append(updates)
                swings.append(swing)
            else:
                released.append(
                    next(
                        (update + 1.0 for update, share in enumerate(spared_of_rank[begin:end]) if not share), math.inf
                    )
                )
        for update, share in enumerate(spared_of_rank):
            if max(chi_of_rank[max(update - GRACE, 0) : update + 1]) == 1.0:
                falsely.append(share)
                false_starts += share > 0.0 and (update == 0 or spared_of_rank[update - 1] == 0.0)
    step_s = statistics.fmean(run.step_s)
    return Figures(
        step_per_off=step_s / step_s_off,
        step=step_s,
        false_starts=100.0 * false_starts / len(spared),
        falsely_spared=statistics.fmean(falsely) if falsely else 0.0,
        most_falsely_spared=max(falsely, default=0.0),
        settled=tuple(settled),
        swing=max(swings),
        released=tuple(released),
        pruned=run.pruned_share,
        lent=run.lent_share,
    )


def mean_figures(runs: Sequence[Figures]) -> Figures:
    """Combine the figures of several runs: means, all times of settling and release, and the largest of maxima."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(run, name) for run in runs)

    return Figures(
        step_per_off=mean("step_per_off"),
        step=mean("step"),
        false_starts=mean("false_starts"),
        falsely_spared=mean("falsely_spared"),
        most_falsely_spared=max(run.most_falsely_spared for run in runs),
        settled=tuple(itertools.chain.from_iterable(run.settled for run in runs)),
        swing=max(run.swing for run in runs),
        released=tuple(itertools.chain.from_iterable(run.released for run in runs)),
        pruned=mean("pruned"),
        lent=mean("lent"),
    )


def settling(ratios: Sequence[float], change: int, until: int, band: float = 0.05) -> tuple[int, float]:
    """Return how a rank's γ met a change of speed.

    Args:
        ratios: γ after every update, from 0.
        change: the first update whose interval was measured at the new speed.
        until: the update before which the speed changes again.
        band: how far from its mean γ may be in the steady state.

    Returns:
        After how many updates γ stays within ``band`` of its final mean (of the period's second half), and its largest
        distance from that from the third update on, by which it is to have settled.
    """
    period = np.asarray(ratios[change:until])
    final = period[len(period) // 2 :].mean()
    outside = np.flatnonzero(np.abs(period - final) > band)
    settled = int(outside[-1]) + 1 if len(outside) else 0
    return settled + 1, float(np.abs(period[_STEADY_FROM - 1 :] - final).max(initial=0.0))


def _periods(chi: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of each period of constant speed after a change that is long enough to settle in."""
    changes = [update for update in range(1, len(chi)) if chi[update] != chi[update - 1]]
    for begin, end in itertools.pairwise([*changes, len(chi)]):
        if end - begin >= _FEWEST_UPDATES:
            yield begin, end
