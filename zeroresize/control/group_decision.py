"""What a group decides: every rank's numbers go out at one update, and at the next everybody has the same plan."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from zeroresize.comm.exchange import Exchange
from zeroresize.comm.pausing import Restraint
from zeroresize.config import BalanceConfig
from zeroresize.config.keys import MIGRATING_MODES
from zeroresize.plan.group import WorkloadPlan
from zeroresize.plan.ownership import CopyCosts, SegmentWork
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.slowness.group_slowness import GroupSlowness
from zeroresize.policy.slowness.windows import StepWindow
from zeroresize.policy.tensor.controller import Controller
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost
from zeroresize.policy.tensor.estimation.communication import CollectiveTimes
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.memory import GroupMemory, HeldBytes
from zeroresize.policy.tensor.what_if import WhatIf
from zeroresize.utils.texts import alike, at_fault

#: What a rank tells of its times, of what pruning costs, and of that at each point where it was measured.
_TIMES = ("rest_s", "gemm_s", "gather_fill_scale", "deviation", "moving_rest", "outside_s")
_COSTS = ("borrowing", "widening")
_CURVES = ("ratios", "gemm_share", "gather_fill_s")


@dataclass(frozen=True)
class RankNumbers:
    """Describe what a rank tells the others at an update."""

    fingerprint: float  # of all that it has decided
    wait_s: float  # seconds a step that it waited in collectives; NaN where none was measured
    held: HeldBytes  # what it holds; 0 where that is not watched
    times: RankTimes  # at full work; NaN before any were measured

    def to_row(self) -> list[float]:
        """Return the numbers as they are sent, as many from each rank."""
        cost = self.times.cost
        scalars = [getattr(self.times, name) for name in _TIMES] + [getattr(cost, name) for name in _COSTS]
        curves = [number for name in _CURVES for number in getattr(cost, name)]
        return [self.fingerprint, self.wait_s, self.held.fixed, self.held.of_even_share, *scalars, *curves]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> RankNumbers:
        """Return what :meth:`to_row` made."""
        numbers = iter(row)
        fingerprint, wait_s, held = next(numbers), next(numbers), HeldBytes(next(numbers), next(numbers))
        times, (borrowing, widening) = {name: next(numbers) for name in _TIMES}, (next(numbers), next(numbers))
        rest = list(numbers)
        length = len(rest) // len(_CURVES)
        ratios, gemm_share, gather_fill_s = (tuple(rest[at : at + length]) for at in range(0, len(rest), length))
        cost = ResizingCost(ratios, gemm_share, gather_fill_s, borrowing, widening)
        return cls(fingerprint, wait_s, held, RankTimes(**times, cost=cost))


@dataclass(frozen=True)
class DecisionState:
    """Holds what the decision of a group goes on from, the same on every rank; names as of :class:`GroupDecision`."""

    controller: Controller
    what_if: tuple[Controller, ...]
    config_text: str  # the configuration under which ranks sent what was received
    received: list[RankNumbers] | None  # of every rank, what it sent at the last update; None where it was taken
    lent_when_sent: tuple[float, ...]
    num_calibration_steps: int
    migration: MigrationCost | None
    migration_transport: str  # over which Φ1 was measured


class GroupDecision:
    """Keeps the group's plan, from one exchange to the next.

    Args:
        config: how to balance.
        num_ranks: size of the group.
        exchange: with the other ranks; of all data-parallel replicas of the group, replica by replica, where they are
            to decide alike: then the slowest replica of each rank counts. None in a group of one.
        segments: whose units may change hands.

    Attributes:
        controller: decides; alike on every rank.
        what_if: decides, too, as other modes would.
        decided: the plan that measurements want; ``plan`` is what is in force of it, all unless balancing is paused.
        num_calibration_steps: for how many of the next steps another plan is in force, :attr:`calibration_plan`.
        outside_s: of every rank, seconds of a step before its first balanced layer; empty before all were measured.
        memory: what the ranks hold and may hold, as they told last; None without ``config.memory_limits``.
        migration: Φ1 by the calibration, the same on every rank; None where nobody can lend, or before it is known.
        slowness: who is slow, since when and why, by the times at even shares; not in mode "off", which watches.
        even_step_s: seconds of a step if ranks owned what they do at home; NaN before all were measured.
        saved_s: seconds that plans have saved on that so far, by what they predict, without those of moves.
    """

    def __init__(
        self,
        config: BalanceConfig,
        num_ranks: int,
        exchange: Exchange | None,
        segments: Sequence[SegmentWork] = (),
    ) -> None:
        self._config, self._num_ranks, self._exchange, self._segments = config, num_ranks, exchange, segments
        self.controller = Controller(config, num_ranks, segments)
        self.restraint, self._wishes = Restraint(), list[float]()
        self.plan = self.decided = self.controller.initial_plan()
        self.what_if = WhatIf(config, num_ranks, segments)
        self._received: list[RankNumbers] | None = None
        self._lent_when_sent = (0.0,) * num_ranks
        self.memory: GroupMemory | None = None
        self.migration: MigrationCost | None = None
        self.num_calibration_steps = 0
        self.outside_s: tuple[float, ...] = ()
        self.slowness = GroupSlowness(num_ranks)
        self.even_step_s, self.saved_s, self._decided_at = math.nan, 0.0, 0

    def update(self, numbers: RankNumbers, agreed: object) -> None:
        """Decide from what was sent at the last update, and send this rank's numbers.

        Args:
            numbers: of this rank; their fingerprint is set here.
            agreed: whatever every rank must have decided alike, with a ``repr`` that tells it.

        Raises:
            RuntimeError: if the ranks of the group do not agree on their plans, or on ``agreed``.
        """
        if self._exchange is None:
            return
        lent_in_force = tuple(rank.lent * rank.owned for rank in (self.calibration_plan or self.plan).ranks)
        self.num_calibration_steps = 0
        self._collect()
        if self._received is not None:
            self._decide(self._received)
            self._received = None
        self._post(self._exchange, numbers, agreed)
        # Who computes for whom must be agreed on before anybody sends anything.
        if self._config.mode in MIGRATING_MODES:
            self._require_equal(self._collect())
        self._lent_when_sent = lent_in_force
        if self._wishes:
            self.restraint.agree(self._wishes, self._exchange.where.num_steps, tells=self._exchange.group.rank == 0)
        if self.restraint.state == "advice":
            both = zip(self.plan.ranks, self.decided.ranks, strict=True)
            ranks = tuple(dataclasses.replace(rank, is_straggler=now.is_straggler) for rank, now in both)
            step_s = self.controller.predict_step_s(self.plan)
            self.plan = dataclasses.replace(self.plan, ranks=ranks, predicted_step_s=step_s)
        else:
            self._put(self.decided, self.plan.owned)

    def require_agreement(self, numbers: RankNumbers, agreed: object) -> None:
        """Compare now what the ranks of the group would decide from; collective, and nothing may be under way.

        Raises:
            RuntimeError: on every rank, if they differ; or if not all ranks come.
        """
        if self._exchange is not None:
            self._post(self._exchange, numbers, agreed)
            self._require_equal([row[0] for row in self._exchange.collect() or ()])

    def expect_memory(self, memory: GroupMemory) -> None:
        """Decide from now on within the ranks' memory; alike on all ranks."""
        self.memory = memory
        for controller in (self.controller, *self.what_if.controllers):
            controller.expect_memory(memory)

    def expect_segments(self, segments: Sequence[SegmentWork], copy_costs: CopyCosts) -> None:
        """Count units of these segments from now on, as what carries decisions out does; alike on all ranks."""
        self._segments = segments
        for controller in (self.controller, *self.what_if.controllers):
            controller.ownership.expect_segments(segments, copy_costs)
        if self.memory is not None:
            self.expect_memory(self.memory.of_segments(segments))

    def expect_moves(self, cost: MoveCost, bytes_of_units: float, comparing_s: float = 0.0) -> None:
        """Learn what moves cost, as :meth:`.Controller.expect_moves`; alike on all ranks."""
        for controller in (self.controller, *self.what_if.controllers):
            controller.expect_moves(cost, bytes_of_units, comparing_s)

    def refuse_move(self, in_force: Sequence[float]) -> None:
        """Keep these shares in force, as nothing has changed hands, and plan no other move for a while."""
        self._put(self.controller.refuse_move(in_force))

    def hold_owned(self, shares: Sequence[float] | None) -> None:
        """Own by these shares whatever is measured; None to decide again."""
        self._put(self.controller.hold_owned(shares), self.plan.owned if shares is None else None)

    def next_step(self) -> None:
        """Count a step that ends without an update."""
        self.num_calibration_steps = max(self.num_calibration_steps - 1, 0)

    @property
    def state(self) -> DecisionState:
        """Return what a saved run needs; collect what is under way, or leave it where ranks have died."""
        with suppress(RuntimeError):
            self._collect()
        controller = self.controller
        if self.decided.owned != self.plan.owned:  # by advice only: who goes on from here has what is in force
            controller = copy.deepcopy(controller)
            controller.refuse_move(self.plan.owned)
        return DecisionState(
            controller,
            self.what_if.controllers,
            repr(self._config),
            self._received,
            self._lent_when_sent,
            self.num_calibration_steps,
            self.migration,
            self._config.migration_transport,
        )

    def go_on_from(self, state: DecisionState) -> None:
        """Go on from :attr:`state`; what is under way is dropped, since it belongs to what is left behind.

        Numbers that were sent under another configuration are dropped, too: what they tell of pruning may be of other
        ratios, or of columns that were not gathered.
        """
        self._collect()
        self.controller = state.controller
        self.what_if.go_on_with(state.what_if)
        self._received = state.received if state.config_text == repr(self._config) else None
        self._lent_when_sent = state.lent_when_sent
        is_like = state.migration_transport == self._config.migration_transport
        self.migration = state.migration if is_like else None
        self._put(self.controller.current_plan())
        self.num_calibration_steps = min(state.num_calibration_steps, self.controller.num_calibration_steps)

    @property
    def calibration_plan(self) -> WorkloadPlan | None:
        """The plan of a calibration step, if the next step is one: it spares nobody, to be measured."""
        return self.controller.whole_plan(self.plan.owned) if self.num_calibration_steps else None

    def _put(self, decided: WorkloadPlan, owned: Sequence[float] | None = None) -> None:
        """Put a plan in force; while balancing is paused nobody is spared, and units stay by the shares ``owned``."""
        self.plan = self.decided = decided
        if self.restraint.state != "on":
            self.plan = self.controller.whole_plan(owned or decided.owned)

    def _post(self, exchange: Exchange, numbers: RankNumbers, agreed: object) -> None:
        """Send this rank's numbers, with a hash of all that decisions follow from."""
        migration = dataclasses.astuple(self.migration) if self.migration is not None else None
        of_step = self._lent_when_sent, self.num_calibration_steps
        fingerprint = self.controller.fingerprint(self.decided, *of_step, migration, repr(agreed))
        exchange.post([*dataclasses.replace(numbers, fingerprint=fingerprint).to_row(), self.restraint.wish()])

    def _collect(self) -> list[float]:
        """Receive what was posted, if anything was; return the fingerprints of all ranks that have sent theirs."""
        rows = self._exchange.collect() if self._exchange is not None else None
        if rows is None:
            return []
        self._wishes, numbers = [row.pop() for row in rows], [RankNumbers.from_row(row) for row in rows]
        self._received = [_of_slowest(numbers[rank :: self._num_ranks]) for rank in range(self._num_ranks)]
        return [of_rank.fingerprint for of_rank in numbers]

    def _decide(self, received: list[RankNumbers]) -> None:
        self._require_equal([numbers.fingerprint for numbers in received])
        if self.restraint.state == "off":
            return
        measured = [numbers.times.checked() for numbers in received]
        are_known = not any(math.isnan(times.busy_s) for times in measured)
        self.outside_s = tuple(times.outside_s for times in measured) if are_known else ()
        if self._config.memory_limits is not None:
            held = [numbers.held for numbers in received]
            self.expect_memory(GroupMemory(self._config.memory_limits, held, self._segments))
        # Who comes late to the first collective holds up all, and no division of the layers' work makes up for that:
        # behind it all ranks begin together.
        late_s = max((times.outside_s for times in measured if not math.isnan(times.busy_s)), default=0.0)
        # What moves along is of the model and not of ranks: what disturbs all of them alike cancels in the mean.
        moving_rest = math.fsum(times.moving_rest for times in measured) / len(measured)
        measured = [dataclasses.replace(times, moving_rest=moving_rest) for times in measured]
        samples = [times.beginning_after(late_s) for times in measured]
        collectives = CollectiveTimes(_least_wait_s(received), self._lent_when_sent, self.migration)
        self.what_if.update(samples, collectives)
        self.decided = self.controller.update(samples, collectives)
        self.num_calibration_steps = self.controller.num_calibration_steps
        if are_known and self._exchange is not None and self._config.mode != "off":
            self._account(measured, self._exchange.where.num_steps)

    def _account(self, measured: Sequence[RankTimes], num_steps: int) -> None:
        """Note who is slow, and add up what the plan in force has saved since the last update."""
        # Of steps before a run was resumed, or without balancing, this plan has saved nothing.
        since, self._decided_at = min(num_steps - self._decided_at, self._config.update_every), num_steps
        home = self.controller.ownership.home
        self.even_step_s = self.controller.predict_step_s(self.controller.whole_plan(home))
        step_s = self.controller.predict_step_s(self.plan)
        self.saved_s += since * (self.even_step_s - step_s)
        of_steps = num_steps, since
        # No rank is compared with what it took while it owned another share.
        windows = [
            StepWindow(
                *of_steps, each.busy_s + each.outside_s, self.even_step_s, each.outside_s, each.gemm_s, inputs=share
            )
            for each, share in zip(measured, self.plan.owned, strict=True)
        ]
        self.slowness.update(windows)

    def _require_equal(self, fingerprints: Sequence[float]) -> None:
        """Check that these are equal: of all ranks that come, or of the group's, where replicas are merged already."""
        if len(set(fingerprints)) == 1 and not math.isnan(fingerprints[0]):
            return
        ranks, whose = list(range(len(fingerprints))), "group"
        if self._exchange is not None and len(self._exchange.ranks) > self._num_ranks:
            is_merged = len(fingerprints) == self._num_ranks
            ranks = ranks if is_merged else list(self._exchange.ranks)
            whose = "group, or replicas of them," if is_merged else "job"
        groups = alike(fingerprints, ranks)
        raise RuntimeError(
            f"the ranks of the {whose} hold different plans, or different states; those that hold the same: "
            f"{groups}{at_fault(groups)}. Call pin, release and load_state_dict alike on every rank, and load "
            "states that were saved together"
        )


def _least_wait_s(received: Sequence[RankNumbers]) -> float:
    waits_s = [numbers.wait_s for numbers in received]
    return math.nan if any(map(math.isnan, waits_s)) else min(waits_s)


def _of_slowest(replicas: Sequence[RankNumbers]) -> RankNumbers:
    """Reduce what a rank and its replicas sent to the longest times, the shortest wait, and most bytes.

    NaN where one of them knows no times, as they must wait for that one, too; and in place of fingerprints that differ.
    """
    if len(replicas) == 1:
        return replicas[0]
    held = HeldBytes(
        max(numbers.held.fixed for numbers in replicas), max(numbers.held.of_even_share for numbers in replicas)
    )
    checked = [numbers.times.checked().busy_s for numbers in replicas]
    slowest = max(range(len(checked)), key=lambda at: math.inf if math.isnan(checked[at]) else checked[at])
    fingerprints = {numbers.fingerprint for numbers in replicas}
    fingerprint = fingerprints.pop() if len(fingerprints) == 1 else math.nan
    return RankNumbers(fingerprint, _least_wait_s(replicas), held, replicas[slowest].times)
