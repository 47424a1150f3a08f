"""When a change of ownership pays: a ski rental of one candidate, the division that is wanted.

:class:`~zeroresize.policy.moves.rental.Rental` adds up what staying costs as long as the same ranks are to get
or give units. Units go to others when that is the price of the move there and back. They come home when it is the price
of one way, as the way out has paid for both, or when home was surely better for some updates, however little. A
straggler that changes place before its slowness has cost as much is never worth a move.

Small gains are not chased: after each move away the next one must have been missed for longer, the more the less it
saves. And :class:`~zeroresize.policy.moves.account.Account` is kept: where balancing has lost more than it may, the
next slowness must first have cost many times what is beyond that.

The price of moves is not all: a rank that recovers, or becomes slow after it was given units, is noticed some steps
later only, and until then the division is worse than even shares. What that has cost is remembered, and past spells
of slowness tell how often it is paid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroresize.plan.ownership import SegmentWork, checked_shares, owned_shares
from zeroresize.policy.moves.account import Account
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.moves.rental import FIRST_PAUSE, Rental
from zeroresize.policy.tensor.rules.ownership import merged
from zeroresize.utils.codec import UNSAVED

#: How much the newest comparison of products says of what comparisons take.
_WEIGHT = 0.7
#: How much the newest interval under a division that came too late says of what the next ones cost, what share of that
#: is forgotten at an update, and how many times what the move was to save one interval counts at most.
_WEIGHT_OF_LATE, _FORGETTING, _MOST_LATE = 0.5, 1 / 64, 2.0
#: Ranks whose share changes at least this part as much as any other's are those for whom units move.
_MOVERS = 0.5
#: Units come home after so many updates in which that was surely better, whatever the move takes.
_SURE_UPDATES = 4
#: Each move away of late adds to the price of the next one: (this share of a step / what that saves) ** 4 times the
#: price. After so many steps a move counts half.
_CHASED, _HALF_LIFE = 0.14, 1000
#: For so many updates it is not noticed that a division is good for nothing any more.
_UNNOTICED_UPDATES = 2
#: The candidate that is owed for: whatever division is wanted, as long as units move for the same ranks.
_WANTED = "wanted"


@dataclass
class OwnershipDecision:
    """Decide who owns what in a group, update by update.

    Args:
        num_ranks: size of the group.
        segments: in which units can change hands; none, and nothing moves.
        bytes_of_units: bytes of the units of one rank at home, with all that moves along.

    Attributes:
        segments: merged where they divide alike.
        home: what units come home to, mean 1: even shares, or where memory does not suffice the nearest that fit.
        owned: what each rank owns by the last decision, mean 1.
        owned_before: what it owned before that.
        is_held: whether a user decides.
        cost: of a move, as far as is known.
        rental: what the present division has cost since another was wanted, and pauses.
        movers: for whom units would move, each rank with whether it is to get more.
        gain_s: seconds of a step that the present division was to save, compared with even shares; 0 where no decision
            made it.
        comparing_s: seconds for which ranks compare products after a move away from home.
        late_s: seconds of a step that a division costs, compared with even shares, until it is noticed that it is good
            for nothing; 0 before that was seen.
        moves_lately: moves away from home that were decided, older ones counting less.
        sure: for so many updates it was surely better to come home.
        account: what balancing has lost.
    """

    num_ranks: int = field(metadata=UNSAVED)
    segments: Sequence[SegmentWork] = field(default=(), metadata=UNSAVED)
    bytes_of_units: float = field(default=0.0, metadata=UNSAVED)
    home: tuple[float, ...] = field(init=False, metadata=UNSAVED)
    owned: tuple[float, ...] = field(init=False)
    owned_before: tuple[float, ...] = field(init=False)
    is_held: bool = field(default=False, init=False)
    cost: MoveCost = field(default_factory=MoveCost, init=False)
    rental: Rental = field(default_factory=Rental, init=False)
    movers: frozenset[tuple[int, bool]] = field(default=frozenset(), init=False)
    gain_s: float = field(default=0.0, init=False)
    comparing_s: float = field(default=0.0, init=False)
    late_s: float = field(default=0.0, init=False)
    moves_lately: float = field(default=0.0, init=False)
    sure: int = field(default=0, init=False)
    account: Account = field(default_factory=Account, init=False)
    _was_held: bool = field(default=False, init=False, metadata=UNSAVED)
    _products: tuple[tuple[float, ...], tuple[float, ...]] = field(init=False, metadata=UNSAVED)

    def __post_init__(self) -> None:
        self.segments = merged(self.segments)
        self._work = math.fsum(segment.work for segment in self.segments)
        self.home = self.owned = self.owned_before = (1.0,) * self.num_ranks
        self._products = self.home, self.home

    def after_loading(self) -> None:
        """Let everything be at home where nothing can move.

        Raises:
            ValueError: for a state of another number of ranks.
        """
        if not len(self.owned) == len(self.owned_before) == self.num_ranks:
            raise ValueError(f"it is of {len(self.owned)} ranks, this process group has {self.num_ranks}")
        if not self.segments:
            self.owned = self.owned_before = self.home
            self.is_held = False

    @property
    def is_home(self) -> bool:
        """Whether every rank owns what it owns at home."""
        return self.owned == self.home

    @property
    def products(self) -> tuple[float, ...]:
        """Return what each rank owns of the products, in whole units, in units of a rank's at even shares."""
        by, products = self._products
        if by != self.owned:
            is_even = len(set(self.owned)) == 1
            products = (1.0,) * self.num_ranks if is_even else owned_shares(self.owned, self.segments)
            self._products = self.owned, products
        return products

    def checked(self, shares: Sequence[float]) -> tuple[float, ...]:
        """Return shares that a user gives, in any unit, scaled to mean 1.

        Raises:
            ValueError: if they are not one of each rank, finite, not negative and not all 0, or nothing can move.
        """
        owned = checked_shares(shares, self.num_ranks)
        if len(set(owned)) > 1 and not self.segments:
            raise ValueError(f"shares={list(shares)}: the model has no units that can change their owner")
        return owned

    def put(self, shares: Sequence[float], *, is_held: bool) -> None:
        """Put in force from now on what a user has decided."""
        self.owned_before, self.owned, self.gain_s = self.owned, self.checked(shares), 0.0
        self._was_held, self.is_held = self.is_held, is_held
        self._settle()

    def price_s(self, wanted: Sequence[float]) -> float:
        """Return the seconds of a move from the present division to another, and back; one way home."""
        if not self._work:
            return 0.0
        now, then = (owned_shares(shares, self.segments) for shares in (self.owned, wanted))
        most = max(abs(after - before) for before, after in zip(now, then, strict=True))
        num_bytes = most / self._work * self.bytes_of_units
        if not num_bytes:
            return 0.0
        if tuple(wanted) == self.home or not self.cost.seconds(num_bytes):
            return self.cost.seconds(num_bytes)
        return self.cost.there_and_back(num_bytes) + self.comparing_s

    def update(
        self,
        wanted: tuple[float, ...],
        saved_s: float,
        num_steps: int,
        *,
        step_s: float = 0.0,
        gain_s: float = 0.0,
        waits: bool = False,
        must: bool = False,
    ) -> bool:
        """Decide whether to move to what is wanted.

        Args:
            wanted: what every rank should own.
            saved_s: by how much steps would be shorter then, seconds; 0 where that is noise.
            num_steps: until the next decision.
            step_s: how long steps are, seconds; 0 where that is not known.
            gain_s: by how much they would be shorter than at even shares.
            waits: whether something else than the price speaks against it; what is owed adds up all the same.
            must: whether the present division cannot stay, whatever the other costs; nothing moves for a while then.
        """
        self.late_s *= 1.0 - _FORGETTING
        self.owned_before, self._was_held = self.owned, self.is_held
        if self.is_held:
            return False
        self.rental.next_update()
        self.moves_lately *= 0.5 ** (num_steps / _HALF_LIFE)
        movers = self._movers(wanted)
        common = self.movers & movers
        if not common:  # nobody, or somebody else
            self.rental.settle()
        self.movers = common or movers
        if must and not self.rental.pause:
            self.owned, self.gain_s = wanted, gain_s
            self._settle()
            self.rental.pause = FIRST_PAUSE
            return True
        is_homecoming = wanted == self.home
        self.sure = self.sure + 1 if movers and is_homecoming and saved_s > 0.0 else 0
        if not movers:
            return False
        self.rental.charge({_WANTED: saved_s}, num_steps)
        if waits or saved_s <= 0.0 or self.rental.pause:
            return False
        price_s = self.price_s(wanted)
        if is_homecoming:
            if not self.rental.is_due(_WANTED, price_s) and self.sure < _SURE_UPDATES:
                return False
        else:
            mistrust_s = self.account.mistrust_s(price_s, _UNNOTICED_UPDATES * num_steps * self.late_s)
            if self.is_home:
                price_s *= 1.0 + self.moves_lately * (_CHASED * step_s / saved_s) ** 4
            if not self.rental.is_due(_WANTED, price_s + mistrust_s):
                return False
            self.moves_lately += 1.0
        self.owned, self.gain_s = wanted, gain_s
        self._settle()
        return True

    def came_late(self, lost_s: float) -> None:
        """Note that steps under the present division were longer than at home, by so many seconds each."""
        if self.gain_s > 0.0:
            counted_s = min(lost_s, _MOST_LATE * self.gain_s)
            self.late_s += (_WEIGHT_OF_LATE if self.late_s else 1.0) * (counted_s - self.late_s)

    def refuse(self, in_force: tuple[float, ...]) -> None:
        """Note that the last move was not made: ``in_force`` stays, and nothing is tried for a while."""
        self.is_held = self._was_held and in_force == self.owned_before
        if self.owned != self.home and not self.is_held:
            self.moves_lately = max(self.moves_lately - 1.0, 0.0)
        self.owned = self.owned_before = in_force
        self.gain_s = 0.0
        self._settle()
        self.rental.refuse()

    def learn(self, num_bytes: float, seconds: float, comparing_s: float = 0.0) -> None:
        """Learn from a move that was made, after which ranks compared products for so long; 0 if they did not."""
        self.cost = self.cost.learned(num_bytes, seconds)
        if comparing_s > 0.0:
            self.comparing_s += _WEIGHT * (comparing_s - self.comparing_s)
        self.account.take(seconds + comparing_s, seconds + comparing_s, 0)
        self.rental.succeed()

    def _movers(self, wanted: Sequence[float]) -> frozenset[tuple[int, bool]]:
        changes = [new - now for now, new in zip(self.owned, wanted, strict=True)]
        most = max(map(abs, changes))
        return frozenset(
            (rank, change > 0.0) for rank, change in enumerate(changes) if most and abs(change) >= _MOVERS * most
        )

    def _settle(self) -> None:
        self.rental.settle()
        self.movers, self.sure = frozenset(), 0
