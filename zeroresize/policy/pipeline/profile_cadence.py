"""In which blocks of training the layers are measured: as often as measuring may cost.

A profile costs what its block takes longer than usual, and what sending, reading and deciding take. All ranks are given
the same figures, so all measure in the same blocks. One rule: each profile is made up for by so many blocks that it
takes its share of them, and where there is something to look at the next one comes before. ``R`` ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from zeroresize.policy import FEW

ProfileEvery = int | Literal["auto"]

#: Blocks between two profiles with "auto", at least, and with any number while nothing is known of what they cost.
LEAST_BLOCKS = 10
#: And at most: where a profile takes so many steps, as where steps take no millisecond, it exceeds its share.
MOST_BLOCKS = 1000
#: Share of training that measuring takes at most, unless the user says otherwise.
MAX_MEASURING = 0.01
#: The middle one of so many profiles' costs counts, and of told changes for which nothing moved so many in a row are
#: measured at once, further ones in regular profiles.
_REMEMBERED = LEAST_BLOCKS // 2


@dataclass(frozen=True)
class SpentSeconds:
    """Describe what measuring has taken on one rank. Seconds are of its processor, waits are not in them."""

    usual_s: float  # of a block that is not measured; 0 where there were too few
    profiled_s: float  # of the measured block
    handling_s: float  # of sending and reading profiles and of deciding by them, since the last measured block
    step_s: float  # from one block that is not measured to the next; 0 where there were too few; on a GPU wall time


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
    """Say which blocks are measured: one in so many, and before that what there is to look at.

    Attributes:
        profile_every: the least number of blocks from one regular profile to the next; "auto" for
            :data:`LEAST_BLOCKS`.
        max_measuring: share of the steps' time that profiles may take, of which half is aimed at; infinity for no
            limit.
        costs: steps that each of the last profiles has taken, the newest last.
    """

    profile_every: ProfileEvery
    max_measuring: float = math.inf
    costs: tuple[float, ...] = ()
    _last: int | None = field(default=None, init=False, repr=False)
    #: Blocks by which the profiles before the last one are still to be made up for.
    _owed: int = field(default=0, init=False, repr=False)
    #: Blocks that are looked at before the next regular profile, ascending.
    _asked: tuple[int, ...] = field(default=(), init=False, repr=False)
    _num_unfollowed: int = field(default=0, init=False, repr=False)

    @property
    def cost(self) -> float:
        """How many steps a profile takes; NaN while it is not known."""
        return median(self.costs) if self.costs else math.nan

    @property
    def least(self) -> int:
        """Blocks from one regular profile to the next, at least."""
        return LEAST_BLOCKS if self.profile_every == "auto" else self.profile_every

    @property
    def every(self) -> int:
        """Blocks from one regular profile to the next, as far as is known now."""
        unknown = LEAST_BLOCKS if self.max_measuring < math.inf and not self.costs else 0
        return max(self.least, unknown, self._affordable)

    @property
    def next_due(self) -> int:
        """The block that is measured next, counted from 0."""
        if self._asked:
            return self._asked[0]
        return 0 if self._last is None else self._last + max(self.every, self._owed + self._affordable)

    def blocks_to_next(self, num_blocks: int) -> int:
        """Return the blocks until the next regular profile once so many are over; never fewer than :attr:`every`."""
        return max(self.every, self.next_due - num_blocks)

    @property
    def _affordable(self) -> int:
        """Blocks in which a profile takes the share that is aimed at."""
        if not self.costs:
            return 0
        # The first costs are those of code and memory that are used for the first time.
        most = MOST_BLOCKS if len(self.costs) >= FEW else LEAST_BLOCKS**2
        # Half the share is aimed at: costs vary by about as much as they are, and some of it is in no rank's clock.
        return math.ceil(min(2.0 * self.cost / self.max_measuring, most))

    def is_due(self, block: int) -> bool:
        """Return whether the layers are measured in this block."""
        return block >= self.next_due

    def measured(self, block: int) -> None:
        """Note that this block was measured. What is owed then is one interval at most: devices must be looked at."""
        owed = 0 if self._last is None else self._last + self._owed + self._affordable - block
        self._owed = min(max(owed, 0), self._affordable)
        self._last, self._asked = block, tuple(asked for asked in self._asked if asked > block)

    def learn(self, cost: float | None) -> None:
        """Learn how many steps the last profile has taken; None for unknown."""
        if cost is not None:
            self.costs = (*self.costs, cost)[-_REMEMBERED:]

    def begin_anew(self, costs: Sequence[float]) -> None:
        """Let the next block be due, with what was known of profiles' costs."""
        self.costs, self._last, self._owed, self._asked, self._num_unfollowed = tuple(costs), None, 0, (), 0

    def work_changed(self, block: int) -> None:
        """Look at this block and the one behind it, as layers have other work from this block on.

        The second one, which confirms what the first one wants, is measured before the first one's figures are known:
        so layers are in place a step earlier. Where several such changes in a row have moved nothing, regular ones do.
        """
        self._num_unfollowed += 1
        self._asked = (block, block + 1) if self._num_unfollowed <= _REMEMBERED else ()

    def look_again(self, block: int) -> None:
        """Look at the block after this one, as it must confirm what this one's profile wants."""
        self._asked = (block + 1,)

    def moved(self, block: int) -> None:
        """Look at layers that have moved behind this block, but not in the next one, which allocates."""
        self._asked, self._num_unfollowed = (block + (2 if self.every > 1 else 1),), 0
