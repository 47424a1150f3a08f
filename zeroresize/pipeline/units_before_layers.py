"""The tensor-parallel group of a stage evens out its ranks by itself before layers move.

Whoever balances such a group is above this package, so it comes in as :class:`StageUnits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zeroresize.comm.exchange import Meet
from zeroresize.resharding.agreement import CannotMoveError, NotEnoughMemoryError, meet_prepared


class StageUnits(Protocol):
    """Balances the tensor-parallel group of this rank's stage, by units of the layers that the stage has.

    :class:`zeroresize.StageBalancer` implements it. Its methods but :meth:`watch` are collective over the group; its
    properties are the same on all ranks of the group.
    """

    @property
    def num_ranks(self) -> int:
        """Return how many ranks the group has."""

    @property
    def has_settled(self) -> bool:
        """Return whether what happened before the last :meth:`watch` leads to no more changes within the group."""

    def watch(self) -> None:
        """Settle anew, as something may have changed."""

    def leave(self, boundaries: Sequence[int]) -> None:
        """Bring all units home and let go of the layers, if this stage has others within these boundaries.

        Raises:
            RuntimeError: if the units cannot come home; nothing has been let go of then.
        """

    def attach(self) -> None:
        """Balance the layers that the stage has now."""


class UnitsFirst:
    """Lets the groups of all stages settle before layers move; collective over all ranks that ``meet``."""

    def __init__(self, units: StageUnits) -> None:
        self._units = units

    def ask_whether_settled(self, meet: Meet) -> bool:
        """Return whether the groups of all stages have settled; collective."""
        return not any(unsettled for unsettled, *_ in meet(0.0 if self._units.has_settled else 1.0, 0.0))

    def watch(self) -> None:
        """Let this stage's group settle anew."""
        self._units.watch()

    def leave(self, boundaries: Sequence[int], meet: Meet) -> None:
        """Let the groups whose stages get other layers let go of them.

        Raises:
            CannotMoveError, NotEnoughMemoryError: on every rank, if the units of some cannot come home; all groups
                balance as before then.
            RuntimeError: if a rank does not come.
            Exception: what else letting go raises on this rank; the others then raise a CannotMoveError.
        """
        left: tuple[float, float] | Exception = (0.0, 0.0)
        try:
            self._units.leave(boundaries)
        except Exception as error:  # the others must hear of any
            left = error
        try:
            meet_prepared(meet, left)
        except (CannotMoveError, NotEnoughMemoryError):
            if isinstance(left, Exception) and not isinstance(left, CannotMoveError | NotEnoughMemoryError):
                raise left from None
            self._units.attach()
            raise

    def attach(self) -> None:
        """Let this stage's group balance the layers that the stage has now."""
        self._units.attach()
