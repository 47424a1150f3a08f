"""Lines for an operator when units change hands: who is slow, what moves where, what it costs, what came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from zeroresize.plan.group import WorkloadPlan
from zeroresize.resharding.units.owned_units import Move
from zeroresize.utils.texts import seconds_text

#: Up to so many ranks are named, and described one by one; of more the line tells how many they are.
_MOST_NAMED, _MOST_DETAILED = 8, 3
#: A step is shorter or longer where it differs by this share at least; less is noise on shared machines.
_NOTICEABLE = 0.05
#: Who compares for less seconds than this had no products to compare, as before the first step.
_LEAST_COMPARING_S = 1e-4
#: At the second decision after a move the times measured since are known.
_UPDATES_TO_VERDICT = 2


class MoveLog:
    """Keeps what a line must tell of the time before the move.

    Args:
        clock: tells the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._decided_at = clock()
        self._slow_since: dict[int, float] = {}
        self._last: tuple[int, float, float] | None = None
        self._was_in_vain = False
        self._num_decisions = 0  # since the last move
        self._moved_at = 0  # after so many steps

    def planned(self, before: WorkloadPlan) -> None:
        """Note that a decision is about to replace the plan ``before``, which the last such call was followed by."""
        self._slow_since = {
            rank: self._slow_since.get(rank, self._decided_at)
            for rank, rank_plan in enumerate(before.ranks)
            if rank_plan.is_straggler
        }
        self._decided_at = self._clock()
        self._num_decisions += 1

    def line(
        self,
        move: Move,
        plan: WorkloadPlan,
        busy_s: Sequence[float],
        *,
        num_steps: int = 0,
        step_s: float = math.nan,
        comparing_s: float = 0.0,
        cause: str | None = None,
        is_held: bool = False,
    ) -> str:
        """Describe ``move`` for the log, as "rank 3 is 2.1 times slower than the fastest for 40 s: 43 % of rank
        3's neurons and 25 % of its heads move to ranks 0, 1, 2: 38 MB, 0.4 s, then 0.2 s to compare products; a step
        took 310 ms, expected 205 ms".

        Percentages are of what the rank owned in all layers together, since layers need not divide alike.

        Args:
            plan: by which it was made.
            busy_s: of every rank at its even share, seconds; empty where nothing was measured.
            num_steps: after so many steps it was made.
            step_s: what a step took before, as it was measured.
            comparing_s: seconds for which ranks compared products after it.
            cause: why it was made, such as "by hand", where no measurement did; None where one did.
            is_held: whether a user holds the shares.
        """
        self._last = None if cause is not None else (num_steps, step_s, plan.predicted_step_s)
        self._was_in_vain, self._num_decisions, self._moved_at = False, 0, num_steps
        if not any(map(any, move.changes.values())):
            return "shares change by less than a unit: nothing moves"
        compared = comparing_s >= _LEAST_COMPARING_S
        comparing = f", then {seconds_text(comparing_s)} to compare products" if compared else ""
        why, expected = self._why(move, plan, busy_s), _expected(step_s, plan.predicted_step_s)
        if cause is not None:
            why, expected = f"{cause}: ", ""
        held = "; these shares are held until move(None)" if is_held else ""
        return f"{why}{_what(move)}: {_size(move.total_bytes)}, {seconds_text(move.seconds)}{comparing}{expected}{held}"

    def came_of(self, step_s: float, next_update: int = 0) -> str | None:
        """Describe what came of the last move, once after it; None where there is nothing to tell.

        Args:
            step_s: what a step has taken since, as it was measured.
            next_update: after how many steps the balancer decides by it.
        """
        if self._last is None or math.isnan(step_s):
            return None
        (num_steps, before_s, expected_s), self._last = self._last, None
        if math.isnan(before_s):
            return None
        expected = (
            "" if math.isnan(expected_s) or expected_s > before_s else f", {_number(1e3 * expected_s)} ms were expected"
        )
        return (
            f"since units moved at step {num_steps} a step takes {_number(1e3 * step_s)} ms, "
            f"{_number(1e3 * before_s)} ms before{expected}: {self._conclusion(step_s, before_s, next_update)}"
        )

    def _conclusion(self, step_s: float, before_s: float, next_update: int) -> str:
        saved = 1.0 - step_s / before_s
        if saved >= _NOTICEABLE:
            return f"steps are {100.0 * saved:.0f} % shorter"
        self._was_in_vain = True
        longer = f"steps are {-100.0 * saved:.0f} % longer" if saved <= -_NOTICEABLE else "steps are as long as before"
        return f"{longer}. The balancer decides by these times at step {next_update}"

    def verdict(self, is_another_wanted: bool) -> str | None:
        """Describe what the balancer makes of a move that was in vain, once it has decided by the times since.

        Args:
            is_another_wanted: whether it takes another division for faster, and waits until that is sure to pay.

        Returns:
            A line for the log; None where there is nothing to tell, or not yet.
        """
        if not self._was_in_vain or self._num_decisions < _UPDATES_TO_VERDICT:
            return None
        self._was_in_vain = False
        makes_of_it = (
            "another division would be faster, and units move once it would have saved as much as the move takes"
            if is_another_wanted
            else "units stay for now, as no other division would be faster"
        )
        return f"the move at step {self._moved_at} has not made steps shorter; {makes_of_it}"

    def _why(self, move: Move, plan: WorkloadPlan, busy_s: Sequence[float]) -> str:
        """The stragglers whose units change, or that there are none any more."""
        slow = [rank for rank in _changing(move, lambda change: change != 0) if plan.ranks[rank].is_straggler]
        if _comes_home(move):
            is_anyone_slow = any(rank.is_straggler for rank in plan.ranks)
            return "even shares are faster now: " if is_anyone_slow else "no rank is slow any more: "
        if not slow or len(busy_s) != len(plan.ranks):
            return ""
        by = {rank: busy_s[rank] / min(busy_s) for rank in slow}
        if len(slow) > _MOST_DETAILED:
            most = max(slow, key=lambda rank: by[rank])
            return f"{len(slow)} ranks are slower than the fastest, rank {most} most, {by[most]:.1f} times: "
        lines = [
            f"rank {rank} is {by[rank]:.1f} times slower than the fastest"
            + (f" for {seconds_text(self._clock() - self._slow_since[rank])}" if rank in self._slow_since else "")
            for rank in slow
        ]
        return f"{', '.join(lines)}: "


def _expected(before_s: float, after_s: float) -> str:
    """The step as it was measured, and as it is expected from now on.

    What is expected may rest on older times than the last measured one: where it is longer, it is no promise of a move.
    """
    if math.isnan(after_s):
        return "" if math.isnan(before_s) else f"; a step took {_number(1e3 * before_s)} ms"
    if after_s > before_s:
        return f"; a step took {_number(1e3 * before_s)} ms, less than by the older times that decided this"
    if math.isnan(before_s):
        return f"; expected step {_number(1e3 * after_s)} ms"
    return f"; a step took {_number(1e3 * before_s)} ms, expected {_number(1e3 * after_s)} ms"


def _what(move: Move) -> str:
    takers = _ranks(_changing(move, lambda change: change > 0))
    if _comes_home(move):
        return f"units come home to {takers}"
    givers = _changing(move, lambda change: change < 0)
    if len(givers) > _MOST_DETAILED:
        most = {
            kind: max(
                (-change[rank] / move.owned_before[kind][rank] for rank in givers if change[rank] < 0), default=0.0
            )
            for kind, change in move.changes.items()
        }
        parts = " and ".join(f"{_percent(share)} the {kind}" for kind, share in most.items() if share > 0.0)
        return f"up to {parts} of each of {len(givers)} ranks move to {takers}"
    return f"{', '.join(_given(move, rank) for rank in givers)} move to {takers}"


def _given(move: Move, rank: int) -> str:
    given = {
        kind: -change[rank] / move.owned_before[kind][rank] for kind, change in move.changes.items() if change[rank] < 0
    }
    whose = (f"rank {rank}'s", *["its"] * (len(given) - 1))
    return " and ".join(
        f"{_percent(share)} {owner} {kind}" for (kind, share), owner in zip(given.items(), whose, strict=True)
    )


def _comes_home(move: Move) -> bool:
    return len(set(move.after)) == 1


def _changing(move: Move, how: Callable[[int], bool]) -> list[int]:
    return [rank for rank in range(len(move.after)) if any(how(change[rank]) for change in move.changes.values())]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > _MOST_NAMED:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _percent(share: float) -> str:
    if share == 1.0:
        return "all of"
    return f"{100.0 * share:.0f} % of" if share >= 0.01 else "less than 1 % of"


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{_number(num_bytes / size)} {unit}"
    return f"{_number(num_bytes / 1e3)} kB"


def _number(value: float) -> str:
    """Three digits that count, without an exponent."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.3g}"
