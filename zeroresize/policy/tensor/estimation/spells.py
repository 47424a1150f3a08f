"""How long ranks stay slow: what a plan that comes late can expect to be good for.

A rank that was slow in ``a`` intervals in a row is met by a plan that is in force from the next but one on, and until
one interval after the first that shows that the rank has recovered. A spell of ``d`` intervals so leaves d − a − 1 of
them in which the plan is good for something, and one or two in which it is good for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

#: What an interval under a plan that is good for nothing costs, as a share of its time.
COST_IN_VAIN = 0.055
#: Past spells that the prior counts as much as.
PRIOR_SPELLS = 0.5
#: So many past spells are kept, and one is as useful as twice as many intervals at most. At an update one of four times
#: as many parts of what was seen of them is forgotten.
_MOST_SPELLS = 16
_MOST_USEFUL, FORGETTING = 2 * _MOST_SPELLS, 1 / (2 * 2 * _MOST_SPELLS)
#: A past spell counts if it was this much as costly as the present one, or more.
_ALIKE = 0.75
#: Steps: a spell of one step in intervals of one may be a hiccup.
_HICCUP = 0.35


@dataclass
class Spells:
    """Remember the spells of a group in which ranks were slow.

    Attributes:
        ages: for how many updates each rank has been slow.
        costs: the largest share of a step that it could have been spared since.
        past: (rank, share, age when it ended, weight) of those that have ended.
    """

    num_ranks: int
    ages: list[int] = field(init=False)
    costs: list[float] = field(init=False)
    past: list[tuple[int, float, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ages, self.costs = [0] * self.num_ranks, [0.0] * self.num_ranks

    def learn(self, are_slow: Sequence[bool], costs: Sequence[float]) -> None:
        """Take an update's ranks: who is slow, and what share of a step it costs."""
        self.past = [(rank, cost, age, weight * (1.0 - FORGETTING)) for rank, cost, age, weight in self.past]
        for rank, (is_slow, cost) in enumerate(zip(are_slow, costs, strict=True)):
            if is_slow:
                self.ages[rank] += 1
                self.costs[rank] = max(self.costs[rank], cost)
            elif self.ages[rank]:
                self.past.append((rank, self.costs[rank], self.ages[rank], 1.0))
                self.ages[rank], self.costs[rank] = 0, 0.0
        self.past = self.past[-_MOST_SPELLS:]

    def is_worth_it(self, rank: int, saved: float, steps_of_update: int) -> bool:
        """Whether a plan for a rank that is slow is expected to save more than it costs.

        Before anything was seen, spells of four times the length are a 32nd as frequent: P(d ≥ t) ∝ t^−2.5.

        Args:
            saved: share of a step that it saves while it is good for something.
            steps_of_update: steps between two updates.
        """
        age = self.ages[rank] * steps_of_update / (steps_of_update + _HICCUP)
        # Σ of P(d ≥ t) / P(d ≥ age) over t ≥ age + 2, nearly, with roots, which all machines have alike.
        late = 1.5
        useful = PRIOR_SPELLS * _survives(age, age + late) * (age + late) / late
        in_vain = PRIOR_SPELLS * (1.0 + _survives(age, age + 1.0))
        for whose, cost, end, weight in self.past:
            left = end - self.ages[rank]
            # That another rank was slow for long says nothing of this one.
            if cost >= _ALIKE * saved and left >= 0 and (whose == rank or left <= 1):
                useful += weight * min(max(left - 1, 0), _MOST_USEFUL)
                in_vain += weight * min(left + 1, 2)
        return saved * useful >= COST_IN_VAIN * in_vain


def _survives(age: float, longer: float) -> float:
    """P(d ≥ ``longer``) / P(d ≥ ``age``)."""
    ratio = age / longer
    return ratio * ratio * math.sqrt(ratio)  # multiplied, since machines need not have powers alike
