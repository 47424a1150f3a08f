"""In which blocks of training the layers are measured: as often as measuring may cost.

A profile costs what its block takes longer than usual, and what sending, reading and deciding take. All ranks are given
the same figures, so all measure in the same blocks.

``R`` ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

ProfileEvery = int | Literal["auto"]

#: Blocks between two profiles with "auto", at least, and with any number while nothing is known of what they cost.
LEAST_BLOCKS = 10
#: And at most: where a profile takes so many steps, as where steps take no millisecond, it exceeds its share.
MOST_BLOCKS = 1000
#: But no more before so many costs are known: the first ones are those of code and memory that are used for the first
#: time.
_MOST_BLOCKS_AT_FIRST, _FIRST = 100, 3
#: Share of training that measuring takes at most, unless the user says otherwise.
MAX_MEASURING = 0.01
#: Of that, what the interval aims at: costs vary by about as much as they are, and some of it is in no rank's clock.
_AIMED = 0.5
#: The middle one of so many profiles' costs counts.
_REMEMBERED = 5
#: Profiles beside the regular ones are made up for by longer intervals, but no longer than so many: layers that have
#: moved for a slow device are wrong where they are from the moment that it recovers. With half of the share as an aim
#: that is still within it.
_MOST_OWED = 2


@dataclass(frozen=True)
class SpentSeconds:
    """Describe what measuring has taken on one rank. Seconds are of its processor, waits are not in them.

    Attributes:
        usual_s: of a block that is not measured; 0 where there were too few.
        profiled_s: of the measured block.
        handling_s: of sending and reading profiles and of deciding by them, since the last measured block.
        step_s: from one block that is not measured to the next; 0 where there were too few. On a GPU it is wall time.
    """

    usual_s: float
    profiled_s: float
    handling_s: float
    step_s: float


def profile_cost(ranks: Sequence[SpentSeconds]) -> float | None:
    """Return how many steps a profile takes, such as 0.05; None where a rank does not know what is usual.

    The stages' blocks are lengthened side by side, so the middle rank [R] counts; for what is decided all wait for the
    slowest one, and it is never less than that. A step takes as long as on the busiest rank.
    """
    if not all(rank.step_s > 0.0 for rank in ranks):
        return None
    longer_s = median(rank.profiled_s - rank.usual_s for rank in ranks)
    handling_s = max(rank.handling_s for rank in ranks)
    return (max(longer_s, 0.0) + handling_s) / max(rank.step_s for rank in ranks)


@dataclass
class ProfileCadence:
    """Say which blocks are measured: one in so many, and the next one where there is something to look at.

    What was measured beside the regular profiles, as behind moves, lengthens the interval that follows.

    Attributes:
        profile_every: the least number of blocks from one regular profile to the next; "auto" for
            :data:`LEAST_BLOCKS`.
        max_measuring: share of the steps' time that profiles may take, of which half is aimed at; infinity for no
            limit.
        next_due: the block that is measured next, counted from 0.
        costs: steps that each of the last profiles has taken, the newest last.
    """

    profile_every: ProfileEvery
    max_measuring: float = math.inf
    next_due: int = 0
    costs: tuple[float, ...] = ()
    _last: int = field(default=0, init=False, repr=False)
    _regular_due: int = field(default=0, init=False, repr=False)
    #: The blocks by which the profiles before the last one, and with it, have been made up for.
    _paid_before: int = field(default=0, init=False, repr=False)
    _paid: int = field(default=0, init=False, repr=False)
    #: Whether work has changed since the last profile, and whether it is then measured twice; and when it last was.
    _is_changed: bool = field(default=False, init=False, repr=False)
    _is_twice: bool = field(default=False, init=False, repr=False)
    _last_changed: int | None = field(default=None, init=False, repr=False)

    @property
    def cost(self) -> float:
        """Return how many steps a profile takes; NaN while it is not known."""
        return median(self.costs) if self.costs else math.nan

    @property
    def measures_all(self) -> bool:
        """Return whether every block is measured, whatever that costs."""
        return self.profile_every == 1 and self.max_measuring == math.inf

    @property
    def least(self) -> int:
        """Return the blocks from one regular profile to the next, at least."""
        return LEAST_BLOCKS if self.profile_every == "auto" else self.profile_every

    @property
    def every(self) -> int:
        """Return the blocks from one regular profile to the next, as far as is known now."""
        if self.max_measuring < math.inf and not self.costs:
            return max(self.least, LEAST_BLOCKS)
        return max(self.least, self._affordable)

    def blocks_to_next(self, num_blocks: int) -> int:
        """Return the blocks until the next regular profile once so many are over; never fewer than :attr:`every`."""
        return max(self.every, self.next_due - num_blocks)

    @property
    def _affordable(self) -> int:
        """Blocks in which a profile takes the share that is aimed at."""
        if not self.costs:
            return 0
        most = MOST_BLOCKS if len(self.costs) >= _FIRST else _MOST_BLOCKS_AT_FIRST
        return math.ceil(min(self.cost / (_AIMED * self.max_measuring), most))

    def is_due(self, block: int) -> bool:
        """Return whether the layers are measured in this block."""
        return block >= self.next_due

    def measured(self, block: int) -> None:
        """Schedule the next profile behind this block, which was measured."""
        self._last, self._paid_before = block, self._paid
        self._schedule()
        if self._is_changed:
            self._is_changed, self._last_changed = False, block
            if self._is_twice:
                self.look_again(block)

    def learn(self, cost: float | None) -> None:
        """Learn how many steps the last profile has taken, None for unknown, and schedule the next one by it."""
        if cost is None:
            return
        self.costs = (*self.costs, cost)[-_REMEMBERED:]
        if self.next_due == self._regular_due:
            self._schedule()

    def _schedule(self) -> None:
        owed = min(max(self._paid_before - self._last, 0), (_MOST_OWED - 1) * self._affordable)
        self._paid = self._last + owed + self._affordable
        self.next_due = self._regular_due = max(self._last + self.every, self._paid)

    def begin_anew(self, costs: Sequence[float]) -> None:
        """Let the next block be due, with what was known of profiles' costs."""
        self.costs = tuple(costs)
        self.next_due = self._last = self._regular_due = self._paid_before = self._paid = 0
        self._is_changed, self._last_changed = False, None

    def work_changed(self, block: int, *, at_once: bool) -> None:
        """Schedule profiles in this block and the one behind it, as layers have other work from this block on.

        What the first one wants is confirmed by the second one, which is measured before the first one's figures are
        known: so layers are in place a step earlier.

        Args:
            at_once: whatever that costs. If not, and work changes so often that two profiles, or even one, would take
                more than their share of the steps since the last change that was measured, there is one, or it comes
                later.
        """
        self._is_changed, self._is_twice, self.next_due = True, True, block
        if at_once or self._last_changed is None or not self.costs:
            return
        blocks_each = math.ceil(min(self.cost / self.max_measuring, MOST_BLOCKS))
        self._is_twice = block - self._last_changed >= 2 * blocks_each
        self.next_due = max(block, self._last_changed + blocks_each)

    def look_again(self, block: int) -> None:
        """Schedule the next profile in the block after this one, as it must confirm what this one's profile wants."""
        self.next_due = block + 1

    def moved(self, block: int) -> None:
        """Schedule the next profile after layers have moved behind this block.

        The block that follows allocates, so unless all blocks are measured it is the one after that.
        """
        self.next_due = block + (2 if self.every > 1 else 1)
