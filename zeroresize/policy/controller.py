"""From the table of all ranks' numbers to a plan, update after update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroresize.config import PRUNING_MODES, BalanceConfig
from zeroresize.plan import RankPlan, WorkloadPlan
from zeroresize.policy.ratio import RankTimes, find_stragglers, pruning_ratios, reference_time
from zeroresize.policy.smoothing import LARGE_CHANGE, LARGE_START, smoothed, steadied

#: How far below the fastest rank's time a straggler aims, as a share; with target "mean" (the paper's) not at all.
HEADROOM = 0.05
#: Updates for which a rank that was let go is waited for to be measured at full work.
_MOST_WAITS = 2


@dataclass
class _RankState:
    rest_s: float = math.nan
    gemm_s: float = math.nan
    overhead_scale: float = math.nan
    is_straggler: bool = False
    ratio: float = 0.0
    wanted: float = 0.0
    is_let_go: bool = False
    is_back: bool = False
    is_wary: bool = False
    num_waits: int = 0

    def take(self, sample: RankTimes, weight: float) -> None:
        """Take a sample into the averages.

        A rank that was let go waits for one of full work, and starts anew with it: what pruning made of its times shall
        not blur what full work tells. If none comes, since someone else prunes the rank, it goes on with what there is.
        """
        if self.is_let_go and sample.measured_at > 0.0 and self.num_waits < _MOST_WAITS:
            self.num_waits += 1
            return
        for name in ("rest_s", "gemm_s", "overhead_scale"):
            average = math.nan if self.is_let_go else getattr(self, name)
            setattr(self, name, smoothed(average, getattr(sample, name), weight))
        self.is_back, self.is_let_go, self.num_waits = self.is_let_go, False, 0

    def want(self, ratio: float, dead_band: float) -> None:
        """Move to what is wanted, or towards it, or let the rank go.

        A rank that was let go and has to start again was let go by mistake: its times under pruning look better than
        they are. From then on it goes down by halves, so that it does not start and stop for ever.
        """
        if self.is_back:
            self.is_wary = ratio > 0.0
        was_pruning = self.ratio > 0.0
        if self.is_wary and ratio < self.ratio - LARGE_CHANGE:
            middle = (self.ratio + ratio) / 2
            self.ratio = middle if middle >= LARGE_CHANGE else 0.0
        else:
            self.ratio = steadied(self.ratio, ratio, self.wanted, dead_band)
        self.is_let_go = was_pruning and self.ratio == 0.0
        self.wanted = 0.0 if self.is_let_go else ratio


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

    def __post_init__(self) -> None:
        self.config.validate_group_size(self.num_ranks)
        self._ranks = [_RankState() for _ in range(self.num_ranks)]

    def initial_plan(self) -> WorkloadPlan:
        """The plan in force from the first iteration: a ratio forced on named ranks, else full work."""
        ratios = [self._forced_from_start(rank) for rank in range(self.num_ranks)]
        for state, ratio in zip(self._ranks, ratios, strict=True):
            state.ratio = ratio
        return WorkloadPlan(update=0, ranks=tuple(RankPlan(ratio) for ratio in ratios))

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
        is_unsure = any(state.is_let_go for state in self._ranks)
        for state, is_straggler, ratio in zip(self._ranks, are_stragglers, wanted, strict=True):
            state.is_straggler = is_straggler
            if state.is_let_go:
                continue  # what it needs now is told by the next sample, measured at full work
            if is_unsure and state.ratio == 0.0 and ratio < LARGE_START:
                continue  # nobody starts for the sake of a rank whose speed is not known
            state.want(ratio, self.config.dead_band)
        ratios = [state.ratio for state in self._ranks]
        return self._plan(ratios, max(rank.busy_at(ratio) for rank, ratio in zip(times, ratios, strict=True)))

    def current_plan(self) -> WorkloadPlan:
        """The plan of the last update, or of a loaded state."""
        return self._plan([state.ratio for state in self._ranks], math.nan)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the same on every rank."""
        return {"num_updates": self._num_updates, "ranks": [vars(state).copy() for state in self._ranks]}

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
        self._ranks = [_RankState(**values) for values in state["ranks"]]
        if self.config.mode not in PRUNING_MODES:
            for rank in self._ranks:
                rank.ratio = rank.wanted = 0.0

    def _forced_from_start(self, rank: int) -> float:
        forced, ranks = self.config.forced_ratio, self.config.ranks
        if forced is None or self.config.mode not in PRUNING_MODES or ranks == "stragglers":
            return 0.0
        return forced if ranks == "all" or rank in ranks else 0.0

    def _wanted_ratios(
        self, times: Sequence[RankTimes], are_stragglers: Sequence[bool], reference_s: float
    ) -> list[float]:
        if self.config.mode not in PRUNING_MODES:
            return [0.0] * self.num_ranks
        forced = self.config.forced_ratio
        if forced is None:
            headroom = HEADROOM if self.config.target == "min" else 0.0
            return pruning_ratios(times, are_stragglers, reference_s, headroom)
        if self.config.ranks == "stragglers":
            return [forced if is_straggler else 0.0 for is_straggler in are_stragglers]
        return [self._forced_from_start(rank) for rank in range(self.num_ranks)]

    def _plan(self, ratios: Sequence[float], predicted_step_s: float) -> WorkloadPlan:
        ranks = tuple(RankPlan(ratio, state.is_straggler) for ratio, state in zip(ratios, self._ranks, strict=True))
        return WorkloadPlan(update=self._num_updates, ranks=ranks, predicted_step_s=predicted_step_s)
