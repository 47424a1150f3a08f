"""When a change of ownership pays: units are rented where they are, and moving them is bought.

:class:`~zeroresize.policy.moves.rental.Rental` adds up what staying costs, for each rank that units are to move for.
The price of a move away is that of the move there and back, so coming home is free: units come home as soon as that
surely makes steps shorter. A rank that recovers is noticed some steps later only, and slowness may be over before a
move has paid. So what a division saves is counted until units move again: where that was little beside its price,
prices double (:meth:`~zeroresize.policy.moves.rental.Rental.judge`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from zeroresize.plan.ownership import CopyCosts, SegmentWork, checked_shares, most_travelling, owned_shares
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import FIRST_PAUSE, Option, Reason, Rental, Verdict
from zeroresize.policy.tensor.costs import MigrationCost
from zeroresize.policy.tensor.estimation.times import RankTimes
from zeroresize.policy.tensor.rules.ownership import merged, owned_step_s
from zeroresize.policy.tensor.rules.sharing import WorkDivision
from zeroresize.utils.codec import UNSAVED

#: A move was good if it has saved its price so many times by the next one: a load that swings by a fifth is not
#: followed for what hardly pays.
_GOOD = 4.0
#: Before a move has shown what it saves it must have been missed for so many times its price, as if one had
#: disappointed: a load that swings by a fifth of a rank's speed otherwise makes a job longer than it is without moves.
UNPROVED = 2.0
#: Name of the option that brings units home.
_HOME = "home"

#: What each rank owns, mean 1.
Division = tuple[float, ...]


@dataclass
class OwnershipDecision:
    """Decide who owns what in a group, update by update.

    Attributes:
        segments: in which units can change hands, merged where they divide alike; none, and nothing moves.
        bytes_of_units: bytes of the units of one rank at home, with all that moves along.
        home: what units come home to, mean 1: even shares, or where memory does not suffice the nearest that fit.
        owned: what each rank owns by the last decision, mean 1.
        owned_before: what it owned before that.
        is_held: whether a user decides.
        cost: of a move, as far as is known.
        comparing_s: seconds for which ranks compare products after a move away from home.
        rental: what staying has cost, and pauses.
        copy_costs: what rows that several ranks hold were measured to cost; None before.
        away_s: seconds that steps since the last move have saved against home, less what makes it good; 0 at home.
        is_way_home_paid: whether it is; not after a move that memory made.
    """

    num_ranks: int = field(metadata=UNSAVED)
    segments: tuple[SegmentWork, ...] = field(default=(), metadata=UNSAVED)
    bytes_of_units: float = field(default=0.0, metadata=UNSAVED)
    home: Division = field(init=False, metadata=UNSAVED)
    owned: Division = field(init=False)
    owned_before: Division = field(init=False)
    is_held: bool = field(default=False, init=False)
    cost: MoveCost = field(default_factory=MoveCost, init=False)
    comparing_s: float = field(default=0.0, init=False)
    rental: Rental = field(default_factory=lambda: Rental(doubt=UNPROVED), init=False)
    copy_costs: CopyCosts | None = field(default=None, init=False)
    away_s: float = field(default=0.0, init=False)
    is_way_home_paid: bool = field(default=True, init=False)
    _verdict: Verdict = field(default=Verdict(Reason.NOTHING_SAVES), init=False, metadata=UNSAVED)
    _was_held: bool = field(default=False, init=False, metadata=UNSAVED)

    def __post_init__(self) -> None:
        self.segments = merged(self.segments)
        self.home = self.owned = self.owned_before = (1.0,) * self.num_ranks

    def expect_segments(self, segments: Sequence[SegmentWork], copy_costs: CopyCosts) -> None:
        """Count units of these segments from now on."""
        self.segments, self.copy_costs = merged(segments), copy_costs

    def after_loading(self) -> None:
        """Let everything be at home where nothing can move.

        Raises:
            ValueError: for a state of another number of ranks.
        """
        if not len(self.owned) == len(self.owned_before) == self.num_ranks:
            raise ValueError(f"it is of {len(self.owned)} ranks, this process group has {self.num_ranks}")
        if not self.can_move:
            self.owned = self.owned_before = self.home
            self.is_held = False

    @property
    def verdict(self) -> Verdict:
        """Return that of the last update, or that a user decides."""
        return Verdict(Reason.HELD) if self.is_held else self._verdict

    @property
    def can_move(self) -> bool:
        """Whether there are units that can change hands."""
        return not all(segment.stays for segment in self.segments)

    @property
    def is_home(self) -> bool:
        """Whether every rank owns what it owns at home."""
        return self.owned == self.home

    @property
    def products(self) -> tuple[float, ...]:
        """Return what each rank owns of the products, in whole units, in units of a rank's at even shares."""
        return _products_of(self.owned, self.segments)

    def checked(self, shares: Sequence[float]) -> Division:
        """Return shares that a user gives, in any unit, scaled to mean 1.

        Raises:
            ValueError: if they are not one of each rank, finite, not negative and not all 0, or nothing can move.
        """
        owned = checked_shares(shares, self.num_ranks)
        if len(set(owned)) > 1 and not self.can_move:
            raise ValueError(f"shares={list(shares)}: the model has no units that can change their owner")
        return owned

    def put(self, shares: Sequence[float], *, is_held: bool) -> None:
        """Put in force from now on what a user has decided."""
        self.owned_before, self.owned = self.owned, self.checked(shares)
        self.away_s, self.is_way_home_paid = 0.0, True
        self._was_held, self.is_held = self.is_held, is_held
        self.rental.settle()

    def price_s(self, wanted: Division) -> float:
        """Return the seconds of a move from the present division to another, and back; one way home, 0 once paid."""
        moving = (segment.work for segment in self.segments if not segment.stays)
        comes_home, work = wanted == self.home, math.fsum(moving)
        if (comes_home and self.is_way_home_paid) or not work:
            return 0.0
        num_bytes = most_travelling(self.owned, wanted, self.segments) / work * self.bytes_of_units
        if comes_home:
            return self.cost.seconds(num_bytes)
        return self.cost.there_and_back(num_bytes) + self.comparing_s if num_bytes else 0.0

    def step_s(
        self,
        times: Sequence[RankTimes],
        shares: Sequence[float] | None = None,
        division: WorkDivision | None = None,
        migration: MigrationCost | None = None,
    ) -> float:
        """Return :func:`~.owned_step_s` by these shares, at home where none are given."""
        return owned_step_s(times, self.home if shares is None else shares, self.segments, division, migration)

    def update(
        self,
        savings_s: Mapping[Division, float],
        step_s: float,
        num_steps: int,
        *,
        stay_saves_s: float = 0.0,
        is_needed: bool = False,
    ) -> Verdict:
        """Decide whether units move.

        Args:
            savings_s: by how many seconds each other division makes a step shorter, negative where longer, 0 where that
                is noise.
            step_s: seconds of a step as it is.
            num_steps: until the next decision.
            stay_saves_s: by how many seconds a step is shorter now than at home.
            is_needed: whether the present division cannot stay, whatever another costs.
        """
        self.owned_before, self._was_held = self.owned, self.is_held
        if self.is_held:
            return self.verdict
        if not self.is_home:
            self.away_s += stay_saves_s * num_steps
        divisions: dict[str, Division] = {}
        for wanted in savings_s:
            divisions |= dict.fromkeys(self._names(wanted), wanted)
        options = [
            Option(name, savings_s[wanted], self.price_s(wanted), is_needed=is_needed)
            for name, wanted in divisions.items()
        ]
        verdict = self._verdict = self.rental.decide(options, step_s, num_steps, least_saving=0.0)
        if verdict.is_due and verdict.option is not None:
            if not self.is_home:
                self.rental.judge(is_kept=self.away_s >= 0.0)
            self.owned = divisions[verdict.option.name]
            self.away_s = 0.0 if self.is_home else -_GOOD * verdict.option.price_s
            self.is_way_home_paid = not is_needed
            self.rental.settle()
            if is_needed:
                self.rental.pause = FIRST_PAUSE
        return verdict

    def refuse(self, in_force: Division) -> None:
        """Note that the last move was not made: ``in_force`` stays, and nothing is tried for a while."""
        self.is_held = self._was_held and in_force == self.owned_before
        self.owned = self.owned_before = in_force
        self.away_s = 0.0
        self.rental.refuse()

    def learn(self, num_bytes: float, seconds: float, comparing_s: float = 0.0) -> None:
        """Learn from a move that was made, after which ranks compared products for so long; 0 if they did not."""
        self.cost = self.cost.learned(num_bytes, seconds)
        if comparing_s > 0.0:
            self.comparing_s = (self.comparing_s + comparing_s) / 2.0
        self.rental.succeed()

    def _names(self, wanted: Division) -> list[str]:
        """Name the option once for each rank that units move for, whose shares change at least half as much as any
        other's: it stays the same while others join or leave."""
        if wanted == self.home:
            return [_HOME]
        changes = [new - now for now, new in zip(self.owned, wanted, strict=True)]
        most = max(map(abs, changes))
        return [
            f"rank {rank} {'gets' if change > 0.0 else 'gives'} units"
            for rank, change in enumerate(changes)
            if most and 2.0 * abs(change) >= most
        ]


@lru_cache
def _products_of(owned: Division, segments: tuple[SegmentWork, ...]) -> tuple[float, ...]:
    """What each rank owns of the products, in whole units, in units of a rank's at even shares."""
    return owned_shares(owned, segments)
