"""From the table of all ranks' numbers to a plan, update after update."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MIGRATING_MODES, PRUNING_MODES
from zeroresize.plan.group import Loan, RankPlan, Shares, WorkloadPlan
from zeroresize.plan.ownership import SegmentWork, owned_shares
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import beyond_noise, is_saving
from zeroresize.policy.tensor.estimation.calibration_steps import CalibrationSteps
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes, CommunicationEstimate
from zeroresize.policy.tensor.estimation.curves import Floats, GroupTimes
from zeroresize.policy.tensor.estimation.spells import COST_IN_VAIN, Spells
from zeroresize.policy.tensor.estimation.times import DURATION, RankTimes
from zeroresize.policy.tensor.loan_fingerprint import fingerprint_of_loans
from zeroresize.policy.tensor.memory import GroupMemory
from zeroresize.policy.tensor.ownership_decision import OwnershipDecision
from zeroresize.policy.tensor.rules.bounds import Bounds
from zeroresize.policy.tensor.rules.by_mode import (
    KEPT_GAIN,
    divided_step_s,
    forced_division,
    wanted_division,
    wanted_ownership,
)
from zeroresize.policy.tensor.rules.ownership import fitting_shares, owned_step_s, wanted_shares
from zeroresize.policy.tensor.rules.ratio import find_stragglers, reference_time, slowest_normal_s
from zeroresize.policy.tensor.rules.sharing import WorkDivision, borrowed_shares, loans_of, predicted_busy_s
from zeroresize.utils.codec import UNSAVED, encoded

#: A rank is relieved if it is slower than the reference by so many standard deviations: to begin with pruning, to begin
#: with lending, and to go on.
CERTAINTY_LOSSY, CERTAINTY_EXACT, CERTAINTY_KEPT = 3.5, 2.5, 2.0
#: Of a rank that is relieved of something, its time at full work is not known: a standard deviation, as a share of it.
UNSURE = 0.3
#: From here on it may be as fast as others all the same.
DOUBTFUL = 0.12
#: A step at full work is due where γ changes by so much.
_NEW = 0.1
#: Of what is pruned and lent: much finer than a column.
_DECIMALS = 6


def _rounded_down(share: float) -> float:
    """So that machines that differ in the last bit of a sum have the same plan, and no budget is exceeded."""
    return math.floor(round(share * 10**_DECIMALS, 3)) / 10**_DECIMALS


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
    """

    config: BalanceConfig = field(metadata=UNSAVED)
    num_ranks: int = field(metadata=UNSAVED)
    segments: Sequence[SegmentWork] = field(default=(), metadata=UNSAVED)
    num_calibration_steps: int = field(default=0, init=False)
    _times: list[RankTimes | None] = field(init=False)
    _usual: list[RankTimes | None] = field(init=False)
    _shares: list[Shares] = field(init=False)
    _measured_under: list[Shares] = field(init=False)
    _are_stragglers: list[bool] = field(init=False)
    _spells: Spells = field(init=False)
    _calibration: CalibrationSteps = field(default_factory=CalibrationSteps, init=False)
    _loans: tuple[Loan, ...] = field(default=(), init=False)
    _loans_then: tuple[Loan, ...] = field(default=(), init=False)
    _ownership: OwnershipDecision = field(init=False)
    _communication: CommunicationEstimate = field(default_factory=CommunicationEstimate, init=False)
    _memory: GroupMemory | None = field(default=None, init=False, metadata=UNSAVED)

    def __post_init__(self) -> None:
        self.config.validate_group_size(self.num_ranks)
        self._times = [None] * self.num_ranks
        self._usual = [None] * self.num_ranks
        self._shares = [Shares()] * self.num_ranks
        self._measured_under = self._shares
        self._are_stragglers = [False] * self.num_ranks
        self._spells = Spells(self.num_ranks)
        self._ownership = OwnershipDecision(self.num_ranks, self.segments)

    def initial_plan(self) -> WorkloadPlan:
        """Return the plan in force from the first iteration.

        It is a ratio forced on named ranks, else all that a rank owns.
        """
        forced = forced_division(self.config, [False] * self.num_ranks)
        self._shares = [Shares(*shares) for shares in zip(forced.pruned, forced.lent, strict=True)]
        self._loans = loans_of(forced.lent)
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
        if collectives is not None:
            known_s = [times.busy_s for times in self._times if times is not None]
            self._communication.learn(collectives, min(known_s, default=math.nan))
        if any(times is None for times in self._times):
            return self.current_plan()

        times = self._floored([times for times in self._times if times is not None])
        given = self._given(times)
        busy_s = given.curves.busy_s
        reference_s = reference_time(busy_s.tolist(), self.config.target)
        deviations, usual = self._deviations(times)
        self._account(times, deviations)
        are_slow = self._are_slow(given, deviations, reference_s)
        saved = np.maximum(1.0 - reference_s / busy_s, 0.0).tolist()
        self._spells.learn(are_slow, saved)
        self._are_stragglers = [
            is_slow and (was or self._spells.is_worth_it(rank, saved[rank], self.config.update_every))
            for rank, (is_slow, was) in enumerate(zip(are_slow, self._are_stragglers, strict=True))
        ]
        measured, times = times, self._lasting(times, are_slow)
        before = self._measured_under = self._shares
        self._loans_then = self._loans
        is_in_doubt = self._divide(times, reference_s, usual)
        lent_before = any(shares.lent for shares, slow in zip(before, self._are_stragglers, strict=True) if slow)
        if lent_before and not any(shares.lent for shares in self._shares):
            self._communication.give_up()
        if self._move(times, reference_s, usual, deviations, saved):
            self._spare_nobody()
            self._divide(times, reference_s, usual)
        step_s = self._step_s(measured, self._shares, self._loans)
        self._calibrate(measured, deviations, step_s, before, is_in_doubt=is_in_doubt)
        return self._plan(step_s)

    def current_plan(self) -> WorkloadPlan:
        """Return the plan of the last update, or of a loaded state."""
        return self._plan(math.nan)

    @property
    def calibration_plan(self) -> WorkloadPlan:
        """Return a plan that spares nobody: it is in force in the first ``num_calibration_steps``."""
        ranks = zip(self._ownership.owned, self._are_stragglers, strict=True)
        return WorkloadPlan(tuple(RankPlan(owned=owned, is_straggler=slow) for owned, slow in ranks))

    def expect_moves(self, cost: MoveCost, bytes_of_units: float, comparing_s: float = 0.0) -> None:
        """Take what a move takes by the calibration, and the bytes of all units of a rank; alike on every rank.

        Args:
            comparing_s: seconds for which ranks compare products after a move away from home.
        """
        self._ownership.cost, self._ownership.bytes_of_units = cost, bytes_of_units
        self._ownership.comparing_s = comparing_s

    def expect_memory(self, memory: GroupMemory) -> None:
        """Give no rank more units than it has the memory for; alike on every rank.

        Where units that it has do not fit, they move at the next update, whatever that costs. Home, with which
        balancing is compared, is the division nearest to even shares that fits.
        """
        if self._memory is not None and memory.is_like(self._memory):
            return
        self._memory = memory
        if self.segments:
            self._ownership.home = fitting_shares(self.num_ranks, memory.most_shares)

    @property
    def _most_shares(self) -> tuple[float, ...] | None:
        return self._memory.most_shares if self._memory is not None else None

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Return, for every rank, seconds of a step at full work and even shares; empty before all were measured."""
        known = [times.busy_s for times in self._times if times is not None]
        return tuple(known) if len(known) == self.num_ranks else ()

    @property
    def ownership(self) -> OwnershipDecision:
        """Return the decision who owns what, to be read: whether a user holds it, what is owed, what a move costs."""
        return self._ownership

    @property
    def bounds(self) -> Bounds | None:
        """Return below which time no exact division can bring a step; None before all ranks were measured."""
        known = [times for times in self._times if times is not None]
        if len(known) != self.num_ranks or not all(math.isfinite(times.busy_s) for times in known):
            return None
        bounds, more_s = Bounds.of(known), self._communication.seconds(())
        return Bounds(bounds.of_products + more_s, bounds.of_units + more_s)

    @property
    def is_another_division_wanted(self) -> bool:
        """Return whether units would be divided otherwise if moving them cost nothing, and it is no matter of noise."""
        return bool(self._ownership.rental.owed_s)

    def moved(self, num_bytes: float, seconds: float, comparing_s: float = 0.0) -> None:
        """Note that the move of the last plan has been made; to be called alike on every rank.

        Args:
            num_bytes: of the rank that sent or received most.
            seconds: that it took.
            comparing_s: for which ranks compared products after it.
        """
        self._ownership.learn(num_bytes, seconds, comparing_s)

    def refuse_move(self, in_force: Sequence[float]) -> WorkloadPlan:
        """Note that the move of the last plan was not made, and nothing has changed; to be called alike on every rank.

        No move is tried for a while: for 8 updates, and twice as many each time.

        Args:
            in_force: the shares by which units are divided, and stay so.

        Returns:
            The plan in force from now on.
        """
        self._ownership.refuse(tuple(in_force))
        return self._spare_nobody()

    def set_owned(self, shares: Sequence[float]) -> WorkloadPlan:
        """Let ranks own these shares from now on, until a decision changes that.

        Args:
            shares: of every rank, in any unit.

        Raises:
            ValueError: if they are no such shares, or nothing can move.
        """
        return self._put(shares, is_held=False)

    def hold_owned(self, shares: Sequence[float] | None) -> WorkloadPlan:
        """Let ranks own these shares from now on, whatever decisions say; None lets decisions go on from there.

        Raises:
            ValueError: as :meth:`set_owned`.
        """
        return self._put(self._ownership.owned if shares is None else shares, is_held=shares is not None)

    def _put(self, shares: Sequence[float], *, is_held: bool) -> WorkloadPlan:
        owned = self._ownership.checked(shares)
        if owned == self._ownership.owned:
            self._ownership.is_held = is_held
            return self.current_plan()
        self._ownership.put(shares, is_held=is_held)
        return self._spare_nobody()

    def _spare_nobody(self) -> WorkloadPlan:
        """Nothing is pruned or lent, but for a forced ratio."""
        self.num_calibration_steps = 0
        return self.initial_plan()

    def fingerprint(self, plan: WorkloadPlan, *values: object) -> float:
        """Return a hash of all that decisions follow from, of ``plan``, and of plain ``values``."""
        return fingerprint_of_loans(
            (self._loans, self._loans_then, plan.loans),
            encoded(self, leave_out=("_loans", "_loans_then")),
            [(rank.pruned, rank.lent, rank.is_straggler, rank.owned) for rank in plan.ranks],
            plan.predicted_step_s,
            values,
        )

    def after_loading(self) -> None:
        """Leave what this configuration does not do; see :meth:`zeroresize.balancer.Balancer.load_state_dict`.

        A mode that does not prune, lend or move does not take over what another did. Units that are away stay so where
        decisions may move them, or where a user holds them; else the plan is that they are at home.

        Raises:
            ValueError: for a state of another number of ranks.
        """
        of_ranks = (self._shares, self._measured_under, self._are_stragglers, self._times, self._usual) + (
            self._spells.ages,
            self._spells.costs,
        )
        others = [len(of_rank) for of_rank in of_ranks if len(of_rank) != self.num_ranks]
        if others:
            raise ValueError(f"the balancer's state is of {others[0]} ranks, this process group has {self.num_ranks}")
        if not self._ownership.is_home and not (self.config.may_move or self._ownership.is_held):
            self._ownership.put((1.0,) * self.num_ranks, is_held=False)
        if self._goes_beyond_configuration():
            self._spare_nobody()
        if self.config.forced_ratio is not None:
            self.num_calibration_steps = 0

    @property
    def _most_pruned(self) -> float:
        """What all ranks together may prune, in units of one rank's products."""
        is_paper = self.config.mode == "semi" and self.config.paper.semi_rule == "paper"
        is_bounded = self.config.forced_ratio is None and not is_paper
        return self.config.budget * self.num_ranks if is_bounded else math.inf

    def _goes_beyond_configuration(self) -> bool:
        """Whether what is loaded was decided by another configuration, and does what this one does not allow."""
        config = self.config
        pruned = [rank.pruned for rank in self._shares]
        forced = forced_division(config, [False] * self.num_ranks)
        return (
            (config.mode not in PRUNING_MODES and any(pruned))
            or (config.mode not in MIGRATING_MODES and bool(self._loans))
            or (config.forced_ratio is None and max(pruned) > config.max_ratio)
            or math.fsum(map(operator.mul, pruned, self._ownership.products)) > self._most_pruned + 10.0**-_DECIMALS
            or any(forced.pruned + forced.lent)
        )

    def _plan(self, predicted_step_s: float) -> WorkloadPlan:
        borrowed = borrowed_shares(self._loans, self.num_ranks, self._ownership.products)
        return WorkloadPlan(
            ranks=tuple(
                RankPlan(shares.pruned, shares.lent, share, owned, slow)
                for shares, share, owned, slow in zip(
                    self._shares, borrowed, self._ownership.owned, self._are_stragglers, strict=True
                )
            ),
            predicted_step_s=predicted_step_s,
            loans=self._loans,
        )

    def _floored(self, times: Sequence[RankTimes]) -> GroupTimes:
        """The times, but what is told by steps in which a rank did less makes it no faster than one that did all.

        The curve may have changed with the speed; a rank that only seems fast would make stragglers of all the others.
        """
        spared = [
            now.spared or then.spared or min(owned, before) < 1.0
            for now, then, owned, before in zip(
                self._shares, self._measured_under, self._ownership.owned, self._ownership.owned_before, strict=True
            )
        ]
        usual = zip(self._usual, spared, self._are_stragglers, strict=True)
        whole_s = min((own.busy_s for own, was, slow in usual if own and not was and not slow), default=0.0)
        return GroupTimes(
            dataclasses.replace(
                rank_times,
                rest_s=rank_times.rest_s * whole_s / rank_times.busy_s,
                gemm_s=rank_times.gemm_s * whole_s / rank_times.busy_s,
            )
            if was and rank_times.busy_s < whole_s
            else rank_times
            for rank_times, was in zip(times, spared, strict=True)
        )

    def _lasting(self, times: GroupTimes, are_slow: Sequence[bool]) -> GroupTimes:
        """The times, but those of ranks that are slow for a moment only: what they took before."""
        for rank, (rank_times, slow, straggles) in enumerate(zip(times, are_slow, self._are_stragglers, strict=True)):
            if not slow or straggles or self._usual[rank] is None:
                self._usual[rank] = rank_times
        if all(own is usual for own, usual in zip(times, self._usual, strict=True)):
            return times
        return GroupTimes(usual for usual in self._usual if usual is not None)

    def _deviations(self, times: Sequence[RankTimes]) -> tuple[Floats, float]:
        """([ranks] relative standard deviations, that of a rank that is spared nothing).

        Who has seen little noise so far may expect what others have seen.
        """
        deviations = np.array([one.deviation for one in times])
        whole = deviations[[not now.spared for now in self._shares]]
        usual = math.sqrt(float(np.cumsum(whole**2)[-1]) / len(whole)) if len(whole) else 0.0
        return np.maximum(deviations, usual), usual

    def _are_slow(self, times: GroupTimes, deviations: Floats, reference_s: float) -> tuple[bool, ...]:
        were, busy_s = self._are_stragglers, times.curves.busy_s
        first = CERTAINTY_LOSSY if self.config.mode in PRUNING_MODES else CERTAINTY_EXACT
        surely_s = busy_s / (1.0 + np.where(were, CERTAINTY_KEPT, first) * deviations)
        return find_stragglers(busy_s.tolist(), reference_s, self.config.tolerance, were, surely_s.tolist())

    def _given(self, times: GroupTimes) -> GroupTimes:
        """What ranks take for all that they own where a user has said what that is; else at even shares."""
        return times.owning(self._ownership.products) if self._ownership.is_held else times

    def _divide(self, times: GroupTimes, reference_s: float, deviation: float) -> bool:
        """Decide what is pruned and lent of what ranks own; see :meth:`_change_to`.

        While units are away something is lent only until they move again, as moving costs less than lending for long.
        """
        ownership = self._ownership
        may_lend = self.config.mode != "exact" or not ownership.account.debt_s
        if self.config.may_move and not ownership.is_home and not ownership.is_held:
            may_lend = may_lend and self.is_another_division_wanted
        migration = self._communication.migration if may_lend or self.config.mode != "semi" else None
        may_relieve = may_lend or self.config.mode != "exact"
        stragglers = self._are_stragglers if may_relieve else [False] * self.num_ranks
        in_force = times.owning(ownership.products)
        normal_s = slowest_normal_s(self._given(times), stragglers)
        division = wanted_division(self.config, in_force, stragglers, reference_s, migration, normal_s)
        loans = loans_of(division.lent, division.slack)
        if self.config.forced_ratio is None and not self._have_room_for(loans):
            division = wanted_division(self.config, in_force, stragglers, reference_s, None, normal_s).without_loans
        return self._change_to(division, in_force, times, deviation)

    def _have_room_for(self, loans: Sequence[Loan]) -> bool:
        """Whether who computes for others has the memory for that, as if it owned it."""
        if self._memory is None or not loans:
            return True
        borrowed = borrowed_shares(loans, self.num_ranks, self._ownership.products)
        return self._memory.have_room_for(borrowed, self._ownership.owned)

    def _change_to(self, division: WorkDivision, in_force: GroupTimes, times: GroupTimes, deviation: float) -> bool:
        """Change the plan if what that saves exceeds what it costs, and noise, or if somebody has recovered.

        Costs are in seconds a step: of a step's length, and of what is pruned in it.

        Args:
            in_force: the times of what ranks own.
            times: those at even shares.
            deviation: of a rank that is spared nothing, relative.

        Returns:
            Whether the plan stays although a rank may have recovered, as much less is wanted for it.
        """
        pruned = [_rounded_down(one) for one in division.pruned]
        lent = [round(one, _DECIMALS) for one in division.lent]
        wanted = [Shares(*shares) for shares in zip(pruned, lent, strict=True)]
        slack = tuple(round(one, _DECIMALS) for one in division.slack) if division.slack is not None else None
        loans = loans_of(lent, slack)
        if self.config.forced_ratio is None and self._is_possible():
            slowest_s = float(in_force.curves.busy_s.max())
            price_s = KEPT_GAIN * self.config.min_gain * slowest_s / max(sum(self._are_stragglers), 1)
            new_s, now_s = (
                self._step_s(times, shares, lending)
                for shares, lending in ((wanted, loans), (self._shares, self._loans))
            )
            every_rank = zip(self._shares, wanted, self._ownership.products, strict=True)
            fewer = math.fsum((now.pruned - new.pruned) * owned for now, new, owned in every_rank)
            saved_s = now_s - new_s + price_s * max(fewer, 0.0)
            if not self._minimises:
                same = all(bool(now.spared) == bool(new.spared) for now, new in zip(self._shares, wanted, strict=True))
                saved_s = abs(saved_s) if same else math.inf
            # What is no longer dropped needs no certainty: it is dropped for something, or it is not dropped.
            certainty = 0.0 if fewer > 0.0 and not any(pruned) else CERTAINTY_KEPT
            if not is_saving(saved_s, now_s, COST_IN_VAIN / DURATION + certainty * deviation):
                pairs = zip(self._shares, wanted, strict=True)
                return any(now.spared - new.spared >= _NEW for now, new in pairs)
        self._shares, self._loans = wanted, loans
        return False

    def _is_possible(self) -> bool:
        """Whether the plan in force relieves stragglers only, and who computes for others has the memory for it."""
        ranks = zip(self._are_stragglers, self._shares, strict=True)
        return all(slow or not now.spared for slow, now in ranks) and self._have_room_for(self._loans)

    @property
    def _minimises(self) -> bool:
        """Whether the configuration asks for the shortest steps, and not for a rule's plan whatever it costs."""
        config = self.config
        return config.paper.num_migrating == "auto" and "paper" not in (
            config.paper.semi_rule if config.mode == "semi" else config.paper.mig_rule if config.mode == "mig" else ""
        )

    def _move(
        self, times: GroupTimes, reference_s: float, deviation: float, deviations: Floats, saved: Sequence[float]
    ) -> bool:
        """Give units to other ranks if not doing so has cost as much as the move there and back; whether they move.

        Args:
            deviation: of a rank that is spared nothing, relative.
            deviations: of every rank.
            saved: of every rank, what share of a step its slowness costs.
        """
        ownership = self._ownership
        if ownership.is_held or not self.config.may_move or not self.segments:
            return False
        noise = CERTAINTY_KEPT * deviation
        wanted = wanted_ownership(
            self.config,
            times,
            self._are_stragglers,
            reference_s,
            self._communication.migration,
            ownership.segments,
            noise=noise,
            are_pruning=any(shares.pruned for shares in self._shares),
            most_shares=self._most_shares,
        )
        if self._memory is not None and self._memory.excess_by(wanted) > self._memory.excess_by(ownership.owned):
            wanted = ownership.owned
        if self._memory is not None and self._memory.is_better(wanted, than=ownership.owned):
            return ownership.update(wanted, 0.0, self.config.update_every, must=True)
        if wanted == ownership.owned == ownership.home:
            ownership.update(wanted, 0.0, self.config.update_every)
            return False
        # What is pruned counts as if it were computed: that is what moving is to save, too.
        now_s = self._step_s(times, [Shares(lent=own.lent) for own in self._shares], self._loans)
        now_s -= self._communication.seconds(())
        home_s = self._home_s(times)
        is_worse_than_home = not ownership.is_home and now_s > (1.0 + COST_IN_VAIN) * home_s
        if is_worse_than_home:
            ownership.came_late(now_s - home_s)
        gain_s, comes_too_late = 0.0, False
        if wanted not in (ownership.owned, ownership.home):
            gain_s = max(home_s - owned_step_s(times, wanted, ownership.segments), 0.0)
            relieved = [
                rank for rank, slow in enumerate(self._are_stragglers) if slow and wanted[rank] < ownership.owned[rank]
            ]
            comes_too_late = bool(relieved) and all(
                self._spells.speak_against(rank, saved[rank], gain_s, ownership.late_s) for rank in relieved
            )
            if comes_too_late and is_worse_than_home:
                wanted, gain_s, comes_too_late = ownership.home, 0.0, False
        saved_s = 0.0
        if wanted != ownership.owned:
            saved_s = now_s - owned_step_s(times, wanted, ownership.segments)
            if wanted == ownership.home:
                # Who may only seem slower than others, as he owns little, is seen there.
                saved_s = now_s - self._home_s(times, 1.0 + CERTAINTY_KEPT * deviations)
            # To go or to come home it is certain who is slow; from one division to another everybody's times count.
            elif not ownership.is_home:
                if saved_s <= 0.0 and self.config.mode == "semi":
                    saved_s = self._saved_with_pruning_s(times, reference_s, wanted, noise)
                saved_s = beyond_noise(saved_s, now_s, COST_IN_VAIN / DURATION + deviation)
        every = self.config.update_every
        return ownership.update(wanted, saved_s, every, step_s=now_s, gain_s=gain_s, waits=comes_too_late)

    def _home_s(self, times: GroupTimes, faster: Floats | float = 1.0) -> float:
        """Seconds of a step at home, nothing pruned or lent.

        Args:
            faster: how many times as fast each rank may be as it seems.
        """
        home = self._ownership.home
        if len(set(home)) == 1:
            return float((times.curves.busy_s / faster).max())
        factors = np.broadcast_to(faster, (self.num_ranks,)).tolist()
        fast = GroupTimes(rank.faster(factor) for rank, factor in zip(times, factors, strict=True))
        return owned_step_s(fast, home, self._ownership.segments)

    def _saved_with_pruning_s(
        self, times: GroupTimes, reference_s: float, wanted: tuple[float, ...], noise: float
    ) -> float:
        """By how much a step becomes shorter when units move so that more can be pruned, less what that is to save."""
        config, slow, segments = self.config, self._are_stragglers, self._ownership.segments
        exact = wanted_shares(times, slow, segments, noise=noise, most_shares=self._most_shares)
        exact_s = owned_step_s(times, exact, segments)
        in_force, then = (times.owning(owned_shares(shares, segments)) for shares in (self._ownership.owned, wanted))
        migration, normal_s = self._communication.migration, slowest_normal_s(times, slow)
        division = wanted_division(config, then, slow, reference_s, migration, normal_s)
        now = WorkDivision(*zip(*((shares.pruned, shares.lent) for shares in self._shares), strict=True))
        now_s = self._step_s(times, self._shares, self._loans) - self._communication.seconds(())
        saved_s = now_s - divided_step_s(times, wanted, segments, division, migration)
        return saved_s + config.min_gain * exact_s / max(sum(slow), 1) * (
            now.dropped(in_force) - division.dropped(then)
        )

    def _account(self, times: GroupTimes, deviations: Floats) -> None:
        """What the plan under which ``times`` were measured has lost against home, nothing pruned or lent.

        A rank that does less than the others is taken to be as fast as it may well be: what is not sure is no gain.
        """
        owned = self._ownership.owned_before
        is_home = owned == self._ownership.home and not any(own.spared for own in self._measured_under)
        sure = GroupTimes(
            rank_times.faster(1.0 + CERTAINTY_KEPT * deviation) if shares.spared or share < 1.0 else rank_times
            for rank_times, deviation, shares, share in zip(
                times, deviations.tolist(), self._measured_under, owned, strict=True
            )
        )
        home_s = self._home_s(sure) + self._communication.seconds(())
        step_s = home_s if is_home else self._step_s(sure, self._measured_under, self._loans_then, owned)
        every = self.config.update_every
        self._ownership.account.take((step_s - home_s) * every, step_s * every, every)

    def _step_s(
        self,
        times: GroupTimes,
        shares: Sequence[Shares],
        loans: Sequence[Loan],
        owned: tuple[float, ...] | None = None,
    ) -> float:
        owned = self._ownership.owned if owned is None else owned
        if len(set(owned)) == 1:
            spared, lent = [rank.spared for rank in shares], [rank.lent for rank in shares]
            return max(predicted_busy_s(times, spared, loans)) + self._communication.seconds(lent)
        products = owned_shares(owned, self._ownership.segments)
        busy_s = owned_step_s(
            times,
            owned,
            self._ownership.segments,
            pruned=[rank.pruned for rank in shares],
            lent=[rank.lent for rank in shares],
            borrowed=borrowed_shares(loans, self.num_ranks, products) if loans else (),
        )
        return busy_s + self._communication.seconds([rank.lent * of for rank, of in zip(shares, products, strict=True)])

    def _calibrate(
        self, times: GroupTimes, deviations: Floats, step_s: float, before: Sequence[Shares], *, is_in_doubt: bool
    ) -> None:
        spared = [now.spared > 0.0 for now in self._shares]
        if self.config.forced_ratio is not None or not any(spared):
            return
        is_new = any(
            now.spared and abs(now.spared - then.spared) >= _NEW for now, then in zip(self._shares, before, strict=True)
        )
        self.num_calibration_steps = self._calibration.due(
            self.config.update_every,
            step_s,
            float(times.curves.busy_s.max()),
            is_new=is_new or is_in_doubt,
            is_unsure=float(deviations[spared].max()) > UNSURE,
            is_doubtful=float(deviations[spared].max()) > DOUBTFUL,
        )
