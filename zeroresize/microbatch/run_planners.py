"""The planners of a run on all hosts, and where its ranks get the plans."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from zeroresize.comm.collectives import group_rank, require_group, time_limit
from zeroresize.microbatch.iteration_planner import IterationPlanner
from zeroresize.microbatch.planners import MOST_FAILURES, Planners
from zeroresize.microbatch.shared_store import SharedStore
from zeroresize.policy.microbatches.iteration_plan import IterationPlan
from zeroresize.resharding.agreement import agreed, meet_over, require_same
from zeroresize.utils.hashing import fingerprint
from zeroresize.utils.value_checks import number

#: Of the group's time limit, what waiting for a plan may take: ranks that have theirs wait for the others meanwhile.
_SHARE_OF_LIMIT = 0.5


class RunPlanners:
    """Plans the iterations of a run on the first rank of each host, for all ranks, which fetch them once an iteration.

    Its constructor, :meth:`plan` and :meth:`restart` are collective.

    Args:
        planner: of iterations.
        store: which all ranks share.
        process_group: the ranks that carry out the plans.
        device: of the model, where the group cannot send numbers from the CPU.
        first, last: the iterations that are planned; None for no last one, and for ``last < first`` none are.
        num_workers, ahead: of each host, as of :class:`~zeroresize.microbatch.planners.Planners`.
        timeout_s: seconds to wait for a plan at most; None for half of the group's time limit. A process that plans one
            iteration for more than a quarter of it is replaced.

    Attributes:
        planner: the one in force.

    Raises:
        ValueError: as ``Planners``, for a group that this rank is not in, and for seconds that are none; the other
            ranks may raise a RuntimeError then.
    """

    def __init__(
        self,
        planner: IterationPlanner,
        store: SharedStore,
        process_group: ProcessGroup,
        device: torch.device,
        *,
        first: int = 0,
        last: int | None = None,
        num_workers: int = 1,
        ahead: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        process_group = require_group(process_group)
        if timeout_s is not None:
            number("timeout_s", timeout_s, above=0.0)
        self.planner, self._model = planner, planner.fingerprint
        self._store, self._last, self._progress, self._series = store, last, first, store.new_series()
        self._is_first = group_rank(process_group) == 0
        self._timeout_s = timeout_s or _SHARE_OF_LIMIT * time_limit(process_group).total_seconds()
        self._meet = meet_over(process_group, device)
        self._planners: Planners | None = None

        def start() -> None:
            if store.is_first_of_host and not self.is_over(first):
                self._planners = Planners(
                    planner,
                    store,
                    series=self._series,
                    first=first,
                    last=last,
                    num_workers=num_workers,
                    ahead=ahead,
                    deadline_s=self._timeout_s / (MOST_FAILURES + 1),
                )
                weakref.finalize(self, self._planners.close)

        self._together(start)

    def plan(self, iteration: int, batch: str) -> IterationPlan:
        """Return the plan of an iteration, the same on all ranks, before anything of it runs; collective.

        It costs one exchange of a few numbers. The plans of iterations before are dropped, so iterations rise.

        Args:
            batch: the fingerprint of the lengths of this iteration's samples, as this rank has them.

        Raises:
            ValueError: for a plan of another model, of other samples or of another iteration, an iteration that is over
                or comes after the last, and what the planner raised, if it was one. The other ranks raise a
                RuntimeError then, if they have no such error themselves.
            RuntimeError: if there is no plan, the store cannot be reached, another rank has failed, ranks have
                different plans, or a rank does not come.
        """

        def planned() -> tuple[str, IterationPlan]:
            self._advance(iteration)
            text = self._store.get(self._series, iteration, self._timeout_s, self._doing, warns=self._is_first)
            return text, self._checked(text, iteration, batch)

        what = f"the plan of iteration {iteration}"
        (_, plan), table = agreed(self._meet, planned, lambda made: (fingerprint(made[0]), 0.0), what)
        require_same([row[0] for row in table], what, self._meet)
        return plan

    def is_over(self, iteration: int) -> bool:
        """Whether no iteration from this one on is planned."""
        return self._last is not None and self._last < iteration

    def restart(self, planner: IterationPlanner, first: int) -> None:
        """Plan otherwise from an iteration on; what was planned of it and of later ones is dropped; collective.

        Raises:
            ValueError: for a planner that cannot be pickled.
            RuntimeError: if that is so on another rank, or one does not come; on all ranks that live.
        """
        planners, series = self._planners, self._store.new_series()
        self._together(lambda: None if planners is None else planners.restart(planner, series, first))
        self.planner, self._model = planner, planner.fingerprint
        self._progress, self._series = first, series

    def seconds(self) -> dict[int, float]:
        """Return how long each iteration took to plan, of the last ones that this host has planned."""
        return {} if self._planners is None else self._planners.seconds()

    def close(self) -> None:
        """End the planners of this host; whoever waits for a plan of theirs gets an error."""
        if self._planners is not None:
            self._planners.close()

    def _together(self, action: Callable[[], None]) -> None:
        """All ranks hear of what fails on one."""
        agreed(self._meet, action, what="the planners of a run")

    def _advance(self, iteration: int) -> None:
        if self.is_over(iteration):
            raise ValueError(f"the plan of iteration {iteration} is wanted, but planners plan up to {self._last}")
        if iteration < self._progress:
            raise ValueError(
                f"the plan of iteration {iteration} is wanted, but plans before iteration {self._progress} were "
                "dropped; where training is resumed, make new planners"
            )
        self._progress = iteration
        if self._planners is not None:
            self._planners.advance(iteration)

    def _doing(self) -> str:
        return "this rank has no planners" if self._planners is None else self._planners.doing()

    def _checked(self, text: str, iteration: int, batch: str) -> IterationPlan:
        """The plan that a text describes, if it is the wanted one."""
        plan = IterationPlan.from_json(text)
        if plan.iteration != iteration:
            raise ValueError(f"the plan of iteration {iteration} is wanted, and this is one of {plan.iteration}")
        if plan.model != self._model:
            raise ValueError(
                f"the plan of iteration {iteration} was made for another model, with other costs, or with other "
                f"options: its fingerprint is {plan.model}, that of this rank {self._model}; planners and executors "
                "need the same"
            )
        if plan.batch != batch:
            raise ValueError(
                f"the plan of iteration {iteration} was made for other samples: the fingerprint of their lengths is "
                f"{plan.batch}, that of this rank's {batch}; planners and executors have to read the same data, in the "
                "same order"
            )
        return plan
