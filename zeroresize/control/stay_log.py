"""Lines for an operator while a rank stays slow: why it is not relieved any more, and why its units stay."""

from __future__ import annotations

from collections.abc import Sequence

from zeroresize.plan.group import WorkloadPlan
from zeroresize.plan.ownership import normalised
from zeroresize.policy.tensor.ownership_decision import OwnershipDecision
from zeroresize.utils.texts import seconds_text

#: After so many updates with a slow rank whose units stay it is said why, and then after twice as many each time.
_FIRST = 8


def why_relief_ended(before: WorkloadPlan, plan: WorkloadPlan, busy_s: Sequence[float]) -> str:
    """Describe the slow ranks that lend or prune no longer, as the end of a line; empty where there are none.

    Where units have moved with the same decision the line of the move says why.

    Args:
        before, plan: what was in force, and what is decided.
        busy_s: of every rank at its even share, seconds.
    """
    pairs = list(zip(before.ranks, plan.ranks, strict=True))
    slow = [rank for rank, (then, now) in enumerate(pairs) if then.spared and not now.spared and now.is_straggler]
    if not slow or before.owned != plan.owned or len(busy_s) != len(pairs):
        return ""
    ways = ["lending"] * any(before.ranks[rank].lent for rank in slow)
    ways += ["pruning"] * any(before.ranks[rank].pruned for rank in slow)
    return f", though {_slowness(slow, busy_s)}: {' or '.join(ways)} does not pay now"


class StayLog:
    """Says more and more rarely why the units of a slow rank stay where they are."""

    def __init__(self) -> None:
        self._owned: tuple[float, ...] = ()
        self._num_updates, self._next = 0, _FIRST

    def line(self, plan: WorkloadPlan, busy_s: Sequence[float], ownership: OwnershipDecision) -> str | None:
        """Describe why units stay, after 8, 16, 32, … updates in which a rank was slow and nothing moved.

        Args:
            plan: what is decided.
            busy_s: of every rank at its even share, seconds.
            ownership: the decision who owns what, of units that may move.
        """
        if plan.owned != self._owned:
            self._owned, self._num_updates, self._next = plan.owned, 0, _FIRST
        slow = [rank for rank, of_rank in enumerate(plan.ranks) if of_rank.is_straggler and of_rank.owned >= 1.0]
        if not slow or ownership.is_held or len(busy_s) != len(plan.ranks):
            return None
        self._num_updates += 1
        if self._num_updates < self._next:
            return None
        self._next *= 2
        return f"{_slowness(slow, busy_s)}, and units stay where they are: {_why(busy_s, ownership)}"


def _why(busy_s: Sequence[float], ownership: OwnershipDecision) -> str:
    if ownership.rental.pause:
        return f"the last move could not be made, and it is tried again after {ownership.rental.pause} updates"
    owed_s = sum(ownership.rental.owed_s.values())
    if not owed_s:
        return "no other division of them would surely make steps shorter"
    # The division that is wanted is not known here; this one is near to it.
    price_s = ownership.price_s(normalised([1.0 / own for own in busy_s]))
    price, owed = seconds_text(price_s), seconds_text(owed_s)
    costs = f"a move there and back would cost about {price}, and staying has cost {owed} so far"
    if owed_s < price_s:
        return costs
    return f"{costs}; more is asked for where slowness was soon over before, or moves have not saved what they cost"


def _slowness(ranks: Sequence[int], busy_s: Sequence[float]) -> str:
    most = max(ranks, key=lambda rank: busy_s[rank])
    times = f"{busy_s[most] / min(busy_s):.1f} times"
    if len(ranks) == 1:
        return f"rank {most} is still {times} slower than the fastest"
    return f"{len(ranks)} ranks are still slower than the fastest, rank {most} most, {times}"
