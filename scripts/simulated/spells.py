"""Spells of slowness near a move, of which it is asked whether units come home soon after them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scripts.simulated.cluster import Cluster
from scripts.simulated.noise import Noise
from scripts.simulated.scenario import believed_cost
from scripts.simulated.training import simulate, unbalanced_step_s
from zeroresize.config import BalanceConfig
from zeroresize.plan.ownership import SegmentWork, owned_shares
from zeroresize.policy.moves.move_cost import MoveCost
from zeroresize.policy.tensor.costs import MigrationCost, ResizingCost

#: So fine that whole units are no matter.
SEGMENTS = (SegmentWork(16384, 8, 1.0),)
#: What fewer columns cost: 20 % of them take 28 % of the time, 5 % take 10 %.
COST = ResizingCost(
    (0.0, 0.18, 0.36, 0.54, 0.72, 0.9), (1.0, 0.85, 0.69, 0.53, 0.36, 0.16), (0.0, 0.002, 0.002, 0.002, 0.002, 0.001)
)
#: Updates within which units are to be home after a spell, besides those in which the move's price is saved; the most.
_UPDATES, _MOST_UPDATES = 4, 8
#: Of an undisturbed step, how long steps may take from then on.
LONGEST = 1.05
#: Home is better by more than noise where it saves this share of a step, or so many standard deviations of a step.
_LEAST_SAVED, _DEVIATIONS = 0.02, 2.0
#: Intervals before and after the part of a run that matters.
_BEFORE, _AFTER = 12, 12


@dataclass(frozen=True)
class Spell:
    """One rank is slow for a while, near a move.

    Attributes:
        num_ranks, update_every, mode: of the group.
        chi: χ of the last rank meanwhile.
        slows: "products", or "all" of its work.
        units_left: share of its units that a move by hand leaves it; None where the controller alone decides.
        begins, ends: steps from the move by hand on; where there is none, from an update on.
        calibration, factor: how what pruning costs was measured wrong, as in ``scenario.py``.
        rest_s, gemm_s: seconds of a step.
        move_s: of a move.
        moving_rest: share of ``rest_s`` that moves along.
        deviation: of the noise, relative.
    """

    num_ranks: int = 4
    update_every: int = 10
    mode: str = "exact"
    chi: float = 3.0
    slows: str = "products"
    units_left: float | None = None
    begins: int = 3
    ends: int = 23
    calibration: str = "share"
    factor: float = 1.0
    rest_s: float = 0.04
    gemm_s: float = 0.06
    move_s: float = 0.05
    moving_rest: float = 0.2
    deviation: float = 0.0

    @property
    def middle(self) -> int:
        """The step of the move by hand."""
        return self.update_every * (_BEFORE + 3)

    def cluster(self, seed: int, *, is_slow: bool = True) -> Cluster:
        begins, ends = self.middle + self.begins, self.middle + self.ends
        others = (1.0,) * (self.num_ranks - 1)

        def chi(step: int) -> list[float]:
            return [*others, self.chi if is_slow and begins <= step < ends else 1.0]

        return Cluster(
            chi, self.rest_s, self.gemm_s, COST, MigrationCost(0.001, 0.01), noise=Noise(self.deviation), seed=seed,
            segments=SEGMENTS if self.mode in ("exact", "semi") else (), bytes_of_units=1.0,
            move=MoveCost(0.0, self.move_s), moving_rest=self.moving_rest, slows_rest=self.slows == "all",
        )  # fmt: skip

    @property
    def divisions(self) -> dict[int, tuple[float, ...]]:
        """The move by hand."""
        if self.units_left is None:
            return {}
        others = (self.num_ranks - self.units_left) / (self.num_ranks - 1)
        return {self.middle: (*(others,) * (self.num_ranks - 1), self.units_left)}

    def step_s(self, shares: Sequence[float]) -> float:
        """Seconds of a step of equally fast ranks that own these shares."""
        owned = owned_shares(shares, SEGMENTS)
        rest = [self.rest_s * (1.0 - self.moving_rest * (1.0 - share)) for share in owned]
        return max(own + self.gemm_s * COST.executed_at(share) for own, share in zip(rest, owned, strict=True))


@dataclass(frozen=True)
class Outcome:
    """What became of a spell.

    Attributes:
        moved: whether anything was away, lent or pruned when it ended or later.
        late: updates later than allowed that all was home and whole; inf is never, 0 in time.
        updates: how many it took.
        step: mean step from the deadline on, as a ratio to that of the same run without a spell and with balancing off.
    """

    moved: bool
    late: float
    updates: float
    step: float


def outcome(spell: Spell, seed: int) -> Outcome:
    every = spell.update_every
    config = BalanceConfig(mode=spell.mode, update_every=every)
    ends = spell.middle + max(spell.ends, 0 if spell.units_left is not None else -(10**9))
    num_steps = -(-ends // every) * every + every * (_MOST_UPDATES + _AFTER) + (80 if every == 1 else 0)
    believed = believed_cost(COST, spell.calibration, spell.factor)
    run = simulate(config, spell.cluster(seed), num_steps, believed_cost=believed, divisions=spell.divisions)
    off = unbalanced_step_s(spell.cluster(seed, is_slow=False), num_steps)
    home = (1.0,) * spell.num_ranks
    homogeneous_s = spell.rest_s + spell.gemm_s
    threshold = max(_LEAST_SAVED, _DEVIATIONS * spell.deviation)
    away_until, moved, saving = ends, False, math.inf
    for update, (owned, pruned, lent) in enumerate(zip(run.owned, run.ratios, run.lent, strict=True)):
        step = (update + 1) * every
        if step < ends - every:
            continue
        saved = spell.step_s(owned) / homogeneous_s - 1.0
        is_away = owned != home and saved > threshold
        if is_away or any(one + other > 0.01 for one, other in zip(pruned, lent, strict=True)):
            moved = True
            away_until = max(away_until, min(step + every, num_steps))
        if is_away:
            saving = min(saving, saved * homogeneous_s)
    price_updates = math.ceil(spell.move_s / saving / every) if saving < math.inf else 0
    allowed = _UPDATES + price_updates
    allowed = min(allowed, _MOST_UPDATES) if every >= 5 else allowed
    deadline = min(-(-ends // every) + allowed, num_steps // every - 1) * every
    updates = (away_until - ends) / every
    late = max(-(-away_until // every) - deadline // every, 0)
    step = statistics.fmean(run.step_s[deadline:]) / statistics.fmean(off[deadline:])
    return Outcome(moved, math.inf if away_until >= num_steps else float(late), updates, step)


def drawn(number: int, seed: int, modes: Sequence[str]) -> list[Spell]:
    """Draw ``number`` settings; equal seeds give equal settings."""
    draw = np.random.default_rng(seed)
    spells = []
    for index in range(number):
        every = int(draw.choice([1, 5, 10]))
        begins, ends = sorted(draw.choice(np.arange(-3 * every, 3 * every + 1), 2, replace=False).tolist())
        mode = modes[index % len(modes)]
        by_hand = len(modes) == 1 and draw.random() < 0.7
        wrong = draw.random() < 0.5
        left = float(draw.choice([0.0, draw.uniform(0.0, 0.5)], p=[0.1, 0.9]))
        spells.append(
            Spell(
                num_ranks=int(draw.choice([2, 4, 8])),
                update_every=every,
                mode=mode,
                chi=round(float(np.exp(draw.uniform(math.log(1.5), math.log(10.0)))), 3),
                slows=str(draw.choice(["products", "all"])),
                units_left=round(left, 3) if by_hand else None,
                begins=begins,
                ends=ends if by_hand else begins + int(draw.integers(1, 7 * every + 1)),
                calibration=str(draw.choice(["share", "savings", "power"])),
                factor=float(draw.choice([0.5, 2**-0.5, 2**0.5, 2.0])) if wrong else 1.0,
                moving_rest=round(float(draw.uniform(0.0, 0.6)), 3),
                move_s=round(float(np.exp(draw.uniform(math.log(0.01), math.log(0.5)))), 4),
                deviation=float(draw.choice([0.0, 0.01, 0.03])),
            )
        )
    return spells
