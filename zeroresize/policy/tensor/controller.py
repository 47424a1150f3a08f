"""From the table of all ranks' numbers to a plan, update after update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from zeroresize.config import BalanceConfig
from zeroresize.config.keys import PRUNING_MODES
from zeroresize.plan.group import Loan, RankPlan, WorkloadPlan
from zeroresize.plan.ownership import SHARE_DECIMALS, SegmentWork, owned_shares
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.costs import UNKNOWN
from zeroresize.policy.tensor.estimation.calibration_steps import CalibrationSteps
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes, CommunicationEstimate
from zeroresize.policy.tensor.estimation.curves import Floats, GroupTimes
from zeroresize.policy.tensor.estimation.spells import COST_IN_VAIN, Spells
from zeroresize.policy.tensor.estimation.times import DURATION, RankTimes
from zeroresize.policy.tensor.memory import GroupMemory
from zeroresize.policy.tensor.ownership_decision import Division, OwnershipDecision
from zeroresize.policy.tensor.rules.by_mode import forced_division, wanted_division, wanted_ownership
from zeroresize.policy.tensor.rules.ownership import Bounds, fitting_shares
from zeroresize.policy.tensor.rules.ratio import find_stragglers, reference_time, slowest_normal_s
from zeroresize.policy.tensor.rules.sharing import WorkDivision, borrowed_shares
from zeroresize.utils.codec import UNSAVED, encoded
from zeroresize.utils.hashing import fingerprint

#: A rank is relieved if it is slower than the reference by so many standard deviations: to begin with pruning, to begin
#: with lending, and to go on.
CERTAINTY_LOSSY, CERTAINTY_EXACT, CERTAINTY = 3.5, 2.5, 2.0
#: A step at full work is due where γ changes by so much.
_NEW = 0.1
#: A change that saves less than this share of a step is made for nothing.
_LEAST_CHANGE = COST_IN_VAIN / DURATION


class _Measured(NamedTuple):
    """What an update decides from: times at even shares, what stragglers are compared with, and how sure that is."""

    times: GroupTimes
    reference_s: float
    deviation: float  # of a rank that is spared nothing, relative
    deviations: Floats  # of each rank


@dataclass
class Controller:
    """Keep the times of a group and decide its plans; equal inputs give equal plans on every rank.

    One division says what each rank owns, and what it prunes and lends of that. Units move where not moving them has
    cost as much as the move; what they own by then is pruned and lent as ever. A user's division is taken as given:
    ranks are compared by what they take for it.

    Attributes:
        config: how to balance.
        num_ranks: size of the group.
        segments: in which units can change hands; none, and nothing moves.
        num_calibration_steps: with how many steps that spare nobody the interval after the last update begins.
        ownership: the decision who owns what, to be read: its verdict, whether a user holds it, what a move costs.
    """

    config: BalanceConfig = field(metadata=UNSAVED)
    num_ranks: int = field(metadata=UNSAVED)
    segments: Sequence[SegmentWork] = field(default=(), metadata=UNSAVED)
    num_calibration_steps: int = field(default=0, init=False)
    ownership: OwnershipDecision = field(init=False)
    _configured: str = field(init=False)
    _times: list[RankTimes | None] = field(init=False)
    _usual: list[RankTimes | None] = field(init=False)
    _division: WorkDivision = field(init=False)
    _are_stragglers: list[bool] = field(init=False)
    _spells: Spells = field(init=False)
    _calibration: CalibrationSteps = field(default_factory=CalibrationSteps, init=False)
    _communication: CommunicationEstimate = field(default_factory=CommunicationEstimate, init=False)
    _memory: GroupMemory | None = field(default=None, init=False, metadata=UNSAVED)

    def __post_init__(self) -> None:
        self.config.validate_group_size(self.num_ranks)
        self._configured = repr(self.config)
        self._times, self._usual = [None] * self.num_ranks, [None] * self.num_ranks
        self._division = WorkDivision.nothing(self.num_ranks)
        self._are_stragglers = [False] * self.num_ranks
        self._spells = Spells(self.num_ranks)
        self.ownership = OwnershipDecision(self.num_ranks, tuple(self.segments))

    def initial_plan(self) -> WorkloadPlan:
        """Return the plan in force from the first iteration: a ratio forced on named ranks, else all that a rank owns.

        It is also the plan after a change of what ranks own: nothing is pruned or lent, but for a forced ratio.
        """
        self._division, self.num_calibration_steps = forced_division(self.config, [False] * self.num_ranks), 0
        return self.current_plan()

    def update(self, samples: Sequence[RankTimes], collectives: CollectiveTimes | None = None) -> WorkloadPlan:
        """Take every rank's estimate of its times at full work (NaN where nothing was measured) and decide.

        What no step can have taken counts as not measured, see
        :meth:`~zeroresize.policy.tensor.estimation.times.RankTimes.checked`.

        Args:
            samples: of every rank.
            collectives: what was seen of the group's collectives, if anything.
        """
        if len(samples) != self.num_ranks:
            raise ValueError(f"expected {self.num_ranks} ranks' times, found {len(samples)}")
        self.num_calibration_steps = 0
        samples = [sample.checked() for sample in samples]
        self._times = [
            known if math.isnan(sample.gemm_s) else sample for known, sample in zip(self._times, samples, strict=True)
        ]
        latest = self._latest
        if collectives is not None:
            self._communication.learn(collectives, min(self.busy_s, default=math.nan))
        if latest is None:
            return self.current_plan()

        busy_s = self._given(latest).busy_s
        reference_s = reference_time(busy_s.tolist(), self.config.target)
        deviations = np.array([rank.deviation for rank in latest])
        whole = deviations[[not spared for spared in self._division.spared]]
        usual = math.sqrt(math.fsum(whole**2) / len(whole)) if len(whole) else 0.0
        are_slow = self._find_stragglers(busy_s, deviations, reference_s)
        measured = _Measured(self._lasting(latest, are_slow), reference_s, usual, deviations)
        before = self._division.spared
        is_in_doubt = self._divide(measured)
        if self._move(measured):
            self.initial_plan()
            self._divide(measured)
        step_s = self._step_s(latest, self._division)
        relieved = [share > 0.0 for share in self._division.spared]
        if any(relieved) and self.config.forced_ratio is None:
            changes = zip(self._division.spared, before, strict=True)
            self.num_calibration_steps = self._calibration.due(
                self.config.update_every,
                step_s,
                float(latest.busy_s.max()),
                is_new=is_in_doubt or any(now and abs(now - then) >= _NEW for now, then in changes),
                is_unsure=float(deviations[relieved].max()) > UNKNOWN,
            )
        return self._plan(step_s)

    def current_plan(self) -> WorkloadPlan:
        """Return the plan of the last update, or of a loaded state."""
        return self._plan(math.nan)

    def whole_plan(self, owned: Sequence[float]) -> WorkloadPlan:
        """Return a plan by which ranks own so much and nobody is spared, as in ``num_calibration_steps``."""
        ranks = zip(owned, self._are_stragglers, strict=True)
        return WorkloadPlan(tuple(RankPlan(owned=share, is_straggler=slow) for share, slow in ranks))

    def predict_step_s(self, plan: WorkloadPlan) -> float:
        """Return the seconds of a step under any plan, by the latest times; NaN before all ranks were measured."""
        pruned, lent, borrowed = zip(*((rank.pruned, rank.lent, rank.borrowed) for rank in plan.ranks), strict=True)
        division = WorkDivision(pruned, lent, borrowed)
        return math.nan if self._latest is None else self._step_s(self._latest, division, plan.owned)

    def expect_moves(self, cost: MoveCost, bytes_of_units: float, comparing_s: float = 0.0) -> None:
        """Take what a move takes by the calibration, and the bytes of all units of a rank; alike on every rank.

        Args:
            comparing_s: seconds for which ranks compare products after a move away from home.
        """
        self.ownership.cost, self.ownership.bytes_of_units = cost, bytes_of_units
        self.ownership.comparing_s = comparing_s

    def expect_memory(self, memory: GroupMemory) -> None:
        """Give no rank more units than it has the memory for; alike on every rank.

        Where units that it has do not fit, they move at the next update, whatever that costs. Home, with which
        balancing is compared, is the division nearest to even shares that fits.
        """
        if self._memory is not None and memory.is_like(self._memory):
            return
        self._memory = memory
        if self.ownership.can_move:
            self.ownership.home = fitting_shares(self.num_ranks, memory.most_shares)

    @property
    def verdict(self) -> str:
        """Tell why units moved at the last update, or stayed; empty where decisions move none."""
        return str(self.ownership.verdict) if self.config.may_move and self.ownership.can_move else ""

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Return, for every rank, seconds of a step at full work and even shares; empty before all were measured."""
        return () if self._latest is None else tuple(self._latest.busy_s.tolist())

    @property
    def bounds(self) -> Bounds | None:
        """Return below which time no exact division can bring a step; None before all ranks were measured."""
        if self._latest is None:
            return None
        bounds, more_s = Bounds.of(self._latest), self._communication.without_loans_s
        return Bounds(bounds.of_products + more_s, bounds.of_units + more_s)

    def refuse_move(self, in_force: Sequence[float]) -> WorkloadPlan:
        """Note that the move of the last plan was not made, and nothing has changed; to be called alike on every rank.

        No move is tried for a while: for 8 updates, and twice as many each time.

        Args:
            in_force: the shares by which units are divided, and stay so.

        Returns:
            The plan in force from now on.
        """
        self.ownership.refuse(tuple(in_force))
        return self.initial_plan()

    def hold_owned(self, shares: Sequence[float] | None) -> WorkloadPlan:
        """Let ranks own these shares from now on, whatever decisions say; None lets decisions go on from there.

        Args:
            shares: of every rank, in any unit.

        Raises:
            ValueError: if they are no such shares, or nothing can move.
        """
        if shares is None or self.ownership.checked(shares) == self.ownership.owned:
            self.ownership.is_held = shares is not None
            return self.current_plan()
        self.ownership.put(shares, is_held=True)
        return self.initial_plan()

    def fingerprint(self, plan: WorkloadPlan, *values: object) -> float:
        """Return a hash of all that decisions follow from, of ``plan`` but for its loans, and of plain ``values``."""
        ranks = [(rank.pruned, rank.lent, rank.borrowed, rank.is_straggler, rank.owned) for rank in plan.ranks]
        return fingerprint(repr((encoded(self), ranks, plan.predicted_step_s, values)))

    def after_loading(self) -> None:
        """Leave what another configuration has decided; see :meth:`zeroresize.balancer.Balancer.load_state_dict`.

        Nothing is pruned or lent then until the next update. Units that are away stay so where decisions may move them,
        or where a user holds them; else the plan is that they are at home.

        Raises:
            ValueError: for a state of another number of ranks.
        """
        of_ranks = (self._division.pruned, self._division.lent, self._are_stragglers, self._times, self._usual)
        lengths = {len(numbers) for numbers in (*of_ranks, self._spells.ages, self._spells.costs)} - {self.num_ranks}
        if lengths:
            raise ValueError(
                f"the balancer's state is of {lengths.pop()} ranks, this process group has {self.num_ranks}"
            )
        if not self.ownership.is_home and not (self.config.may_move or self.ownership.is_held):
            self.ownership.put((1.0,) * self.num_ranks, is_held=False)
        if self._configured != repr(self.config):
            self._configured = repr(self.config)
            self.initial_plan()

    def _plan(self, predicted_step_s: float) -> WorkloadPlan:
        division, owned = self._division, self.ownership
        loans = division.loans
        borrowed = borrowed_shares(loans, self.num_ranks, owned.products)
        ranks = zip(division.pruned, division.lent, borrowed, owned.owned, self._are_stragglers, strict=True)
        return WorkloadPlan(tuple(RankPlan(*numbers) for numbers in ranks), predicted_step_s, loans)

    @property
    def _latest(self) -> GroupTimes | None:
        """The latest times of all ranks; None before all were measured."""
        known = [times for times in self._times if times is not None]
        return GroupTimes(known) if len(known) == self.num_ranks else None

    def _lasting(self, times: GroupTimes, are_slow: Sequence[bool]) -> GroupTimes:
        """The times, but those of ranks that are slow for a moment only: what they took before."""
        for rank, (rank_times, slow, straggles) in enumerate(zip(times, are_slow, self._are_stragglers, strict=True)):
            if not slow or straggles or self._usual[rank] is None:
                self._usual[rank] = rank_times
        return GroupTimes(usual for usual in self._usual if usual is not None)

    def _find_stragglers(self, busy_s: Floats, deviations: Floats, reference_s: float) -> tuple[bool, ...]:
        """Find who is surely slow, and of these, who is slow for long enough to be relieved; the former is returned."""
        were = self._are_stragglers
        first = CERTAINTY_LOSSY if self.config.mode in PRUNING_MODES else CERTAINTY_EXACT
        surely_s = busy_s / (1.0 + np.where(were, CERTAINTY, first) * deviations)
        are_slow = find_stragglers(busy_s.tolist(), reference_s, self.config.tolerance, were, surely_s.tolist())
        saved = np.maximum(1.0 - reference_s / busy_s, 0.0).tolist()
        self._spells.learn(are_slow, saved)
        self._are_stragglers = [
            is_slow and (was or self._spells.is_worth_it(rank, saved[rank], self.config.update_every))
            for rank, (is_slow, was) in enumerate(zip(are_slow, were, strict=True))
        ]
        return are_slow

    def _given(self, times: GroupTimes) -> GroupTimes:
        """What ranks take for all that they own where a user has said what that is; else at even shares."""
        return times.owning(self.ownership.products) if self.ownership.is_held else times

    @property
    def _may_move(self) -> bool:
        """Whether decisions may move units at this update."""
        return self.config.may_move and self.ownership.can_move and not self.ownership.is_held

    def _divide(self, measured: _Measured) -> bool:
        """Decide what is pruned and lent of what ranks own; see :meth:`_change_to`."""
        stragglers, in_force = self._are_stragglers, measured.times.owning(self.ownership.products)
        normal_s = slowest_normal_s(self._given(measured.times), stragglers)
        # Where units may move loans are considered until they do, as owning costs less than lending for long.
        may_lend = not self._may_move or self.ownership.is_home or bool(self.ownership.rental.owed_s)
        migration = self._communication.migration if may_lend else None
        division = wanted_division(self.config, in_force, stragglers, measured.reference_s, migration, normal_s)
        if self.config.forced_ratio is None and not self._have_room_for(division.loans):
            division = wanted_division(self.config, in_force, stragglers, measured.reference_s, None, normal_s)
        return self._change_to(division, in_force, measured)

    def _have_room_for(self, loans: Sequence[Loan]) -> bool:
        """Whether who computes for others has the memory for that, as if it owned it."""
        if self._memory is None or not loans:
            return True
        borrowed = borrowed_shares(loans, self.num_ranks, self.ownership.products)
        return self._memory.have_room_for(borrowed, self.ownership.owned)

    def _change_to(self, division: WorkDivision, in_force: GroupTimes, measured: _Measured) -> bool:
        """Change the plan if what that saves exceeds what it costs, and noise, or if somebody has recovered.

        Costs are in seconds a step: of a step's length, and of what is pruned in it.

        Returns:
            Whether the plan stays although a rank may have recovered, as much less is wanted for it.
        """
        now, new = self._division, _rounded(division)
        ranks = zip(self._are_stragglers, now.spared, strict=True)
        is_possible = all(slow or not spared for slow, spared in ranks) and self._have_room_for(now.loans)
        if self.config.forced_ratio is None and is_possible:
            # Who prunes goes on where that saves half of what it must save to begin.
            price_s = self.config.min_gain / 2.0 * in_force.busy_s.max() / max(sum(self._are_stragglers), 1)
            now_s = self._step_s(measured.times, now)
            fewer = now.dropped(in_force.owned) - new.dropped(in_force.owned)
            saved_s = now_s - self._step_s(measured.times, new) + price_s * max(fewer, 0.0)
            if new.is_rule:
                same = all(bool(then) == bool(wanted) for then, wanted in zip(now.spared, new.spared, strict=True))
                saved_s = abs(saved_s) if same else math.inf
            # What is no longer dropped needs no certainty: it is dropped for something, or it is not dropped.
            certainty = 0.0 if fewer > 0.0 and not any(new.pruned) else CERTAINTY
            if saved_s <= (_LEAST_CHANGE + certainty * measured.deviation) * now_s:
                return any(then - wanted >= _NEW for then, wanted in zip(now.spared, new.spared, strict=True))
        self._division = new
        return False

    def _move(self, measured: _Measured) -> bool:
        """Give units to other ranks if not doing so has cost as much as the move there and back; whether they move."""
        ownership, memory, migration = self.ownership, self._memory, self._communication.migration
        if not self._may_move:
            return False
        wanted = wanted_ownership(
            self.config,
            measured.times,
            self._are_stragglers,
            measured.reference_s,
            migration,
            ownership.segments,
            noise=CERTAINTY * measured.deviation,
            are_pruning=any(self._division.pruned),
            most_shares=memory.most_shares if memory is not None else None,
        )
        if memory is not None and memory.is_better(wanted, than=ownership.owned):
            return ownership.update({wanted: 0.0}, 0.0, 0, is_needed=True).is_due
        # What is pruned counts as if it were computed: that is what moving is to save, too.
        lending = replace(self._division, pruned=(0.0,) * self.num_ranks)
        now_s = ownership.step_s(measured.times, ownership.owned, lending, migration)
        stay_saves_s = ownership.step_s(measured.times) - now_s
        savings_s = self._savings(measured, wanted, now_s)
        return ownership.update(savings_s, now_s, self.config.update_every, stay_saves_s=stay_saves_s).is_due

    def _savings(self, measured: _Measured, wanted: Division, now_s: float) -> dict[Division, float]:
        """By how many seconds each division that may be chosen makes a step shorter than ``now_s``."""
        ownership, memory, times = self.ownership, self._memory, measured.times
        savings_s: dict[Division, float] = {}
        is_worse = now_s > (1.0 + COST_IN_VAIN) * ownership.step_s(times)
        if not ownership.is_home and (wanted == ownership.home or is_worse):
            # Who may only seem slower than others, as he owns little, is seen there.
            sure = zip(times, (1.0 + CERTAINTY * measured.deviations).tolist(), strict=True)
            savings_s[ownership.home] = now_s - ownership.step_s([rank.faster(factor) for rank, factor in sure])
        does_fit = memory is None or memory.excess_by(wanted) <= memory.excess_by(ownership.owned)
        if wanted not in (ownership.owned, ownership.home) and does_fit:
            saving_s = now_s - ownership.step_s(times, wanted)
            if self.config.mode == "semi" and not ownership.is_home:  # units may move so that more can be pruned
                pruned_s = self._pruned_s(measured, ownership.owned) - self._pruned_s(measured, wanted)
                saving_s = max(saving_s, pruned_s)
            # From home it is certain who is slow; from one division to another everybody's times count.
            least = 0.0 if ownership.is_home else _LEAST_CHANGE + measured.deviation
            savings_s[wanted] = saving_s if abs(saving_s) > least * now_s else 0.0
        return savings_s

    def _pruned_s(self, measured: _Measured, shares: Division) -> float:
        """Seconds of a step by these shares, and what is to be saved for all that is pruned in it."""
        ownership, slow, times = self.ownership, self._are_stragglers, measured.times
        owned, normal_s = owned_shares(shares, ownership.segments), slowest_normal_s(times, slow)
        division = wanted_division(self.config, times.owning(owned), slow, measured.reference_s, None, normal_s)
        price_s = self.config.min_gain * ownership.step_s(times) / max(sum(slow), 1) * division.dropped(owned)
        return ownership.step_s(times, shares, division) + price_s

    def _step_s(self, times: GroupTimes, division: WorkDivision, owned: Division | None = None) -> float:
        """Seconds of a step of what ranks own, divided so, with what collectives take."""
        step_s = self.ownership.step_s(times, owned or self.ownership.owned, division, self._communication.migration)
        return step_s + self._communication.without_loans_s


def _rounded(division: WorkDivision) -> WorkDivision:
    """So that machines that differ in the last bit of a sum have the same plan, and no budget is exceeded."""
    parts = 10**SHARE_DECIMALS
    return replace(
        division,
        pruned=tuple(math.floor(share * parts + 1.0 / parts) / parts for share in division.pruned),
        lent=tuple(round(share, SHARE_DECIMALS) for share in division.lent),
        slack=None if division.slack is None else tuple(round(more, SHARE_DECIMALS) for more in division.slack),
    )
