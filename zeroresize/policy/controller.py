"""From the table of all ranks' numbers to a plan, update after update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroresize.config import MIGRATING_MODES, BalanceConfig
from zeroresize.plan import Loan, RankPlan, WorkloadPlan
from zeroresize.policy.ratio import RankTimes, find_stragglers, pruning_ratios, reference_time
from zeroresize.policy.sharing import (
    balanced_shares,
    borrowed_shares,
    lending_ratios,
    loans_of,
    paper_lending_ratios,
)
from zeroresize.policy.smoothing import LARGE_CHANGE, smoothed, steadied

#: How far below the fastest rank's time a straggler aims, as a share; with target "mean" (the paper's) not at all.
HEADROOM = 0.05
#: Share of the training time that steps at full work, made to be measured, may add while somebody prunes.
FULL_WORK_BUDGET = 0.01
#: So many usual steps' time they may take ahead of that budget, where a ratio is new.
FULL_WORK_CREDIT = 20
#: An interval that begins at full work has some steps under pruning to compare it with (on a device, read one late).
_FEWEST_STEPS = 4


@dataclass
class _RankState:
    rest_s: float = math.nan
    gemm_s: float = math.nan
    overhead_scale: float = math.nan
    is_straggler: bool = False
    ratio: float = 0.0
    wanted: float = 0.0

    def take(self, sample: RankTimes, weight: float) -> None:
        """Take a sample into the averages."""
        for name in ("rest_s", "gemm_s", "overhead_scale"):
            setattr(self, name, smoothed(getattr(self, name), getattr(sample, name), weight))

    def want(self, ratio: float, dead_band: float) -> None:
        """Move to what is wanted, or towards it, as far as noise allows."""
        self.ratio, self.wanted = steadied(self.ratio, ratio, self.wanted, dead_band), ratio


@dataclass
class Controller:
    """Keeps the smoothed times of a group and decides its plans; equal inputs give equal plans on every rank.

    Attributes:
        config: how to balance.
        num_ranks: size of the group.
    """

    config: BalanceConfig
    num_ranks: int
    _ranks: list[_RankState] = field(init=False)
    _num_updates: int = field(default=0, init=False)
    _saved_for_full_work_s: float = field(default=0.0, init=False)
    _loans: tuple[Loan, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self.config.validate_group_size(self.num_ranks)
        self._ranks = [_RankState() for _ in range(self.num_ranks)]

    def initial_plan(self) -> WorkloadPlan:
        """The plan in force from the first iteration: a ratio forced on named ranks, else full work."""
        for rank, state in enumerate(self._ranks):
            state.ratio = self._forced_from_start(rank)
        self._lend(None)
        return self.current_plan()

    def update(self, samples: Sequence[RankTimes]) -> WorkloadPlan:
        """Take one sample of full-work times a rank (NaN where nothing was measured) and decide."""
        if len(samples) != self.num_ranks:
            raise ValueError(f"expected {self.num_ranks} ranks' times, found {len(samples)}")
        self._num_updates += 1
        for state, sample in zip(self._ranks, samples, strict=True):
            state.take(sample, self.config.ewma)
        if any(math.isnan(state.rest_s + state.gemm_s) for state in self._ranks):
            return self.current_plan()

        times = [
            RankTimes(state.rest_s, state.gemm_s, state.overhead_scale, sample.cost)
            for state, sample in zip(self._ranks, samples, strict=True)
        ]
        busy_s = [rank.busy_s for rank in times]
        reference_s = reference_time(busy_s, self.config.target)
        are_stragglers = find_stragglers(
            busy_s, reference_s, self.config.tolerance, [state.is_straggler for state in self._ranks]
        )
        wanted = self._wanted_ratios(times, are_stragglers, reference_s)
        ratios_before = [state.ratio for state in self._ranks]
        for state, is_straggler, ratio in zip(self._ranks, are_stragglers, wanted, strict=True):
            state.is_straggler = is_straggler
            state.want(ratio, self.config.dead_band)
        if [state.ratio for state in self._ranks] != ratios_before:
            self._lend(times)
        step_s = self._predicted_step_s(times)
        return self._plan(step_s, self._begins_at_full_work(times, step_s, ratios_before))

    def current_plan(self) -> WorkloadPlan:
        """The plan of the last update, or of a loaded state."""
        return self._plan(math.nan, begins_at_full_work=False)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the same on every rank."""
        return {
            "num_updates": self._num_updates,
            "saved_for_full_work_s": self._saved_for_full_work_s,
            "ranks": [vars(state).copy() for state in self._ranks],
            "loans": [(loan.owner, loan.ratio, list(loan.receivers), list(loan.parts)) for loan in self._loans],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; ratios are not taken over by a mode that does not prune.

        Raises:
            ValueError: if it was saved in a group of another size.
        """
        if len(state["ranks"]) != self.num_ranks:
            raise ValueError(
                f"the balancer's state is of {len(state['ranks'])} ranks, this process group has {self.num_ranks}"
            )
        self._num_updates = state["num_updates"]
        self._saved_for_full_work_s = state["saved_for_full_work_s"]
        self._ranks = [_RankState(**values) for values in state["ranks"]]
        self._loans = tuple(Loan(owner, ratio, tuple(to), tuple(parts)) for owner, ratio, to, parts in state["loans"])
        if self.config.mode == "off" or self._lends != bool(self._loans):  # it was another kind of balancing
            self._loans = ()
            for rank in self._ranks:
                rank.ratio = rank.wanted = 0.0

    def _forced_from_start(self, rank: int) -> float:
        forced, ranks = self.config.forced_ratio, self.config.ranks
        if forced is None or self.config.mode == "off" or ranks == "stragglers":
            return 0.0
        return forced if ranks == "all" or rank in ranks else 0.0

    def _wanted_ratios(
        self, times: Sequence[RankTimes], are_stragglers: Sequence[bool], reference_s: float
    ) -> list[float]:
        if self.config.mode == "off":
            return [0.0] * self.num_ranks
        forced = self.config.forced_ratio
        if forced is None and self._lends:
            if self.config.mig_rule == "paper":
                ratios = paper_lending_ratios(times, are_stragglers, reference_s)
            else:
                ratios = lending_ratios(times, are_stragglers)
            return [min(ratio, self.config.max_ratio) for ratio in ratios]
        if forced is None:
            headroom = HEADROOM if self.config.target == "min" else 0.0
            return pruning_ratios(times, are_stragglers, reference_s, headroom)
        if self.config.ranks == "stragglers":
            return [forced if is_straggler else 0.0 for is_straggler in are_stragglers]
        return [self._forced_from_start(rank) for rank in range(self.num_ranks)]

    def _begins_at_full_work(self, times: Sequence[RankTimes], step_s: float, ratios_before: Sequence[float]) -> bool:
        """Whether to make one step at full work, since only there is seen what pruning hides.

        From time to time, as the budget allows; on credit where a ratio is new, or the next decision would take an
        error of what it costs for a change of speed. An interval of few steps has no room for it.
        """
        is_resized = any(state.ratio > 0.0 for state in self._ranks)
        if self.config.forced_ratio is not None or self.config.update_every < _FEWEST_STEPS or not is_resized:
            return False
        self._saved_for_full_work_s += FULL_WORK_BUDGET * self.config.update_every * step_s
        price_s = max(rank.busy_s for rank in times) - step_s
        is_new = any(
            state.ratio > 0.0 and abs(state.ratio - before) >= LARGE_CHANGE
            for before, state in zip(ratios_before, self._ranks, strict=True)
        )
        credit_s = FULL_WORK_CREDIT * step_s if is_new else 0.0
        if self._saved_for_full_work_s + credit_s < price_s:
            return False
        self._saved_for_full_work_s -= price_s
        return True

    def _plan(self, predicted_step_s: float, begins_at_full_work: bool) -> WorkloadPlan:
        return WorkloadPlan(
            update=self._num_updates,
            ranks=tuple(
                RankPlan(0.0, state.is_straggler, lent=state.ratio)
                if self._lends
                else RankPlan(state.ratio, state.is_straggler)
                for state in self._ranks
            ),
            predicted_step_s=predicted_step_s,
            begins_at_full_work=begins_at_full_work,
            loans=self._loans,
        )

    @property
    def _lends(self) -> bool:
        return self.config.mode in MIGRATING_MODES

    def _lend(self, times: Sequence[RankTimes] | None) -> None:
        """Divide what is lent among the ranks that lend nothing: evenly where a ratio is forced or by the paper."""
        if not self._lends:
            return
        is_even = times is None or self.config.forced_ratio is not None or self.config.mig_rule == "paper"
        room = None if is_even or times is None else [share - 1.0 for share in balanced_shares(times)]
        self._loans = loans_of([state.ratio for state in self._ranks], room)

    def _predicted_step_s(self, times: Sequence[RankTimes]) -> float:
        borrowed = borrowed_shares(self._loans, self.num_ranks)
        return max(
            rank.busy_at(state.ratio) + share * rank.gemm_s
            for rank, state, share in zip(times, self._ranks, borrowed, strict=True)
        )
