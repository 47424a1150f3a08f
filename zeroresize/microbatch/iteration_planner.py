"""What planner processes call: the lengths of an iteration's samples in, the text of its plan out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zeroresize.microbatch.cost_table import CostTable
from zeroresize.policy.microbatches.micro_batch import Indices
from zeroresize.policy.microbatches.planning import plan_iteration
from zeroresize.policy.microbatches.planning_options import PlanningOptions
from zeroresize.utils.hashing import digest


@dataclass(frozen=True)
class IterationPlanner:
    """Plans iterations; it can be pickled, and given to :class:`~zeroresize.microbatch.planners.Planners`.

    Attributes:
        lengths_of: returns [N, A] tokens of the samples of an iteration, in their order; a function of a module, or an
            object that can be pickled.
        table: costs of the model's layers.
        boundaries: [S + 1] of the pipeline's stages.
        options: of planning.
    """

    lengths_of: Callable[[int], Indices]
    table: CostTable
    boundaries: tuple[int, ...]
    options: PlanningOptions

    @property
    def fingerprint(self) -> str:
        """Return what plans of this planner carry: costs, stages and options."""
        return digest(self.table.fingerprint, repr((self.boundaries, self.options))).hex()

    def __call__(self, iteration: int) -> str:
        """Return the plan of an iteration as text.

        Raises:
            ValueError: as :func:`~zeroresize.policy.microbatches.planning.plan_iteration`.
        """
        costs = self.table.costs(self.boundaries)
        plan = plan_iteration(iteration, self.lengths_of(iteration), costs, self.options, model=self.fingerprint)
        return plan.to_json()
