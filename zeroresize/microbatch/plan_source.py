"""Where executors get the plans of their iterations: every rank fetches its own, and all go on with it or none."""

from __future__ import annotations

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, require_group, time_limit
from zeroresize.microbatch.store import InstructionStore
from zeroresize.policy.microbatches.iteration_plan import IterationPlan
from zeroresize.resharding.agreement import meet_over, meet_prepared, require_same
from zeroresize.utils.fingerprint import fingerprint
from zeroresize.utils.value_checks import number

#: Of the group's time limit, what waiting for a plan may take: ranks that have theirs wait for the others meanwhile.
_SHARE_OF_LIMIT = 0.5


class PlanSource:
    """Fetches plans from an instruction store on each rank of a group, once an iteration (DynaPipe, section 3).

    Args:
        store: in which planners leave the plans; a connection of this rank's own.
        process_group: the ranks that carry out the plans together.
        device: of the model, where the group cannot send numbers from the CPU.
        model: the fingerprint that plans for this model, its costs and its options have.
        timeout_s: seconds to wait for a plan at most; None for half of the group's time limit.

    Attributes:
        model: that fingerprint; set it where others are planned for from the next iteration on.

    Raises:
        ValueError: for a group that this rank is not in, or seconds that are none.
    """

    def __init__(
        self,
        store: InstructionStore,
        process_group: ProcessGroup,
        device: torch.device,
        *,
        model: str,
        timeout_s: float | None = None,
    ) -> None:
        process_group = require_group(process_group)
        if timeout_s is not None:
            number("timeout_s", timeout_s, above=0.0)
        self._store, self.model = store, model
        self._is_first = group_rank(process_group) == 0
        self._timeout_s = timeout_s or _SHARE_OF_LIMIT * time_limit(process_group).total_seconds()
        self._meet = meet_over(process_group, device)

    def plan(self, iteration: int, batch: str) -> IterationPlan:
        """Return the plan of an iteration, the same on all ranks, before anything of it runs; collective.

        It costs one exchange of a few numbers. The plans of iterations before are dropped, so iterations rise.

        Args:
            batch: the fingerprint of the lengths of this iteration's samples, as this rank has them.

        Raises:
            ValueError: for a plan of another model, of other samples or of another iteration, and what the planner
                raised, if it was one. The other ranks raise a RuntimeError then, if they have no such error themselves.
            RuntimeError: if there is no plan, the store cannot be reached, another rank has failed, ranks have
                different plans, or a rank does not come.
        """
        try:
            if self._is_first:
                self._store.forget(iteration)
            text = self._store.get(iteration, self._timeout_s, warns=self._is_first)
            plan = self._checked(text, iteration, batch)
            prepared: tuple[float, float] | Exception = fingerprint(text), 0.0
        except Exception as error:  # the others must hear of any
            prepared = error
        what = f"the plan of iteration {iteration}"
        table = meet_prepared(self._meet, prepared, what)
        require_same([row[0] for row in table], what, self._meet)
        return plan

    def _checked(self, text: str, iteration: int, batch: str) -> IterationPlan:
        """The plan that a text describes, if it is the wanted one."""
        plan = IterationPlan.from_json(text)
        if plan.iteration != iteration:
            raise ValueError(f"the plan of iteration {iteration} is wanted, and this is one of {plan.iteration}")
        if plan.model != self.model:
            raise ValueError(
                f"the plan of iteration {iteration} was made for another model, with other costs, or with other "
                f"options: its fingerprint is {plan.model}, that of this rank {self.model}; planners and executors "
                "need the same"
            )
        if plan.batch != batch:
            raise ValueError(
                f"the plan of iteration {iteration} was made for other samples: the fingerprint of their lengths is "
                f"{plan.batch}, that of this rank's {batch}; planners and executors have to read the same data, in the "
                "same order"
            )
        return plan
