"""Who is slow in which epoch: ``schedule(epoch, num_ranks)`` gives {rank within the group: χ}.

The straggling skewness χ is how many times the normal time a straggler's products take; ranks that are not named, and
χ = 0 (as in the paper's figures), mean 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from zeroresize.utils.value_checks import is_number, plain

Schedule = Callable[[int, int], Mapping[int, float]]

Scope = Literal["gemm", "all"]
SCOPES: tuple[str, ...] = get_args(Scope)
#: By name, as in configurations.
SCHEDULES = ("static", "round_robin")


def static(chi: Mapping[int, float]) -> Schedule:
    """Return a schedule of the same stragglers in every epoch, such as ``static({0: 8, 1: 6})``."""
    stragglers = dict(chi)
    return lambda epoch, num_ranks: stragglers


def round_robin(chi: float = 2.0) -> Schedule:
    """Return a schedule in which rank ``epoch % num_ranks`` is ``chi`` times slower (paper, Fig. 7 to 9)."""
    return lambda epoch, num_ranks: {epoch % num_ranks: chi}


def checked_chi(chi: Any, num_ranks: int) -> dict[int, float]:
    """Return ``chi`` as {rank: χ ≥ 1}; ValueError for a rank outside the group, or a χ neither 0 nor at least 1."""
    if not isinstance(chi, Mapping):
        raise ValueError(f"chi={chi!r} is not allowed: expected a mapping of rank to χ such as {{0: 4.0}}")
    chi = {plain(rank): plain(value) for rank, value in chi.items()}
    ranks_allowed = f"allowed are 0 to {num_ranks - 1}, counted within the group"
    for rank in chi:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < num_ranks:
            raise ValueError(f"chi={dict(chi)!r}: rank {rank!r} is not one of the group's {num_ranks}: {ranks_allowed}")
    return {rank: _checked_skewness(rank, value) for rank, value in chi.items()}


def _checked_skewness(rank: int, value: Any) -> float:
    if not is_number(value) or not (value == 0 or value >= 1):
        raise ValueError(f"chi={{{rank!r}: {value!r}}} is not allowed: χ is a finite number of at least 1 (0 means 1)")
    return float(value) if value else 1.0
