"""Lines for an operator: who is slow, what moves where and what came of it, and why a slow rank keeps its units."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence

from zeroresize.control.group_decision import GroupDecision
from zeroresize.plan.group import WorkloadPlan
from zeroresize.resharding.units.owned_units import Move, OwnedUnits
from zeroresize.utils.texts import duration_text, named_ranks, size_text

logger = logging.getLogger(__name__)

#: Up to so many ranks are named; of more the line tells how many they are.
_MOST_NAMED = 3
#: A step is shorter or longer where it differs by this share at least; less is noise on shared machines.
_NOTICEABLE = 0.05
#: Who compares for less seconds than this had no products to compare, as before the first step.
_LEAST_COMPARING_S = 1e-4
#: After so many updates with a slow rank whose units stay it is said why, and then after twice as many each time.
_FIRST = 8
#: So many updates in a row a rank must come late to the model, and by more than so many seconds: starting to compute
#: varies by as much.
_LATE_UPDATES, _LATE_S = 2, 0.005


class Reporter:
    """Writes what is decided to the log, on the one rank that speaks for all of them.

    Args:
        tolerance: the share of a step by which a rank may come later to the model than the first one.
        speaks: whether this rank is the one.
        clock: tells the time, in seconds.
    """

    def __init__(self, tolerance: float, *, speaks: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._tolerance, self._speaks, self._clock = tolerance, speaks, clock
        self._slow_since: dict[int, float] = {}
        self._last_move: tuple[int, float, float] | None = None
        self._owned: tuple[float, ...] = ()
        self._num_staying, self._next_staying = 0, _FIRST
        self._num_late = 0
        self._said: set[str] = set()

    def info(self, num_steps: int, text: str) -> None:
        """Write a line after so many steps."""
        if self._speaks:
            logger.info("step %d: %s", num_steps, text)

    def warn(self, num_steps: int, text: str, once: str = "") -> None:
        """Write a warning after so many steps; only once for each kind that is named."""
        if self._speaks and (not once or once not in self._said):
            logger.warning("step %d: %s", num_steps, text)
        self._said.add(once)

    def decided(self, num_steps: int, before: WorkloadPlan, decision: GroupDecision, units: OwnedUnits | None) -> None:
        """Tell what an update has changed of the plan decided ``before``, and why it has changed nothing."""
        plan, busy_s, state = decision.decided, decision.controller.busy_s, decision.restraint.state
        advice = "advice only, nothing of it is done: " * (state == "advice")
        now, slow = self._clock(), [rank for rank, of_rank in enumerate(plan.ranks) if of_rank.is_straggler]
        self._slow_since = {rank: self._slow_since.get(rank, now) for rank in slow}
        if state != "off" and plan.relieved != before.relieved:
            self.info(num_steps, advice + plan.description + _why_relief_ended(before, plan, busy_s))
        if advice and plan.owned != before.owned:
            self.info(num_steps, f"{advice}units by {list(plan.owned)}: {decision.controller.verdict}")
        elif units is not None and state == "on":
            if decision.controller.config.may_move and units.segments and units.why_not_movable is None:
                self._tell_why_units_stay(num_steps, decision)
            if plan.owned == units.shares:
                self._tell_what_does_not_fit(num_steps, decision, units)
        self._tell_who_is_late(num_steps, decision)

    def moved(
        self,
        num_steps: int,
        move: Move,
        decision: GroupDecision,
        step_s: float = math.nan,
        comparing_s: float = 0.0,
        *,
        cause: str | None = None,
        is_held: bool = False,
    ) -> None:
        """Tell of ``move``, as "rank 3 is 2.1 times slower than the fastest for 40 s: 43 % of rank 3's neurons and 25 %
        of its heads move to ranks 0, 1, 2: 38 MB, 0.4 s, then 0.2 s to compare products; a step took 310 ms, expected
        205 ms".

        Percentages are of what the rank owned in all layers together, since layers need not divide alike.

        Args:
            decision: by whose plan it was made.
            step_s: what a step took before, as it was measured.
            comparing_s: seconds for which ranks compared products after it.
            cause: why it was made, such as "by hand", where no measurement did; None where one did.
            is_held: whether a user holds the shares.
        """
        expected_s = decision.plan.predicted_step_s
        self._last_move = None if cause is not None else (num_steps, step_s, expected_s)
        if not any(map(any, move.changes.values())):
            self.info(num_steps, "shares change by less than a unit: nothing moves")
            return
        took = f"{size_text(move.total_bytes)}, {duration_text(move.seconds)}"
        if comparing_s >= _LEAST_COMPARING_S:
            took += f", then {duration_text(comparing_s)} to compare products"
        if cause is None:
            cause = self._why(move, decision)
            took += "" if math.isnan(step_s) else f"; a step took {duration_text(step_s)}"
            if not (math.isnan(expected_s) or expected_s > step_s):  # what rests on older times is no promise
                took += "; expected step " if math.isnan(step_s) else ", expected "
                took += duration_text(expected_s)
        held = "; these shares are held until move(None)" if is_held else ""
        self.info(num_steps, f"{cause}{': ' if cause else ''}{_what(move)}: {took}{held}")

    def measured(self, num_steps: int, step_s: float) -> None:
        """Tell, once after each move, what came of it: ``step_s`` is what a step has taken since."""
        if self._last_move is None or math.isnan(step_s):
            return
        (moved_at, before_s, expected_s), self._last_move = self._last_move, None
        if math.isnan(before_s):
            return
        saved = 1.0 - step_s / before_s
        change = "as long as before"
        if abs(saved) >= _NOTICEABLE:
            change = f"{100.0 * abs(saved):.0f} % {'shorter' if saved > 0.0 else 'longer'}"
        expected = f", {duration_text(expected_s)} were expected" if expected_s <= before_s else ""
        self.info(
            num_steps,
            f"since units moved at step {moved_at} a step takes {duration_text(step_s)}, {duration_text(before_s)} "
            f"before{expected}: steps are {change}",
        )

    def _why(self, move: Move, decision: GroupDecision) -> str:
        """The stragglers whose units change, or that there are none any more."""
        ranks, busy_s = decision.plan.ranks, decision.controller.busy_s
        if len(set(move.after)) == 1:
            return "even shares are faster now" if any(rank.is_straggler for rank in ranks) else _NOBODY_IS_SLOW
        slow = [rank for rank in _changing(move, lambda change: change != 0) if ranks[rank].is_straggler]
        if not slow or len(busy_s) != len(ranks):
            return ""
        since = self._slow_since.get(slow[0])
        duration = "" if since is None or len(slow) > 1 else f" for {duration_text(self._clock() - since)}"
        return _slowness(slow, busy_s) + duration

    def _tell_why_units_stay(self, num_steps: int, decision: GroupDecision) -> None:
        """After 8, 16, 32, … updates in which a rank was slow and nothing moved."""
        plan, busy_s, ownership = decision.plan, decision.controller.busy_s, decision.controller.ownership
        if plan.owned != self._owned:
            self._owned, self._num_staying, self._next_staying = plan.owned, 0, _FIRST
        slow = [rank for rank, of_rank in enumerate(plan.ranks) if of_rank.is_straggler and of_rank.owned >= 1.0]
        if not slow or ownership.is_held or len(busy_s) != len(plan.ranks):
            return
        self._num_staying += 1
        if self._num_staying >= self._next_staying:
            self._next_staying *= 2
            self.info(num_steps, f"{_slowness(slow, busy_s)}, and units stay where they are: {ownership.verdict}")

    def _tell_what_does_not_fit(self, num_steps: int, decision: GroupDecision, units: OwnedUnits) -> None:
        memory = decision.memory
        if memory is None or (why := memory.why_too_much(units.shares)) is None:
            return
        reason = "they move as soon as they can"
        if units.why_not_movable is not None:
            reason = f"no unit can change hands: {units.why_not_movable}"
        elif not decision.controller.config.may_move or decision.controller.ownership.is_held:
            reason = "no decision moves units now: give shares that fit"
        elif memory.why_too_much(memory.evenly_filled) is not None:
            reason = "the ranks' memory together does not suffice for more even a division"
        self.warn(num_steps, f"by memory_limits {why}, and units stay: {reason}", once="memory")

    def _tell_who_is_late(self, num_steps: int, decision: GroupDecision) -> None:
        """Ranks that come late to the model, as from a slow data loader: no division of its work helps."""
        outside_s, busy_s = decision.outside_s, decision.controller.busy_s
        if len(outside_s) < 2 or not busy_s:
            return
        least_s = min(outside_s)
        most_s = least_s + max(self._tolerance * max(busy_s), _LATE_S)
        late = {rank: seconds - least_s for rank, seconds in enumerate(outside_s) if seconds > most_s}
        self._num_late = self._num_late + 1 if late else 0
        if self._num_late >= _LATE_UPDATES:
            named = ", ".join(f"rank {rank} by {duration_text(seconds)}" for rank, seconds in late.items())
            self.warn(
                num_steps,
                f"ranks come late to the model in every step: {named}. All others wait for them, and nothing of that "
                "can be moved, lent or pruned: look at what they do between balancer.step() and the first balanced "
                "layer, such as fetching batches",
                once="late",
            )


_NOBODY_IS_SLOW = "no rank is slow any more"


def _why_relief_ended(before: WorkloadPlan, plan: WorkloadPlan, busy_s: Sequence[float]) -> str:
    """The end of a line where slow ranks lend or prune no longer, but for a move, whose own line says why."""
    pairs = list(zip(before.ranks, plan.ranks, strict=True))
    slow = [rank for rank, (then, now) in enumerate(pairs) if then.spared and not now.spared and now.is_straggler]
    if not slow or before.owned != plan.owned or len(busy_s) != len(pairs):
        return ""
    ways = ["lending"] * any(before.ranks[rank].lent for rank in slow)
    ways += ["pruning"] * any(before.ranks[rank].pruned for rank in slow)
    return f", though {_slowness(slow, busy_s)}: {' or '.join(ways)} does not pay now"


def _slowness(ranks: Collection[int], busy_s: Sequence[float]) -> str:
    by = {rank: f"{busy_s[rank] / min(busy_s):.1f} times" for rank in ranks}
    if len(by) <= _MOST_NAMED:
        return ", ".join(f"rank {rank} is {times} slower than the fastest" for rank, times in by.items())
    most = max(by, key=lambda rank: busy_s[rank])
    return f"{len(by)} ranks are slower than the fastest, rank {most} most, {by[most]}"


def _what(move: Move) -> str:
    """What moves to whom, as "43 % of rank 3's neurons and 25 % of its heads move to ranks 0, 1, 2"."""
    takers = named_ranks(_changing(move, lambda change: change > 0))
    if len(set(move.after)) == 1:
        return f"units come home to {takers}"
    givers = _changing(move, lambda change: change < 0)
    if len(givers) > _MOST_NAMED:
        return f"units of {len(givers)} ranks move to {takers}"
    given = []
    for rank in givers:
        of_rank = {kind: change[rank] for kind, change in move.changes.items() if change[rank] < 0}
        shares = {kind: -100.0 * change / move.owned_before[kind][rank] for kind, change in of_rank.items()}
        whose = (f"rank {rank}'s", *["its"] * (len(shares) - 1))
        parts = zip(shares.items(), whose, strict=True)
        given.append(" and ".join(f"{share:.0f} % of {owner} {kind}" for (kind, share), owner in parts))
    return f"{', '.join(given)} move to {takers}"


def _changing(move: Move, how: Callable[[float], bool]) -> list[int]:
    return [rank for rank in range(len(move.after)) if any(how(change[rank]) for change in move.changes.values())]
