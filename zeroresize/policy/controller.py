"""From the table of all ranks' numbers to a plan, update after update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroresize.config import BalanceConfig
from zeroresize.config_keys import MIGRATING_MODES, PRUNING_MODES
from zeroresize.plan.group import Loan, RankPlan, WorkloadPlan
from zeroresize.policy.communication import CollectiveTimes, CommunicationEstimate
from zeroresize.policy.cost_model import ResizingCost
from zeroresize.policy.curves import GroupTimes
from zeroresize.policy.fingerprint import fingerprint
from zeroresize.policy.full_work_steps import FullWorkSteps
from zeroresize.policy.rules.by_mode import forced_division, wanted_division
from zeroresize.policy.rules.ratio import find_stragglers, reference_time
from zeroresize.policy.rules.sharing import borrowed_shares, loans_of, predicted_busy_s
from zeroresize.policy.smoothing import LARGE_CHANGE, smoothed, steadied
from zeroresize.policy.times import RankTimes
from zeroresize.utils.state_checks import Check, below, count, each, flag, keyed, number, row, share

#: Of what is pruned and lent: much finer than a column.
_DECIMALS = 6
#: Decisions follow from what was measured before the last one.
_UNTIL_HEARD = 2
#: Receivers' parts are divided anew where that makes the step shorter by this share.
_WORTH_DIVIDING = 0.01


def _part(lent: float, pruned: float) -> float:
    return lent / (lent + pruned) if lent > 0.0 else 0.0


@dataclass
class _RankState:
    rest_s: float = math.nan
    gemm_s: float = math.nan
    gather_fill_scale: float = math.nan
    is_straggler: bool = False
    pruned: float = 0.0
    lent: float = 0.0
    wanted: tuple[float, float] = (0.0, 0.0)
    updates_until_heard: int = 0  # of a rank that was let go: until a sample comes that was measured since then

    def take(self, sample: RankTimes, weight: float) -> None:
        """Take a sample into the averages, which start anew when a rank is first heard of after it was let go."""
        weight = 1.0 if self.updates_until_heard == 1 else weight
        self.updates_until_heard = max(self.updates_until_heard - 1, 0)
        for name in ("rest_s", "gemm_s", "gather_fill_scale"):
            setattr(self, name, smoothed(getattr(self, name), getattr(sample, name), weight))

    def want(self, pruned: float, lent: float, dead_band: float) -> None:
        """Move to what is wanted, or towards it, as far as noise allows; what is spared and how it is split apart.

        All of it is rounded, so that machines that differ in the last bit of a sum have the same plan.
        """
        if self.updates_until_heard:
            pruned = lent = 0.0
        # Noise of a rank's speed moves what it is to be spared in proportion to what it computes.
        spared = steadied(self.spared, pruned + lent, sum(self.wanted), dead_band * (1.0 - self.spared))
        is_let_go = spared == 0.0 < self.spared
        wanted_part, before = _part(lent, pruned), _part(self.wanted[1], self.wanted[0])
        part = _part(self.lent, self.pruned) if self.spared > 0.0 else wanted_part
        if spared * abs(wanted_part - part) >= LARGE_CHANGE:
            part = wanted_part
        elif spared * min(abs(wanted_part - part), abs(before - part)) >= dead_band:
            part = min(wanted_part, before, key=lambda one: abs(one - part))
        self.lent = round(spared * part, _DECIMALS)
        self.pruned = round(spared - spared * part, _DECIMALS)
        self.wanted = round(pruned, _DECIMALS), round(lent, _DECIMALS)
        if is_let_go:
            self.wanted, self.is_straggler, self.updates_until_heard = (0.0, 0.0), False, _UNTIL_HEARD

    @property
    def busy_s(self) -> float:
        """T, seconds; NaN before the rank was measured."""
        return self.rest_s + self.gemm_s

    @property
    def is_normal(self) -> bool:
        """Whether it was found to be no straggler."""
        return self.is_known and not self.is_straggler and not math.isnan(self.busy_s)

    @property
    def is_known(self) -> bool:
        """Whether its times at full work were measured, and not told from steps in which it did less."""
        return self.spared == 0.0 and not self.updates_until_heard

    @property
    def spared(self) -> float:
        """Share of its own products that the rank does not compute."""
        return self.pruned + self.lent


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
    _full_work_steps: FullWorkSteps = field(default_factory=FullWorkSteps, init=False)
    _loans: tuple[Loan, ...] = field(default=(), init=False)
    _communication: CommunicationEstimate = field(init=False)

    def __post_init__(self) -> None:
        self.config.validate_group_size(self.num_ranks)
        self._ranks = [_RankState() for _ in range(self.num_ranks)]
        self._communication = CommunicationEstimate(self.config.ewma)

    def initial_plan(self) -> WorkloadPlan:
        """The plan in force from the first iteration: a ratio forced on named ranks, else full work."""
        for state, (pruned, lent) in zip(self._ranks, self._forced_from_start(), strict=True):
            state.pruned, state.lent = pruned, lent
        self._divide(None, None, is_new=True)
        return self.current_plan()

    def update(self, samples: Sequence[RankTimes], collectives: CollectiveTimes | None = None) -> WorkloadPlan:
        """Take one sample of full-work times a rank (NaN where nothing was measured) and decide.

        What no step can have taken counts as not measured, see :meth:`~zeroresize.policy.times.RankTimes.checked`.

        Args:
            samples: of every rank.
            collectives: what was seen of the group's collectives, if anything.
        """
        if len(samples) != self.num_ranks:
            raise ValueError(f"expected {self.num_ranks} ranks' times, found {len(samples)}")
        samples = [sample.checked() for sample in samples]
        normal_s = min((state.busy_s for state in self._ranks if state.is_normal), default=0.0)
        for state, sample in zip(self._ranks, samples, strict=True):
            state.take(sample, self.config.ewma)
        if collectives is not None:
            known_s = [state.busy_s for state in self._ranks if not math.isnan(state.busy_s)]
            self._communication.learn(collectives, min(known_s, default=math.nan))
        if any(math.isnan(state.busy_s) for state in self._ranks):
            return self.current_plan()

        times = self._times([sample.cost for sample in samples], normal_s)
        busy_s = [rank.busy_s for rank in times]
        reference_s = reference_time(busy_s, self.config.target)
        are_stragglers = find_stragglers(
            busy_s, reference_s, self.config.tolerance, [state.is_straggler for state in self._ranks]
        )
        division = wanted_division(
            self.config,
            times,
            are_stragglers,
            reference_s,
            self._communication.migration,
            lend_now=[state.lent > 0.0 for state in self._ranks],
            prunes_now=any(state.pruned > 0.0 for state in self._ranks),
        )
        before = [(state.pruned, state.lent) for state in self._ranks]
        wanted = zip(division.pruned, division.lent, strict=True)
        for state, is_straggler, shares in zip(self._ranks, are_stragglers, wanted, strict=True):
            state.is_straggler = is_straggler
            state.want(*shares, self.config.dead_band)
        self._keep_to_budget()
        still_slow = [lent for (_, lent), is_straggler in zip(before, are_stragglers, strict=True) if is_straggler]
        if any(still_slow) and not any(state.lent for state in self._ranks):
            self._communication.give_up()
        is_new = [(state.pruned, state.lent) for state in self._ranks] != before
        self._divide(times, division.slack, is_new)
        busy_s = self._predicted_busy_s(times, self._loans)
        step_s = max(busy_s) + self._communication.seconds([state.lent for state in self._ranks])
        spared_before = [pruned + lent for pruned, lent in before]
        return self._plan(step_s, self._begins_at_full_work(times, max(busy_s), spared_before))

    def current_plan(self) -> WorkloadPlan:
        """The plan of the last update, or of a loaded state."""
        return self._plan(math.nan, begins_at_full_work=False)

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the same on every rank."""
        return {
            "saved_for_full_work_s": self._full_work_steps.saved_s,
            "ranks": [vars(state).copy() for state in self._ranks],
            "loans": [(loan.owner, loan.share, list(loan.receivers), list(loan.parts)) for loan in self._loans],
            "communication": self._communication.state_dict(),
        }

    def fingerprint(self, plan: WorkloadPlan, *values: object) -> float:
        """A hash of all that decisions follow from, of ``plan``, and of plain ``values``."""
        return fingerprint(
            (self._loans, plan.loans),
            self._full_work_steps.saved_s,
            [tuple(vars(state).values()) for state in self._ranks],
            self._communication.state_dict(),
            [(rank.pruned, rank.lent, rank.is_straggler) for rank in plan.ranks],
            (plan.predicted_step_s, plan.begins_at_full_work),
            values,
        )

    @property
    def state_check(self) -> Check:
        """Of what :meth:`load_state_dict` can take over."""
        shares = dict.fromkeys(("pruned", "lent"), share)
        times = dict.fromkeys(("rest_s", "gemm_s", "gather_fill_scale"), number)
        rank = {**times, "is_straggler": flag, **shares, "wanted": row(share, share), "updates_until_heard": count}
        index = below(self.num_ranks)
        return keyed(
            {
                "saved_for_full_work_s": number,
                "ranks": each(keyed(rank), self.num_ranks),
                "loans": each(row(index, share, each(index), each(share))),
                "communication": self._communication.state_check,
            }
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; a mode that does not prune, or lend, does not take over what was pruned, or lent.

        Raises:
            ValueError: if it was saved in a group of another size.
        """
        if len(state["ranks"]) != self.num_ranks:
            raise ValueError(
                f"the balancer's state is of {len(state['ranks'])} ranks, this process group has {self.num_ranks}"
            )
        self._full_work_steps.saved_s = state["saved_for_full_work_s"]
        self._ranks = [_RankState(**{**values, "wanted": tuple(values["wanted"])}) for values in state["ranks"]]
        self._communication.load_state_dict(state["communication"])
        receivers: dict[tuple[int, ...], tuple[int, ...]] = {}  # loans have theirs in common, as decided ones have
        shares: dict[tuple[float, ...], tuple[float, ...]] = {}
        loans = ((owner, ratio, tuple(to), tuple(parts)) for owner, ratio, to, parts in state["loans"])
        self._loans = tuple(
            Loan(owner, ratio, receivers.setdefault(to, to), shares.setdefault(parts, parts))
            for owner, ratio, to, parts in loans
        )
        if self._goes_beyond_configuration():
            for rank in self._ranks:
                rank.pruned = rank.lent = 0.0
                rank.wanted = 0.0, 0.0
            self.initial_plan()

    def _times(self, costs: Sequence[ResizingCost], normal_s: float) -> GroupTimes:
        """What is decided from: the averages, but what is told by pruned steps makes no rank faster than a normal one.

        It may be too little by a third where a rank has just recovered, and would make stragglers of all the others.

        Args:
            normal_s: busy time of the fastest normal rank at the last update, 0 where there was none.
        """
        times = []
        for rank, cost in zip(self._ranks, costs, strict=True):
            factor = max(normal_s / rank.busy_s, 1.0) if not rank.is_known else 1.0
            times.append(RankTimes(factor * rank.rest_s, factor * rank.gemm_s, rank.gather_fill_scale, cost))
        return GroupTimes(times)

    def _keep_to_budget(self) -> None:
        """On the way from one division to another no more is pruned than either may prune."""
        pruned = math.fsum(state.pruned for state in self._ranks)
        if pruned > self._most_pruned:
            for state in self._ranks:
                state.pruned = math.floor(state.pruned * self._most_pruned / pruned * 10**_DECIMALS) / 10**_DECIMALS

    @property
    def _most_pruned(self) -> float:
        """What all ranks together may prune, in units of one rank's products."""
        is_paper = self.config.mode == "semi" and self.config.semi_rule == "paper"
        is_bounded = self.config.forced_ratio is None and not is_paper
        return self.config.budget * self.num_ranks if is_bounded else math.inf

    def _goes_beyond_configuration(self) -> bool:
        """Whether what is loaded was decided by another configuration, and does what this one does not allow."""
        config = self.config
        pruned = [rank.pruned for rank in self._ranks]
        is_forced_from_start = any(sum(shares) for shares in self._forced_from_start())
        return (
            (config.mode not in PRUNING_MODES and any(pruned))
            or (config.mode not in MIGRATING_MODES and bool(self._loans))
            or (config.forced_ratio is None and max(pruned) > config.max_ratio)
            or math.fsum(pruned) > self._most_pruned
            or is_forced_from_start
        )

    def _forced_from_start(self) -> list[tuple[float, float]]:
        """(pruned, lent) of every rank."""
        forced = forced_division(self.config, [False] * self.num_ranks)
        return list(zip(forced.pruned, forced.lent, strict=True))

    def _begins_at_full_work(self, times: Sequence[RankTimes], step_s: float, spared_before: Sequence[float]) -> bool:
        if self.config.forced_ratio is not None or not any(state.spared > 0.0 for state in self._ranks):
            return False
        is_new = any(
            state.spared > 0.0 and abs(state.spared - before) >= LARGE_CHANGE
            for before, state in zip(spared_before, self._ranks, strict=True)
        )
        return self._full_work_steps.is_due(
            self.config.update_every, step_s, max(rank.busy_s for rank in times), is_new=is_new
        )

    def _plan(self, predicted_step_s: float, begins_at_full_work: bool) -> WorkloadPlan:
        borrowed = borrowed_shares(self._loans, self.num_ranks)
        return WorkloadPlan(
            ranks=tuple(
                RankPlan(state.pruned, state.lent, share, state.is_straggler)
                for state, share in zip(self._ranks, borrowed, strict=True)
            ),
            predicted_step_s=predicted_step_s,
            begins_at_full_work=begins_at_full_work,
            loans=self._loans,
        )

    def _divide(self, times: Sequence[RankTimes] | None, slack: tuple[float, ...] | None, is_new: bool) -> None:
        """Divide what is lent among the receivers, anew only where that is worth sending everything anew."""
        lent = [state.lent for state in self._ranks]
        rounded = tuple(round(one, _DECIMALS) for one in slack) if slack is not None else None
        newly_divided = loans_of(lent, rounded)
        if not is_new and times is not None and self._loans:
            newly_s, now_s = (max(self._predicted_busy_s(times, loans)) for loans in (newly_divided, self._loans))
            if newly_s >= now_s * (1.0 - _WORTH_DIVIDING):
                return
        self._loans = newly_divided

    def _predicted_busy_s(self, times: Sequence[RankTimes], loans: Sequence[Loan]) -> list[float]:
        return predicted_busy_s(times, [state.spared for state in self._ranks], loans)
