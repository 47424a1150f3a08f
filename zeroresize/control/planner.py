"""What a balancer needs of whoever decides: one plan for the group, from update to update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from zeroresize.plan.group import WorkloadPlan
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.cost_model import MigrationCost, ResizingCost
from zeroresize.policy.tensor.times import RankTimes
from zeroresize.utils.state_checks import Check


class Planner(Protocol):
    """Decides for the group; each rank has one, and all of them decide alike.

    Attributes:
        migration: what the calibration says that migrating costs, the same on every rank; None where nobody lends, or
            before it is known. The balancer fills it.
    """

    migration: MigrationCost | None

    @property
    def plan(self) -> WorkloadPlan:
        """What is decided; it changes in :meth:`update` and :meth:`load_state_dict` only."""

    @property
    def calibration_plan(self) -> WorkloadPlan | None:
        """The plan of the next step if that is a calibration step, which spares nobody, to be measured; else None."""

    @property
    def num_calibration_steps(self) -> int:
        """How many of the next steps are calibration steps."""

    @property
    def what_if_plans(self) -> Mapping[str, WorkloadPlan]:
        """What other modes would decide, by mode; empty where nobody asks."""

    @property
    def busy_s(self) -> Sequence[float]:
        """Of every rank, seconds of a step at full work as far as is known; empty before all were measured."""

    @property
    def outside_s(self) -> Sequence[float]:
        """Of every rank, seconds of a step before its first balanced layer; empty before all were measured."""

    def update(self, times: RankTimes | None, cost: ResizingCost, wait_s: float, agreed: object) -> None:
        """An interval of training is over: take this rank's numbers, and decide.

        Args:
            times: this rank's full-work times, None before any were measured.
            cost: of pruning on this rank.
            wait_s: seconds a step that it waited in collectives under the plan in force, NaN where none was measured.
            agreed: whatever every rank must have decided alike, with a ``repr`` that tells it.

        Raises:
            RuntimeError: if the ranks of the group do not agree on their plans, or on ``agreed``.
        """

    def expect_moves(self, cost: MoveCost, bytes_of_units: float, comparing_s: float = 0.0) -> None:
        """What a move costs by the calibration, the bytes of all units of a rank, and the seconds for which ranks
        compare products after a move away from home; alike on all ranks."""

    def moved(self, num_bytes: float, seconds: float, comparing_s: float) -> None:
        """Units have changed hands as planned: what the rank that sent or received most did, how long it took, and for
        how long ranks compared products then."""

    def refuse_move(self, in_force: Sequence[float]) -> None:
        """Nothing has changed hands: these shares stay in force, and another move is not planned for a while."""

    def hold_owned(self, shares: Sequence[float] | None) -> None:
        """Own by these shares whatever is measured; None to decide again."""

    def next_step(self) -> None:
        """A step is over that ends no interval."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on every rank."""

    @property
    def state_check(self) -> Check:
        """Of what :meth:`load_state_dict` can take over."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""

    def require_agreement(self, agreed: object) -> None:
        """Compare now what the ranks of the group would decide from; collective.

        Raises:
            ValueError: on every rank, if they differ.
            RuntimeError: if not all ranks come.
        """

    def require_loadable(self, problem: Exception | None) -> None:
        """Check that every rank of the group has a state that it can load; collective.

        Args:
            problem: of this rank with its own; it is this rank's to raise.

        Raises:
            ValueError: on a rank without a problem, if others have one.
            RuntimeError: if not all ranks come.
        """

    def close(self) -> None:
        """Nothing is decided any more."""
