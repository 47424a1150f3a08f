"""What balancing brought to a run, by its own steps without balancing.

Every run has some: those before the first plan, and those that are made at full work from time to time, to be
measured. They are compared with balanced steps in which ranks were as slow; where there are none, nothing is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scripts.report.run import RunFolder
from vit_examples.step_times import TimedSteps

#: First steps of each process: allocators and thread pools warm up, and costs are calibrated.
WARM_UP = 5
#: Steps are alike where the slowest rank's busy time at full work differs by less than this share.
ALIKE = 0.25
#: Fewer steps of either kind tell nothing.
_FEWEST = 3
_RESAMPLED = 1000
_UNKNOWN, _FULL, _BALANCED = 0, 1, 2


@dataclass(frozen=True)
class Gain:
    """Steps that are compared with each other; where a run timed several together, they stay together."""

    unbalanced: Sequence[TimedSteps]
    balanced: Sequence[TimedSteps]

    @property
    def ratio(self) -> float:
        """How many times as long steps without balancing took, by medians."""
        return median_s(self.unbalanced) / median_s(self.balanced)

    def interval(self) -> tuple[float, float] | None:
        """95 % of the ratios of resampled steps lie within; None where too few were timed by themselves."""
        if min(len(self.unbalanced), len(self.balanced)) < _FEWEST:
            return None
        random = np.random.default_rng(0)
        without, with_it = (
            [np.median(random.choice([one.seconds for one in timed], len(timed))) for _ in range(_RESAMPLED)]
            for timed in (self.unbalanced, self.balanced)
        )
        low, high = np.percentile(np.divide(without, with_it), (2.5, 97.5))
        return float(low), float(high)


def gain_of(run: RunFolder) -> Gain | str:
    """What the run's steps tell of it; or why they do not."""
    if run.mode == "off":
        return "nothing: mode off"
    kinds, slowest_s = _kinds_of_steps(run), run.slowest_at_full_work()
    if not (kinds == _BALANCED).any() and (kinds == _FULL).any():
        return "nothing: no plan that moved, lent or pruned was in force"
    by_kind: dict[int, list[TimedSteps]] = {_UNKNOWN: [], _FULL: [], _BALANCED: []}
    slow_s: dict[TimedSteps, float] = {}
    for timed in run.timed:
        steps, kind = slice(timed.begin, timed.end), kinds[timed.begin]
        is_settled = timed.begin - timed.from_step >= WARM_UP
        if timed.seconds is not None and is_settled and (kinds[steps] == kind).all():
            slow_s[timed] = float(slowest_s[steps].mean())
            by_kind[kind].append(timed)
    known_s = [seconds for timed in by_kind[_BALANCED] if not np.isnan(seconds := slow_s[timed])]
    usual_s = float(np.median(known_s)) if known_s else np.nan
    full, balanced = (
        [timed for timed in by_kind[kind] if abs(slow_s[timed] / usual_s - 1) <= ALIKE] for kind in (_FULL, _BALANCED)
    )
    if min(num_steps(full), num_steps(balanced)) < _FEWEST:
        return (
            "not known: too few steps without balancing were timed while ranks were as slow; "
            "a run of its own with --mode off tells"
        )
    return Gain(full, balanced)


def gain_rows(run: RunFolder) -> list[tuple[str, str]]:
    """The same as a table."""
    gain = gain_of(run)
    if isinstance(gain, str):
        return [("", gain)]
    rows = [
        (f"a step {name} balancing", f"{1e3 * median_s(timed):.1f} ms, median of the {num_steps(timed)} {which}")
        for name, timed, which in (
            ("without", gain.unbalanced, "at full work, before the first plan or to be measured"),
            ("with", gain.balanced, "in which ranks were as slow as then"),
        )
    ]
    interval = gain.interval()
    interval_in_words = f" ({interval[0]:.2f} to {interval[1]:.2f}: 95 % by bootstrap)" if interval else ""
    return [*rows, ("without balancing steps took", f"{gain.ratio:.2f} times as long{interval_in_words}")]


def median_s(timed: Sequence[TimedSteps]) -> float:
    """Seconds of a step."""
    return float(np.median([one.seconds for one in timed if one.seconds is not None]))


def num_steps(timed: Sequence[TimedSteps]) -> int:
    """How many steps they are."""
    return sum(one.end - one.begin for one in timed)


def _kinds_of_steps(run: RunFolder) -> np.ndarray:
    """Tell for each step whether any rank pruned or lent in it, or owned another share than an even one.

    Where units are away, steps that are made to be measured are neither.
    """
    kinds = np.full(run.num_steps, _UNKNOWN)
    if run.is_pinned:
        return kinds
    begins_of = {rank: run.plan_begins(rank) for rank in run.records}
    known_from = max(begins[0] for begins in begins_of.values())
    kinds[known_from:] = _FULL
    for rank, records in run.records.items():
        for record, (begin, end) in zip(records, pairwise([*begins_of[rank], run.num_steps]), strict=True):
            is_away = record["owned"] != 1.0
            if is_away or record["pruned"] + record["lent"] > 0:
                at_full_work = record["calibration_steps"] if begin == record["step"] else 0
                if is_away:
                    kinds[max(begin, known_from) : begin + at_full_work] = _UNKNOWN
                kinds[max(begin + at_full_work, known_from) : end] = _BALANCED
    return kinds
