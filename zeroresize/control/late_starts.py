"""Ranks that come late to the model, as from a slow data loader: no division of its work helps, so it is said."""

from __future__ import annotations

from collections.abc import Sequence

#: So many updates in a row a rank must be late.
_UPDATES = 2
#: By less nobody is late: starting to compute varies by as much.
_LEAST_S = 0.005


class LateStarts:
    """Watches what lies outside of the balanced layers, update after update.

    Args:
        tolerance: the share of a step by which a rank may be later than the first one.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance, self._num_updates, self._has_warned = tolerance, 0, False

    def warning(self, outside_s: Sequence[float], busy_s: Sequence[float]) -> str | None:
        """Return the text of a warning, once, when ranks have been late for some updates; alike on all ranks.

        Args:
            outside_s: of every rank, seconds of a step before its first balanced layer; empty where none are known.
            busy_s: of every rank, seconds of a step.
        """
        if self._has_warned or len(outside_s) < 2 or not busy_s:
            return None
        least_s = min(outside_s)
        most_s = least_s + max(self._tolerance * max(busy_s), _LEAST_S)
        late = {rank: seconds - least_s for rank, seconds in enumerate(outside_s) if seconds > most_s}
        self._num_updates = self._num_updates + 1 if late else 0
        if self._num_updates < _UPDATES:
            return None
        self._has_warned = True
        named = ", ".join(f"rank {rank} by {1e3 * seconds:.0f} ms" for rank, seconds in late.items())
        return (
            f"ranks come late to the model in every step: {named}. All others wait for them, and nothing of that can "
            "be moved, lent or pruned: look at what they do between balancer.step() and the first balanced layer, such "
            "as fetching batches"
        )
