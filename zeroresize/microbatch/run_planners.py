"""The planners of a run on all hosts, and where its ranks get the plans: one thing that can plan otherwise from now on.

``H`` hosts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed import ProcessGroup

from zeroresize.microbatch.iteration_planner import IterationPlanner
from zeroresize.microbatch.plan_source import PlanSource
from zeroresize.microbatch.planners import Planners
from zeroresize.microbatch.shared_store import SharedStore
from zeroresize.policy.microbatches.iteration_plan import IterationPlan
from zeroresize.resharding.agreement import meet_over, meet_prepared


class RunPlanners:
    """Plans the iterations of a run on the first rank of each host, for all ranks.

    Its constructor, :meth:`plan` and :meth:`restart` are collective.

    Args:
        planner: of iterations.
        store: which all ranks share.
        process_group: the ranks that carry out the plans.
        device: of the model, where the group cannot send numbers from the CPU.
        first, last: the iterations that are planned; None for no last one, and for ``last < first`` none are.
        num_workers, ahead: of each host, as of :class:`~zeroresize.microbatch.planners.Planners`.
        timeout_s: as of :class:`~zeroresize.microbatch.plan_source.PlanSource`.

    Attributes:
        planner: the one in force.

    Raises:
        ValueError: as ``Planners`` and ``PlanSource``; the other ranks may raise a RuntimeError then.
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
        self.planner = planner
        self._store, self._last, self._num_workers, self._ahead = store, last, num_workers, ahead
        self._meet = meet_over(process_group, device)
        self._source = PlanSource(store.store, process_group, device, model=planner.fingerprint, timeout_s=timeout_s)
        self._planners: Planners | None = None
        self._together(lambda: self._start(first))

    def plan(self, iteration: int, batch: str) -> IterationPlan:
        """Return the plan of an iteration, as :meth:`PlanSource.plan <zeroresize.microbatch.plan_source.PlanSource>`.

        Raises:
            Exception: as that.
        """
        return self._source.plan(iteration, batch)

    def is_over(self, iteration: int) -> bool:
        """Whether no iteration from this one on is planned."""
        return self._last is not None and self._last < iteration

    def restart(self, planner: IterationPlanner, first: int) -> None:
        """Plan otherwise from an iteration on; what was planned of it and of later ones is dropped; collective.

        Raises:
            RuntimeError: if planners cannot be started on a host, the store cannot be reached, or a rank does not come;
                on all ranks that live.
        """
        self._together(self._stop)
        self._together(lambda: self._renew(first))  # nobody leaves plans any more
        self.planner, self._source.model = planner, planner.fingerprint
        self._together(lambda: self._go_on(first))

    def seconds(self) -> dict[int, float]:
        """Return how long each iteration took to plan, of the last ones that this host has planned."""
        return {} if self._planners is None else self._planners.seconds()

    def close(self) -> None:
        """End the planners of this host."""
        if self._planners is not None:
            self._planners.close()

    def _together(self, action: Callable[[], None]) -> None:
        """All ranks hear of what fails on one."""
        prepared: tuple[float, float] | Exception = 0.0, 0.0
        try:
            action()
        except Exception as error:
            prepared = error
        meet_prepared(self._meet, prepared, "the planners of a run")

    def _stop(self) -> None:
        if self._planners is not None:
            self._planners.stop()

    def _renew(self, first: int) -> None:
        if self._store.is_first_of_host and self._store.host == 0:
            self._store.store.renew(first)

    def _go_on(self, first: int) -> None:
        if self._planners is not None and not self.is_over(first):
            self._planners.go_on(self.planner, first)

    def _start(self, first: int) -> None:
        if not self._store.is_first_of_host or self.is_over(first):
            return
        self._planners = Planners(
            self.planner,
            self._store.store,
            first=first,
            last=self._last,
            num_workers=self._num_workers,
            ahead=self._ahead,
            host=self._store.host,
            num_hosts=self._store.num_hosts,
        )
