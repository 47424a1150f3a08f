"""Below which time no exact division of a group's work can bring a step: T*, by what is taken to change hands.

R ranks; rank i takes M_i seconds for the products of an even share, and R_i for the rest of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zeroresize.policy.tensor.estimation.times import RankTimes


@dataclass(frozen=True)
class Bounds:
    """Tells how short a step can be if nothing is left out and sending costs nothing, seconds.

    Attributes:
        of_products: if products could be handed over alone, and everything else stayed where it is.
        of_units: if what lies between the products of a unit moves along with it, such as activation functions and the
            inner products of attention: at most a rank's ``moving_rest`` of the rest of its step, as far as is known.
    """

    of_products: float
    of_units: float

    @classmethod
    def of(cls, times: Sequence[RankTimes]) -> Bounds:
        """Return the bounds of ranks that take these times at even shares."""
        rest_s, gemm_s = [rank.rest_s for rank in times], [rank.gemm_s for rank in times]
        return cls(
            work_conserving_bound_s(rest_s, gemm_s, [0.0] * len(times)),
            work_conserving_bound_s(rest_s, gemm_s, [rank.moving_rest for rank in times]),
        )


def work_conserving_bound_s(rest_s: Sequence[float], gemm_s: Sequence[float], moving_rest: Sequence[float]) -> float:
    """Return the least t at which the ranks have done R even shares together, whichever part of it each does.

    A rank that does the share f takes (1 − ρ) R + f (ρ R + M) seconds. With ρ = 0 and equal R it is T* = R + M e / Σ
    (1 / χ).

    Args:
        rest_s, gemm_s: [R] seconds at even shares.
        moving_rest: [R] ρ, the share of a rank's rest that moves along with its work.
    """
    stays_s = [rest * (1.0 - moving) for rest, moving in zip(rest_s, moving_rest, strict=True)]
    moves_s = [max(rest * rho + gemm, 1e-12) for rest, rho, gemm in zip(rest_s, moving_rest, gemm_s, strict=True)]
    speed = math.fsum(1.0 / seconds for seconds in moves_s)
    behind = math.fsum(stays / moves for stays, moves in zip(stays_s, moves_s, strict=True))
    return max((len(stays_s) + behind) / speed, *stays_s)
