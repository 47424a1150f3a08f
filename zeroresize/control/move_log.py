"""One line for an operator whenever units change hands: who is slow, what moves where, what it costs and brings."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from zeroresize.plan.group import WorkloadPlan
from zeroresize.resharding.units_in_force import Move


class MoveLog:
    """Keeps what a line must tell of the time before the move."""

    def __init__(self) -> None:
        self._slow_since: dict[int, float] = {}
        self._step_s = math.nan

    def planned(self, before: WorkloadPlan) -> None:
        """A decision is about to replace the plan ``before``."""
        now = time.monotonic()
        self._slow_since = {
            rank: self._slow_since.get(rank, now) for rank, own in enumerate(before.ranks) if own.is_straggler
        }
        self._step_s = before.predicted_step_s

    def line(self, move: Move, plan: WorkloadPlan, busy_s: Sequence[float]) -> str:
        """What the log tells of ``move``.

        Args:
            plan: by which it was made.
            busy_s: of every rank at its even share, seconds; empty where nothing was measured.
        """
        size = f"{move.total_bytes / 1e6:.3g} MB, {move.seconds:.2g} s"
        expected_s, before_s = plan.predicted_step_s, self._step_s
        if math.isnan(before_s) and len(set(move.before)) == 1:  # before the first decision all was even
            before_s = max(busy_s, default=math.nan)
        if not math.isnan(expected_s) and not math.isnan(before_s):
            size += f"; expected step {1e3 * before_s:.0f} → {1e3 * expected_s:.0f} ms"
        return f"{self._why(plan, busy_s)}{self._what(move)}: {size}"

    def _why(self, plan: WorkloadPlan, busy_s: Sequence[float]) -> str:
        now, fastest_s = time.monotonic(), min(busy_s, default=math.nan)
        told = [
            f"rank {rank} is {busy_s[rank] / fastest_s:.2g} times slower"
            + (f" for {now - self._slow_since[rank]:.2g} s" if rank in self._slow_since else "")
            for rank, own in enumerate(plan.ranks)
            if own.is_straggler and len(busy_s) == len(plan.ranks)
        ]
        return f"{', '.join(told)}: " if told else ""

    def _what(self, move: Move) -> str:
        if len(set(move.after)) == 1:
            return "units come home"
        givers = [rank for rank in range(len(move.after)) if any(own[rank] < 0 for own in move.changes.values())]
        told = []
        for rank in givers:
            parts = [
                _part(-own[rank], move.owned_before[kind][rank], kind)
                for kind, own in move.changes.items()
                if own[rank] < 0
            ]
            told.append(f"{' and '.join(parts)} of rank {rank}")
        takers = [rank for rank in range(len(move.after)) if any(own[rank] > 0 for own in move.changes.values())]
        return f"{', '.join(told)} move to rank{'s' if takers[1:] else ''} {', '.join(map(str, takers))}"


def _part(number: int, of_number: int, kind: str) -> str:
    if of_number <= 64:
        return f"{number} of {of_number} {kind}"
    return f"{100.0 * number / of_number:.0f} % of the {kind}"
